"""A training step traced on the meta device, as CUDA or a processor would run it."""
