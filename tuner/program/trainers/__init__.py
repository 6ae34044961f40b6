"""One module for each trainer, with its `TRAINER`: how its settings are read and written.

Versions are those whose code was read; `tests/test_emulated_settings.py` compares them with the
emulated programs.
"""
