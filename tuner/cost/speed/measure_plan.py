"""The plan of `tuner calibrate` for a GPU: shapes, sizes and precisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.core.units import GIB, KIB
from tuner.cost.speed.microbench import AttentionCase

Shape = tuple[int, int, int]
"""(m, n, k) of a product of [m, k] by [k, n]."""

TRAINING_WIDTHS = (
    (2048, 2048),
    (4096, 4096),
    (14336, 4096),
    (32000, 2048),
    (128, 4096),
    (16, 4096),
    (64, 14336),
)
"""Output and input width of layers: square ones, MLPs, output heads, LoRA of rank 16 to 128."""

TRAINING_TOKENS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Measurements to make on a GPU."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    largest_traffic_bytes: int
    weights: tuple[tuple[int, int], ...]
    """Shapes of the weights that are dequantised."""
    attention: tuple[AttentionCase, ...]
    memory_bytes: int
    """Limit for the operands of one figure."""


def cuda_plan(compute_capability: tuple[int, int], free_bytes: int) -> MeasurePlan:
    """Shapes of 1B to 14B models; a minute on a data-centre GPU."""
    dtypes = ["fp16", "fp32"]
    if compute_capability >= (8, 0):
        dtypes = ["bf16", "fp16", "tf32", "fp32"]
    if compute_capability >= (7, 5):
        dtypes.append("int8")
    squares = [(size, size, size) for size in (1024, 4096, 8192)]
    training = product_shapes(tokens=TRAINING_TOKENS, widths=TRAINING_WIDTHS)
    half = "bf16" if compute_capability >= (8, 0) else "fp16"
    kernels = ("flash", "efficient", "eager") if compute_capability >= (8, 0) else ("efficient",)
    cases = [
        AttentionCase(kernel, half, max(1, 4096 // length), 16, length, head_dim)
        for length in (512, 2048, 4096)
        for head_dim in (64, 128, 256)
        for kernel in kernels
    ]
    cases += [AttentionCase("efficient", "fp32", 1, 16, length, 128) for length in (512, 2048)]
    return MeasurePlan(
        dtypes=tuple(dtypes),
        shapes=tuple(sorted({*squares, *training}, key=lambda s: s[0] * s[1] * s[2])),
        largest_traffic_bytes=min(GIB, free_bytes // 8),
        weights=((2048, 2048), (4096, 4096), (14336, 4096)),
        attention=tuple(cases),
        memory_bytes=free_bytes // 4,
    )


def product_shapes(*, tokens: Sequence[int], widths: Sequence[tuple[int, int]]) -> list[Shape]:
    """The shapes (m, n, k) of training: each layer forward, for its input and for its weight."""
    shapes = {
        shape
        for count in tokens
        for n, k in widths
        for shape in ((count, n, k), (count, k, n), (n, k, count))
    }
    return sorted(shapes, key=math.prod)


def traffic_sizes(largest_bytes: int) -> list[int]:
    """Sizes in bytes from 256 KiB up, four times as large each."""
    sizes = []
    size = 256 * KIB
    while size <= largest_bytes:
        sizes.append(size)
        size *= 4
    return sizes


def fitting(shapes: Sequence[Shape], item: int, limit_bytes: int) -> Iterator[Shape]:
    """The products whose factors and result take at most `limit_bytes`."""
    for m, n, k in shapes:
        if (m * k + k * n) * item + m * n * max(item, 4) <= limit_bytes:
            yield m, n, k
