"""Writes the chosen values into the user's own files, and changes no other byte."""
