"""Step time from the work of every operator: a roofline for one GPU.

A kernel takes the longer of its arithmetic and its memory traffic, and never less than a
launch. Efficiencies are properties of kinds of kernels, not of models or configurations; a
device profile can replace them with measured ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.estimate.recorder import Timeline, Work
from tuner.estimate.trace import Trace
from tuner.gpus import Gpu
from tuner.records import Phase

_FP32 = "float32"
_PRECISION_OF_DTYPE = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a GPU's peaks that kinds of kernels reach, and the cost of a launch.

    The values are what a first untuned comparison with published A100 and T4 step times used
    (docs/accuracy.md); `tuner calibrate` replaces them.
    """

    matmul: float = 0.75
    attention: float = 0.5
    bandwidth: Mapping[str, float] = field(
        default_factory=lambda: {"elementwise": 0.8, "matmul": 0.8, "dequantise": 0.6}
    )
    kernel_s: float = 3e-6
    """Shortest time of a kernel on the device."""
    launch_s: float = 6e-6
    """Host time to issue one operator from Python, autograd included."""
    tile: int = 128
    """Rows and columns of a matmul tile: the last tile and the last wave are padding."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, by kind of work.

    The kind "launch" is host time that the device waits for. `model_flops` counts no
    recomputation.
    """

    step_s: float
    breakdown_s: Mapping[str, float]
    model_flops: int


def step_time(
    trace: Trace,
    gpu: Gpu,
    *,
    grad_accum: int,
    allow_tf32: bool = False,
    efficiency: Efficiency | None = None,
) -> StepTime:
    """Time of one optimizer step with `grad_accum` micro-steps.

    The traced second optimizer step gives the first micro-step, the repeated one and the
    update; the repeated one counts `grad_accum - 1` times.
    """
    efficiency = efficiency or Efficiency()
    timeline = trace.timeline
    seconds: defaultdict[str, float] = defaultdict(float)
    flops = 0
    for key, counts in _executions(timeline).items():
        repeats = grad_accum - 1 if key.micro_step == 1 and key.is_pass else 1
        device: defaultdict[str, float] = defaultdict(float)
        launches = 0
        for index, count in counts.items():
            work = timeline.works[index]
            device[_label(work, key)] += count * kernel_s(work, gpu, efficiency, allow_tf32)
            launches += count
            flops += 0 if key.recompute else repeats * count * work.flops
        host_s = 0.0 if not key.is_pass else launches * efficiency.launch_s
        for label, time_s in device.items():
            seconds[label] += repeats * time_s
        seconds["launch"] += repeats * max(0.0, host_s - sum(device.values()))
    return StepTime(sum(seconds.values()), dict(seconds), flops)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operators that are told apart: one phase of one micro-step, recomputed or not."""

    phase: Phase
    micro_step: int
    recompute: bool

    @property
    def is_pass(self) -> bool:
        return self.phase is not Phase.OPTIMIZER


def _executions(timeline: Timeline) -> dict[_Segment, Counter[int]]:
    """How often each work runs in each segment of the last traced optimizer step."""
    segments: dict[_Segment, Counter[int]] = {}
    for op in timeline.ops:
        mark = timeline.marks[op.mark]
        if mark.step == 1 and mark.phase is not Phase.LOAD:
            key = _Segment(mark.phase, mark.micro_step, op.recompute)
            segments.setdefault(key, Counter())[op.work] += 1
    return segments


def kernel_s(work: Work, gpu: Gpu, efficiency: Efficiency, allow_tf32: bool) -> float:
    """Seconds of one kernel: max(arithmetic, traffic, shortest kernel)."""
    share = efficiency.bandwidth.get(work.kind, efficiency.bandwidth["elementwise"])
    traffic_s = work.bytes_moved / (gpu.bandwidth_bytes_per_s * share)
    arithmetic_s = 0.0
    if work.flops:
        peak = matmul_peak(gpu, work.dtype, allow_tf32)
        if work.kind == "attention":
            arithmetic_s = work.flops / (peak * efficiency.attention)
        else:
            used = efficiency.matmul * _tile_use(work, gpu, efficiency.tile)
            arithmetic_s = work.flops / (peak * used)
    return max(arithmetic_s, traffic_s, efficiency.kernel_s)


def matmul_peak(gpu: Gpu, dtype: str, allow_tf32: bool) -> float:
    """Dense FLOP/s of the GPU for operands of `dtype` (a torch dtype name).

    A type without tensor cores for it (bf16 on Turing, int8 on Volta) runs at the fp32 rate.
    """
    if dtype == _FP32 and allow_tf32 and "tf32" in gpu.flops:
        return gpu.flops["tf32"]
    return gpu.flops.get(_PRECISION_OF_DTYPE.get(dtype, "fp32"), gpu.flops["fp32"])


def _tile_use(work: Work, gpu: Gpu, tile: int) -> float:
    """Share of a product's tiles and waves that is not padding.

    A product of m x n runs as tiles of at most 128 x 128, `sm_count` at a time (NVIDIA, Matrix
    Multiplication Background User's Guide, "Tile quantization" and "Wave quantization"). Thin
    products, as LoRA's, take smaller tiles, down to 16 wide, and split a long k over the
    multiprocessors that would idle.
    """
    if work.shape is None:
        return 1.0
    batch, m, n, k = work.shape
    tile_m, tile_n = _tile_side(m, tile), _tile_side(n, tile)
    tiles_m, tiles_n = -(-m // tile_m), -(-n // tile_n)
    waves = batch * tiles_m * tiles_n / gpu.sm_count
    if waves < 1:
        waves = min(1.0, waves * max(1, k // 512))
    full = (m * n) / (tiles_m * tiles_n * tile_m * tile_n)
    return full * waves / math.ceil(waves)


def _tile_side(size: int, tile: int) -> int:
    return tile if size >= tile else -(-size // 16) * 16


def _label(work: Work, segment: _Segment) -> str:
    if segment.phase is Phase.OPTIMIZER:
        return "optimizer"
    return "recompute" if segment.recompute else work.kind
