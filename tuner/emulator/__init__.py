"""An emulated GPU: runs CUDA programs, unchanged, on stand-ins for NVIDIA's libraries.

PyTorch's real allocator, dispatcher and optimizers run; kernels do nothing. Its numbers are called
*emulated*: see docs/emulator.md.
"""
