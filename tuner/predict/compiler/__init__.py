"""Timelines of all sizes, from a few traces."""
