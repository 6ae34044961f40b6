"""Predicts memory and speed without a GPU: trace, allocator replay, roofline."""
