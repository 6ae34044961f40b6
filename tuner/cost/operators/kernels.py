"""The kernels behind operators on CUDA, which tensors without data don't show.

Decompositions spell out operators that allocate buffers on the way, as the sequence of
allocations of their implementation. Leaves describe single kernels: FLOPs, class, and the workspace
beside inputs and outputs. Importing this module registers the operators of bitsandbytes, without
touching a device.
"""

from __future__ import annotations

from tuner.core.meanwhile import import_bitsandbytes
from tuner.cost.operators.aten_kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES, Kernels
from tuner.cost.operators.bnb_kernels import bnb_kernels

import_bitsandbytes()


_OF_BITSANDBYTES = bnb_kernels()

CUDA_KERNELS = Kernels(
    {**_OF_BITSANDBYTES.decompositions, **ATEN_DECOMPOSITIONS},
    {**_OF_BITSANDBYTES.leaves, **ATEN_LEAVES},
)
