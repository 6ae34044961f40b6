"""Benchmarks that anyone can run: accuracy, GPU measurements, start-up."""
