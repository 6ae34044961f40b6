"""Searching and predicting from Python: what `tuner.search` and its like are made of."""
