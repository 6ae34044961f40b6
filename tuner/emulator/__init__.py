"""A GPU that is not there: runs CUDA programs, unchanged, on stand-ins for NVIDIA's libraries.

PyTorch's real allocator, dispatcher and optimizers run; kernels do nothing. The numbers that come
out are called *emulated*: see docs/emulator.md.
"""
