"""What CUDA kernels do that tensors without data do not show.

Two tables, keyed by operator:

* decompositions spell out operators whose CUDA implementation allocates buffers on the
  way, as the sequence of allocations that implementation makes.
* leaves describe single kernels: their FLOPs, class, and the workspace alive beside
  inputs and outputs while they run.

Each entry names the implementation that it follows.
"""

from __future__ import annotations

from tuner.cost.operators import bnb_operators  # noqa: F401  (registers them)
from tuner.cost.operators.aten_kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES
from tuner.cost.operators.bnb_kernels import bnb_kernels
from tuner.cost.operators.leaf_kernels import Kernels

_OF_BITSANDBYTES = bnb_kernels()

CUDA_KERNELS = Kernels(
    {**_OF_BITSANDBYTES.decompositions, **ATEN_DECOMPOSITIONS},
    {**_OF_BITSANDBYTES.leaves, **ATEN_LEAVES},
)
