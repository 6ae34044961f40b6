"""The settings of a training: what each is, may be and defaults to."""
