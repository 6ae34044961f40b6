"""From the journal of a search to what people read: the front, the best, plot and report."""
