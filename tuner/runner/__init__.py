"""Runs one trial: simulated on a model of a GPU, or measured on a device."""
