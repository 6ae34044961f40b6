"""The Python API: `tuner.search` and the other public functions."""
