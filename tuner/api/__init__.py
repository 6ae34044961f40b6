"""Searching and predicting from Python: what `tuner.search` and its siblings are made of."""
