"""Predictions corrected by measurements, and their intervals."""
