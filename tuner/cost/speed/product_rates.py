"""What products reach: the peak of their precision, the power limit, and the use of tiles."""

from __future__ import annotations

import numpy as np

from tuner.core.gpu import Gpu
from tuner.cost.compiled import Floats
from tuner.cost.speed.power import sustained_flops
from tuner.cost.work_arrays import WorkArrays

_PRECISION_OF_DTYPE = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    # Data sheets of Ada, Hopper and Blackwell give 8-bit floats the rate of 8-bit integers.
    "float8_e4m3fn": "int8",
    "float8_e5m2": "int8",
}


def matmul_peak(gpu: Gpu, dtype: str, allow_tf32: bool) -> float:
    """Dense FLOP/s of the GPU for operands of `dtype` (a torch dtype name).

    A type without tensor cores for it (bf16 on Turing, int8 on Volta) runs at the fp32 rate.
    """
    return gpu.flops[rate_of(gpu, dtype, allow_tf32)]


def power_limit(gpu: Gpu, dtype: str, allow_tf32: bool) -> float:
    """FLOP/s of steady products of `dtype` that the GPU's power limit allows."""
    return sustained_flops(gpu, rate_of(gpu, dtype, allow_tf32))


def rate_of(gpu: Gpu, dtype: str, allow_tf32: bool) -> str:
    """The key of `Gpu.flops` whose rate operands of `dtype` run at."""
    if dtype == "float32" and allow_tf32 and "tf32" in gpu.flops:
        return "tf32"
    precision = _PRECISION_OF_DTYPE.get(dtype, "fp32")
    return precision if precision in gpu.flops else "fp32"


def tile_use(works: WorkArrays, gpu: Gpu, tile: int, fill: float) -> Floats:
    """Share of each product's tiles and waves that is not padding, shape (W, P).

    A product of m x n runs as tiles of at most 128 x 128, `sm_count` at a time (NVIDIA, Matrix
    Multiplication Background User's Guide, "Tile quantization" and "Wave quantization"). Thin
    products, as LoRA's, take smaller tiles, down to 16 wide, and split a long k over the
    multiprocessors that would idle. `fill` is how many waves it takes to fill and drain the
    pipeline.
    """
    batch, m, n, k = (works.shapes[:, axis, :] for axis in range(4))
    tile_m, tile_n = _tile_side(m, tile), _tile_side(n, tile)
    tiles_m, tiles_n = np.ceil(m / tile_m), np.ceil(n / tile_n)
    waves = batch * tiles_m * tiles_n / gpu.sm_count
    split = np.minimum(1.0, waves * np.maximum(1.0, np.floor(k / 512)))
    waves = np.where(waves < 1, split, waves)
    full = (m * n) / (tiles_m * tiles_n * tile_m * tile_n)
    used: Floats = np.where(works.has_shape[:, None], full * waves / (np.ceil(waves) + fill), 1.0)
    return used


def _tile_side(size: Floats, tile: int) -> Floats:
    side: Floats = np.where(size >= tile, float(tile), np.ceil(size / 16) * 16)
    return side
