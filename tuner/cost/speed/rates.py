"""Rates of products and fused attention on a GPU: peaks, power limits, tiles, kernels.

A data sheet's rates hold at boost clock. Under steady matrix products many boards reach their
power limit first and lower the clock until they stay below it ("SW power cap" in nvidia-smi;
NVIDIA calls 24 of the T4's 65 TFLOP/s expected for that reason). The memory clock stays, so
traffic is not slower. A product then runs at power / energy of an operation, and that energy
is a property of the chip: four boards with GA10x chips and limits of 70 to 300 W agree on it
within 6 %, so that it can be taken from one board and used for another of the generation.

Which kernel runs is PyTorch's choice and known from the trace (`predict.tracing.cuda_path`): a
dense mask rules flash attention out, as do fp32 and heads of more than 256;
Turing and older have only the memory-efficient kernel. On Hopper and Blackwell's data-center
boards PyTorch takes cuDNN's instead of both (`as_chosen`). Shares are of
the dense peak that `Gpu.flops` has for 16-bit operands.

FLASH_2, by compute capability. 8.0: FlashAttention-2 paper (arxiv.org/abs/2307.08691, figures 4
to 6), A100, causal and not, 2k to 8k tokens. 8.6: github.com/gpu-mode/ring-attention/issues/10,
an RTX A5000 (111 TFLOP/s): 82 forward, 63 to 77 backward; 8.9 and 12.0 have the same instructions.
9.0: FlashAttention-3 paper (arxiv.org/abs/2407.08608, figures 5 and 6), which compares with it on
an H100, and github.com/pytorch/pytorch/pull/128888. 10.0: the same rate for each multiprocessor
as on 9.0, because the kernel uses none of Blackwell's instructions; it has no
published steps.

EFFICIENT, on 8.0: github.com/facebookresearch/xformers/pull/587, whose kernels PyTorch bundles;
64 x 16 heads of 1,024 tokens on an A100: 165, 184, 158 TFLOP/s forward with heads of 64, 128 and
256, and 93, 94, 41 backward; in fp32, which is three products in tf32, 49, 43, 42 and 34, 29, 30.
Ada and Blackwell's RTX run Ampere's instructions, and make of them what they make of flash
attention 2. On an H100 the masked runs below are 1.47 times as fast (heads of 96 and 128).

CUDNN over flash attention 2, both directions together: github.com/huggingface/transformers/
pull/48163, five GPUs. FLASH_3 on 9.0: its paper, causal, 2k to 8k tokens.

CUDNN_ON_HOPPER: kernel tables of training steps on an H100 SXM (PyTorch 2.11, cuDNN 9.19, causal;
November 2026), with the kernels of a backward pass that sum and convert. Fitted on 32 heads of 64
with 1,024 and 2,048 tokens and 32 of 128 with 2,048 and 8,192 tokens. Of the six other steps, with
9 to 32 heads, the rates are -12 to +7 % of it.

MASKED: what a dense mask leaves of the memory-efficient kernel's rate, from the seven 16-bit
runs of universal-llm-trainer on an A100 (docs/gpu_test.md there), whose batches have one: 62 to 65
TFLOP/s with heads of 128, 51 with 96, 37 with 256, against 120, 90 and 61 without a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tuner.core.gpu import Gpu
from tuner.cost.operators.timeline import MASK
from tuner.cost.work_arrays import Floats, WorkArrays

_PJ = 1e-12

JOULES_PER_FLOP: Mapping[tuple[int, int], Mapping[str, float]] = {
    (7, 0): {"fp16": 2.8 * _PJ},
    (7, 5): {"fp16": 2.9 * _PJ, "fp32": 16 * _PJ},
    (8, 0): {"fp16": 1.21 * _PJ, "tf32": 2.5 * _PJ},
    (8, 6): {"fp16": 2.47 * _PJ, "tf32": 4.9 * _PJ, "fp32": 12.6 * _PJ},
    (8, 9): {"fp16": 1.31 * _PJ, "tf32": 2.8 * _PJ, "fp32": 6.6 * _PJ},
    (9, 0): {"fp16": 0.75 * _PJ, "tf32": 1.5 * _PJ, "fp32": 9.7 * _PJ},
    (12, 0): {"fp16": 1.66 * _PJ, "tf32": 3.15 * _PJ, "fp32": 8.5 * _PJ},
}
"""Joules of a board per floating-point operation of large products, by compute capability.

