"""Searches of several GPU types on a real Ray cluster of one machine, whose nodes come and go."""
