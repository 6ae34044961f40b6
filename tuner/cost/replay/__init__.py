"""Allocations replayed through the rules of the caching allocator: peak memory."""