Power limit over the steady rate of boards that run at their limit; fp16 stands for bf16 too.
The rates are public measurements of torch.mm with random square matrices (github.com/zzc0721/
torch-performance-test-data): of issues 72, 95, 96, 97, 108, 120, 124, 160, 161 and 185 the sizes
8192 and 10240, which take seconds; of database.md the best size, marked *, because it has no other:

- 7.0: V100S, 250 W: 88.9* TFLOP/s in fp16.
- 7.5: T4, 70 W: 24 in fp16 (4096, 100 times; forums.developer.nvidia.com/t/264462, with
  NVIDIA's explanation), 4.2* to 4.4* in fp32; T10, 150 W: 9.5* in fp32.
- 8.0: A100 PCIe 40 GB, 250 W: 198 to 215 in fp16 and bf16, 97 to 102 in tf32.
- 8.6: RTX A2000, 70 W: 28, 14.3, 5.2 in fp16, tf32, fp32; RTX A4000, 140 W: 58, 30, 11.4;
  A40, 300 W: 114, 59.5, 23.3; RTX A6000, 300 W: 120* in fp16, 23.9* in fp32.
- 8.9: L4, 72 W: 53 to 58, 26, 10.9; L40S, 350 W: 264* in fp16.
- 9.0: H100 PCIe, 350 W: 444 to 482, 233, 36.
- 12.0: RTX PRO 6000 Workstation Edition, 600 W: 318 to 350, 181, 69; Server Edition, 600 W: 374 to
  417, 202, 77; RTX 5090, 575 W: 66 in fp32. These three boards agree within 10 % of the mean.

A precision that is missing was not seen to run at the limit of any board.
"""

BOARDS_DIFFER = 1.10
"""Factor by which boards differ at their power limit: the rates above of the three
boards of 12.0 lie within 10 % of their mean, those of one type (A100, H100, L4) within 5 %."""


def sustained_flops(gpu: Gpu, precision: str) -> float:
    """FLOP/s of steady products that the power limit allows; infinite where it is not known.

    `precision` is a key of `Gpu.flops`. No rates are published for int8: it keeps the same
    share of its peak as fp16, which is the same clock.
    """
    joules = JOULES_PER_FLOP.get(gpu.compute_capability)
    if gpu.power_w is None or joules is None:
        return math.inf
    if precision == "int8":
        return sustained_flops(gpu, "fp16") * gpu.flops["int8"] / gpu.flops["fp16"]
    energy = joules.get("fp16" if precision == "bf16" else precision)
    return math.inf if energy is None else gpu.power_w / energy


_Capability = tuple[int, int]

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


FP32_SHARE: Mapping[_Capability, float] = {(7, 0): 0.95, (8, 0): 0.95, (9, 0): 0.76}
FP32_UNMEASURED = 0.85
"""Share of the fp32 peak that large products reach without tensor cores, by compute capability.

8.0: an A100's reach 90 to 98 % (github.com/zzc0721/torch-performance-test-data). 9.0: an H100 SXM's
50.7 of 66.9 TFLOP/s (issue 79 there), below what its power allows. 7.0 has no such source: with
the A100's share the steps of two programs on V100s are 2 % short to 9 % long. Others were seen at
their power limit only, or not at all: between the two. With the A100's share steps on an H100 were
10 to 22 % too fast, with 0.75 those on an A100 20 % too slow."""


def fp32_share(gpu: Gpu) -> float:
    """The share of the fp32 peak that large products reach on this GPU, without tensor cores."""
    return FP32_SHARE.get(gpu.compute_capability, FP32_UNMEASURED)


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


_ByHead = tuple[tuple[int, float, float], ...]
"""Largest head size, and the shares of the peak that forward and backward reach up to it."""

FLASH_2: Mapping[_Capability, _ByHead] = {
    (8, 0): ((64, 0.57, 0.47), (128, 0.62, 0.52), (256, 0.57, 0.44)),
    (8, 6): ((128, 0.74, 0.64), (256, 0.68, 0.54)),
    (9, 0): ((64, 0.31, 0.24), (128, 0.35, 0.28), (256, 0.32, 0.24)),
    (10, 0): ((64, 0.15, 0.12), (128, 0.17, 0.14), (256, 0.16, 0.12)),
}
EFFICIENT: _ByHead = ((64, 0.53, 0.30), (128, 0.59, 0.30), (256, 0.51, 0.13))
EFFICIENT_FP32: _ByHead = ((64, 0.31, 0.22), (128, 0.28, 0.19), (256, 0.27, 0.19))
"""Shares of the peak in tf32; GPUs without it compute in fp32, at half of that peak."""
FLASH_3: _ByHead = ((64, 0.45, 0.38), (128, 0.58, 0.48), (256, 0.60, 0.45))
CUDNN: Mapping[_Capability, float] = {(8, 0): 0.82, (8, 6): 0.93, (8, 9): 1.0, (12, 0): 0.88}
CUDNN_ON_HOPPER = ((64, (0.52, 750.0), (0.54, 1770.0)), (128, (0.63, 280.0), (0.56, 1040.0)))
"""Largest head size; of forward and backward the share of the peak that endless sequences reach,
and the length of those that reach half of it."""
CUDNN_HEADS: Mapping[int, int] = {9: 256, 10: 128}
"""Largest heads in 16 bits that PyTorch 2.13 gives to cuDNN, by major compute capability."""
MASKED = 0.55
MASKED_MEASURED: tuple[_Capability, ...] = ((8, 0), (9, 0))
MASKED_SLOWER: Mapping[_Capability, tuple[int, float]] = {(12, 0): (128, 1.8)}
"""Largest head size that takes more time still with a mask, and how many times. 12.0: seven
published steps on an RTX PRO 6000 and an RTX 5090 took 1.6 to 2.0 times; with heads of 256 none."""
MASKED_DIFFERS = 2**0.5
"""On generations without such runs a dense mask may cost nothing more, or twice the time: they are
charged the middle. With the A100's share, published 16-bit steps with masks on an RTX PRO 6000 were
21 to 36 % too fast."""
EFFICIENT_ON_HOPPER = 1.47

_A100_PEAK, _H100_MULTIPROCESSORS = 312e12, 132
_WITHOUT_SHAPE = 0.5
"""Rate of attention whose kernel is unknown: that of all before kernels were told apart."""
_WITHOUT_TF32 = 0.5
_FLASH_TILE, _EFFICIENT_TILE = 32, 64
"""Heads are padded to a multiple of these: the rest of the last tile is computed in vain."""


def as_chosen(works: WorkArrays, gpu: Gpu, attention: str) -> WorkArrays:
    """Traced works with the attention kernels that PyTorch chooses on this GPU.

    A trace has flash attention or the memory-efficient kernel, which stand for cuDNN's. Attention
    that is not PyTorch's own, as `flash_attention_2`, stays what it is.
    """
    largest = CUDNN_HEADS.get(gpu.compute_capability[0], 0)
    if attention != "sdpa" or not largest:
        return works
    chosen = (works.shapes[:, 3].max(axis=1) <= largest) & np.isin(
        works.dtypes, ("float16", "bfloat16")
    )
    names = [
        _SCALED_DOT_PRODUCT.sub("_scaled_dot_product_cudnn_attention", name) if its else name
        for name, its in zip(works.names.tolist(), chosen.tolist(), strict=True)
    ]
    return replace(works, names=np.array(names, dtype=np.str_))


_SCALED_DOT_PRODUCT = re.compile("_scaled_dot_product_(flash|efficient)_attention")


def attention_flops_per_s(works: WorkArrays, gpu: Gpu, *, masked: float = MASKED) -> Floats:
    """FLOP/s of each operator of fused attention at each point, shape (W, P).

    `masked` is what a dense mask leaves of a kernel's rate where that was measured.
    """
    masked_here = masked / (1.0 if measured_masked(gpu) else MASKED_DIFFERS)
    largest, slower = MASKED_SLOWER.get(gpu.compute_capability, (0, 1.0))
    rates = np.empty(works.flops.shape)
    for row, (name, dtype, has_shape) in enumerate(
        zip(works.names.tolist(), works.dtypes.tolist(), works.has_shape.tolist(), strict=True)
    ):
        if has_shape:
            head, keys = works.shapes[row, 3], works.shapes[row, 2]
            rates[row] = [_rate(name, dtype, int(size), gpu) for size in head]
            if name.endswith(MASK):
                rates[row] *= masked_here / np.where(head <= largest, slower, 1.0)
            rates[row] /= 1.0 + half_rate_tokens(name, dtype, int(head[0]), gpu) / keys
        else:
            rates[row] = _peak(gpu, dtype) * _WITHOUT_SHAPE
    return rates


def half_rate_tokens(name: str, dtype: str, head: int, gpu: Gpu) -> float:
    """The sequence length at which a kernel reaches half of its rate; 0 where that is unknown."""
    if not _is_cudnn_on_hopper(name, gpu) or dtype == "float32":
        return 0.0
    return _of_cudnn(name, head)[1]


def _is_cudnn_on_hopper(name: str, gpu: Gpu) -> bool:
    return "cudnn" in name and gpu.compute_capability == (9, 0)


def _of_cudnn(name: str, head: int) -> tuple[float, float]:
    _, forward, backward = next((r for r in CUDNN_ON_HOPPER if head <= r[0]), CUDNN_ON_HOPPER[-1])
    return backward if _is_backward(name) else forward


def _is_backward(name: str) -> bool:
    return "backward" in name or "bwd" in name


def measured_masked(gpu: Gpu) -> bool:
    """True if steps with a dense mask were published for this GPU's generation."""
    return gpu.compute_capability in MASKED_MEASURED


def _rate(name: str, dtype: str, head: int, gpu: Gpu) -> float:
    is_backward = _is_backward(name)
    if dtype != "float32":
        return _peak(gpu, dtype) * _share(name, gpu, head, is_backward)
    if "tf32" not in gpu.flops:
        return gpu.flops["fp32"] * _WITHOUT_TF32
    share = _of_head(EFFICIENT_FP32, head, is_backward, _EFFICIENT_TILE)
    return gpu.flops["tf32"] * (share * _generation(gpu, head, is_backward))


def _peak(gpu: Gpu, dtype: str) -> float:
    return matmul_peak(gpu, dtype, allow_tf32=False)


def _share(name: str, gpu: Gpu, head: int, is_backward: bool) -> float:
    if "efficient" in name or "cutlass" in name or "xformers" in name:
        share = _of_head(EFFICIENT, head, is_backward, _EFFICIENT_TILE)
        return share * _generation(gpu, head, is_backward)
    if "flash_attn_3" in name and gpu.compute_capability == (9, 0):
        return _of_head(FLASH_3, head, is_backward, _FLASH_TILE)
    if _is_cudnn_on_hopper(name, gpu):
        return _of_cudnn(name, head)[0] * _of_whole_tiles(head, _FLASH_TILE)
    flash = _of_head(FLASH_2[_known(gpu)], head, is_backward, _FLASH_TILE)
    return flash * CUDNN.get(gpu.compute_capability, 1.0) if "cudnn" in name else flash


def _generation(gpu: Gpu, head: int, is_backward: bool) -> float:
    """Factor of this GPU's generation on the A100's share of the peak."""
    if gpu.compute_capability[0] in (9, 10):
        multiprocessors = gpu.sm_count / _H100_MULTIPROCESSORS
        return EFFICIENT_ON_HOPPER * multiprocessors * _A100_PEAK / _peak(gpu, "float16")
    here, there = (
        _of_head(FLASH_2[generation], head, is_backward, _FLASH_TILE)
        for generation in (_known(gpu), (8, 0))
    )
    return here / there


def _known(gpu: Gpu) -> _Capability:
    """The generation in `FLASH_2` whose instructions this GPU has."""
    if gpu.compute_capability <= (8, 0):
        return (8, 0)
    known: dict[int, _Capability] = {9: (9, 0), 10: (10, 0)}
    return known.get(gpu.compute_capability[0], (8, 6))


def _of_head(table: _ByHead, head: int, is_backward: bool, tile: int) -> float:
    """The share of a head of this size, less what its padding to whole tiles takes."""
    _, forward, backward = next((row for row in table if head <= row[0]), table[-1])
    return (backward if is_backward else forward) * _of_whole_tiles(head, tile)


def _of_whole_tiles(head: int, tile: int) -> float:
    return head / (-(-head // tile) * tile)
