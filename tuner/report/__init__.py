"""From the journal of a search to front, recommendation, plot and report."""
