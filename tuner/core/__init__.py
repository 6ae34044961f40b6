"""The words, units, errors, settings, records, GPU types and processes that every room uses."""
