"""Predictions against published runs on real GPUs; see docs/accuracy.md."""
