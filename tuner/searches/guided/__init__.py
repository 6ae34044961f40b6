"""The sampler that starts from predictions."""
