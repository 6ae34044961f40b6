"""The formats: a file each, with its `FORMAT`."""
