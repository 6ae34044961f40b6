"""The cost of an operator on a device: kernels, rooflines, the caching allocator, collectives."""
