"""Searches replayed on tables of outcomes where the truth is known."""
