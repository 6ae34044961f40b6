"""The kernels of an operator, and what they read, write and compute."""
