"""What trainers do with the settings that they are given, and without: a module for each.

A module here has `BEHAVIOURS`; nothing else has to know of it. Versions are those whose code was
read and whose programs were emulated beside the prediction (tests/test_emulated_settings.py).
"""
