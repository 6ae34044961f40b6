"""Finds the fastest fine-tuning configuration that fits a GPU."""

__version__ = "0.1.0"
