"""Predictions from settings that were read, beside the emulated programs that have them."""
