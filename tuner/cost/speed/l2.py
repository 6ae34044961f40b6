"""The L2 cache in the roofline: what kernels pass to each other on the chip.

An elementwise kernel reads what the kernel before it wrote, and PyTorch's allocator gives it the
block that was freed last. Where all of its tensors fit into the L2 cache, that traffic never
reaches the memory. A copy within the cache is so much faster that it takes hardly any time: on an
RTX 4090 (72 MB) 3.6 TB/s for 16 + 16 MB, and 0.8 TB/s, the memory's rate, for 64 + 64 MB; on an
A100 (40 MB) 2.2 and 1.2 TB/s for 16 + 16 and 32 + 32 MB (github.com/smallscientist1/
cuda_microbenchmark). The other part of the traffic is saved long before or read long after:
activations that backward waits for, weights, residuals.

Products read weights, which are touched once in a pass, and are priced as if from memory. So is
an optimizer's update: no tensor of it was touched shortly before.
"""

from __future__ import annotations

import numpy as np

from tuner.core.gpu import Gpu
from tuner.cost.compiled import Floats
from tuner.cost.work_arrays import WorkArrays

KEPT = 0.5
"""Share of a small elementwise kernel's traffic that stays in the L2 cache: one of two tensors."""

KEPT_ENDS = (0.7, 0.0)
"""The most and the least of it: with 0.7, steps of LoRA on an L40S are 7 % too fast; without any,
4-bit steps on an RTX 4080 (Windows) are right, and with half of it 5 % too fast."""

CACHED = "elementwise"
"""The kind of operators whose tensors may stay in the cache."""


def left_by_l2(works: WorkArrays, gpu: Gpu, kept: float) -> Floats:
    """Share of each operator's traffic that goes to memory at each point, shape (W, P).

    What is kept falls in a straight line with the bytes of all tensors of an operator, to none
    where they are as large as the cache. All goes to memory where the cache's size is unknown.
    """
    if gpu.l2_bytes is None or not kept:
        return np.ones_like(works.bytes_moved)
    fits = np.maximum(0.0, 1.0 - works.bytes_moved / gpu.l2_bytes)
    left: Floats = 1.0 - kept * fits * (works.kinds == CACHED)[:, None]
    return left
