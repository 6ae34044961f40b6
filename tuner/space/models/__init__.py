"""The models that `tuner` knows: architectures, no weights."""
