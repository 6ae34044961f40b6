"""A training step traced on the meta device, as CUDA would run it."""
