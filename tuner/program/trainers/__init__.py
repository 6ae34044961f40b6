"""What trainers do with the settings that they are given, and without: a module for each.

A module here has `BEHAVIOURS`; nothing else has to know of it. Versions are those whose code was
read; `python -m benchmarks.settings` holds them against the emulated programs.
"""
