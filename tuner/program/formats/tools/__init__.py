"""The formats: one file each, with its `FORMAT`."""
