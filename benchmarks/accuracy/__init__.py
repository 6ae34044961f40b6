"""Predictions against published runs on real GPUs; see docs/notebook/accuracy.md."""
