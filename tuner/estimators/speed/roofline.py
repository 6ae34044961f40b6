"""Step time from the work of every operator: a roofline for one GPU.

A kernel takes the longer of its arithmetic and its memory traffic, and never less than a
launch. Efficiencies are properties of kinds of kernels, not of models or configurations; a
device profile can replace them with measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.estimators.compiler.compiled import SEGMENTS, Floats
from tuner.estimators.compiler.work_arrays import WorkArrays
from tuner.estimators.speed.attention_rates import MASKED, attention_flops_per_s
from tuner.estimators.speed.power import sustained_flops
from tuner.gpu import Gpu
from tuner.records import Phase

_PRECISION_OF_DTYPE = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    # Data sheets of Ada, Hopper and Blackwell give 8-bit floats the rate of 8-bit integers.
    "float8_e4m3fn": "int8",
    "float8_e5m2": "int8",
}


LAUNCH_S = 25e-6
HOSTS_LAUNCH_S = (12e-6, 50e-6)
"""What an operator costs the fastest and the slowest host of published runs that were bound by it:
fine-tuning Qwen on an A100, and instances with a T4. It is the host's, not the GPU's."""


TRAFFIC_SHARE: Mapping[str, float] = {"t4": 0.86}
"""What boards whose memory falls behind others' reach, over what those reach, by `Gpu.id`: of the
T4's 320 GB/s 220 were measured, 69 % (Jia and others, "Dissecting the NVidia Turing T4 GPU via
microbenchmarking", arxiv.org/abs/1903.07486), and some 83 % of other boards' rates there."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a GPU's peaks that kinds of kernels reach, and the cost of a launch.

    The values are what a first untuned comparison with published A100 and T4 step times used
    (docs/accuracy.md); `tuner calibrate` replaces them.
    """

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp16": 0.77,
            "bf16": 0.77,
            "tf32": 0.77,
            "int8": 0.77,
            "fp32": 0.95,
        }
    )
    """Of the peak, by precision, in a product of many waves. In fp32, without tensor cores, large
    products reach 90 to 98 % of an A100's (`power` names the source of such rates)."""
    fill: float = 0.25
    """Waves that a product's first loads and last stores take, which nothing hides: square
    products of 1,024 and 2,048 reach 80 and 88 % of what whole waves allow (16-bit, RTX PRO 6000
    Server Edition, github.com/zzc0721/torch-performance-test-data/issues/162)."""
    masked_attention: float = MASKED
    """What a dense mask leaves of the rate of fused attention."""
    bandwidth: Mapping[str, float] = field(
        default_factory=lambda: {"elementwise": 0.8, "matmul": 0.8, "dequantise": 0.6}
    )
    kernel_s: float = 3e-6
    """Shortest time of a kernel on the device."""
    launch_s: float = LAUNCH_S
    """Host time to issue one operator from Python, with what modules do between operators.

    Eager decoding of Llama-7B on an A100 is bound by it: 25.5 tokens/s (pytorch.org/blog/
    accelerating-generative-ai-2) at some 1,570 operators a token (49 in each of 32 layers of
    gpt-fast's model.py).
    """
    tile: int = 128
    """Rows and columns of a matmul tile: the last tile and the last wave are padding."""


class KernelTimes(Protocol):
    """How long kernels take on a GPU, and what launching one costs the host."""

    launch_s: float
    hosts: tuple[float, float]
    """What launches cost the fastest and slowest host that this may be, over `launch_s`."""
    overlaps: bool
    """Whether the host issues operators while the device computes earlier ones."""

    def seconds(self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool) -> Floats:
        """Seconds of each operator at each point, shape (W, P)."""


class Roofline:
    """`KernelTimes` of a data sheet: the longest of arithmetic, power limit, traffic and launch."""

    overlaps = True
    hosts = (HOSTS_LAUNCH_S[0] / LAUNCH_S, HOSTS_LAUNCH_S[1] / LAUNCH_S)

    def __init__(self, efficiency: Efficiency | None = None) -> None:
        self._efficiency = efficiency or Efficiency()
        self.launch_s = self._efficiency.launch_s

    def seconds(self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool) -> Floats:
        """See `KernelTimes.seconds`."""
        efficiency = self._efficiency
        share = np.array(
            [
                efficiency.bandwidth.get(str(kind), efficiency.bandwidth["elementwise"])
                for kind in works.kinds
            ]
        )
        bandwidth = gpu.bandwidth_bytes_per_s * TRAFFIC_SHARE.get(gpu.id, 1.0)
        traffic_s = works.bytes_moved / (bandwidth * share[:, None])
        peak = np.array([matmul_peak(gpu, str(dtype), allow_tf32) for dtype in works.dtypes])
        reached = np.array(
            [efficiency.matmul[_rate_of(gpu, str(dtype), allow_tf32)] for dtype in works.dtypes]
        )
        used = tile_use(works, gpu, efficiency.tile, efficiency.fill)
        rate = peak[:, None] * reached[:, None] * used
        attends = works.kinds == "attention"
        rate[attends] = attention_flops_per_s(
            works.of(attends), gpu, masked=efficiency.masked_attention
        )
        arithmetic_s = works.flops / rate
        # Padding and idle multiprocessors cost time, but no power: the limit is one of its own.
        limit = np.array([power_limit(gpu, str(dtype), allow_tf32) for dtype in works.dtypes])
        arithmetic_s = np.maximum(arithmetic_s, works.flops / limit[:, None])
        seconds: Floats = np.maximum(np.maximum(arithmetic_s, traffic_s), efficiency.kernel_s)
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """The work of one optimizer step: what passes and optimizer run, and how often.

    `executions` (S, 2, W) as in `CompiledPasses`; `optimizer_executions` (V,) over the
    operators in `optimizer`, at one point or at as many as `passes`.
    """

    passes: WorkArrays
    executions: NDArray[np.int64]
    optimizer: WorkArrays
    optimizer_executions: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds of optimizer steps at P points: in all (P,), and by kind of work.

    The kind "launch" is host time that the device waits for. `model_flops` (P,) counts no
    recomputation.
    """

    step_s: Floats
    breakdown_s: Mapping[str, Floats]
    model_flops: Floats
    backward_s: Floats
    """Of the backward pass of the last micro-step alone."""
    hosts_s: tuple[Floats, Floats] | None = None
    """What a step would take on the fastest and on the slowest host; None where it is known."""

    def of_hosts(self, point: int) -> tuple[float, float]:
        """What the step of one point takes on the fastest and slowest host, over `step_s`."""
        if self.hosts_s is None:
            return 1.0, 1.0
        fastest, slowest = (float(s[point] / self.step_s[point]) for s in self.hosts_s)
        return min(fastest, 1.0), max(slowest, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """Seconds of forward and backward passes at P points, by kind of work, and model FLOPs.

    One mapping and one row for each of `SEGMENTS`.
    """

    seconds: tuple[Mapping[str, Floats], ...]
    model_flops: Floats
    hosts_s: tuple[tuple[Floats, Floats], ...]
    """What each pass takes on the fastest and on the slowest host."""


def step_times(
    work: StepWork,
    gpu: Gpu,
    *,
    grad_accum: NDArray[np.int64],
    allow_tf32: bool = False,
    kernel_times: KernelTimes | None = None,
) -> StepTimes:
    """Time of one optimizer step at each point, with `grad_accum` (P,) micro-steps."""
    times = kernel_times or Roofline()
    passes = pass_times(work.passes, work.executions, gpu, allow_tf32=allow_tf32, times=times)
    optimizer_s = optimizer_time(work.optimizer, work.optimizer_executions, gpu, times, allow_tf32)
    return whole_step(passes, optimizer_s, grad_accum)


def optimizer_time(
    works: WorkArrays,
    executions: NDArray[np.int64],
    gpu: Gpu,
    times: KernelTimes,
    allow_tf32: bool,
) -> Floats:
    """Seconds of an optimizer's update at each point of `works`; `executions` (V,).

    Multi-tensor optimizers launch few kernels for many tensors: no host time is counted where
    the device has work meanwhile.
    """
    seconds: Floats = executions @ times.seconds(works, gpu, allow_tf32=allow_tf32)
    return seconds if times.overlaps else seconds + executions.sum() * times.launch_s


def pass_times(
    works: WorkArrays,
    executions: NDArray[np.int64],
    gpu: Gpu,
    *,
    allow_tf32: bool,
    times: KernelTimes,
) -> PassTimes:
    """Time of each pass at each point of `works`; `executions` as in `CompiledPasses`."""
    kernel_s = times.seconds(works, gpu, allow_tf32=allow_tf32)
    segments, hosts_s = [], []
    for plain, again in executions.astype(float):
        device_s = {"recompute": again @ kernel_s}
        for kind in np.unique(works.kinds):
            device_s[str(kind)] = (plain * (works.kinds == kind)) @ kernel_s
        host_s = (plain.sum() + again.sum()) * times.launch_s
        hidden_s = sum(device_s.values()) if times.overlaps else np.zeros(kernel_s.shape[1])
        device_s["launch"] = np.maximum(0.0, host_s - hidden_s)
        segments.append(device_s)
        visible_s = 0.0 if times.overlaps else sum(device_s.values()) - device_s["launch"]
        fastest, slowest = (np.maximum(host_s * host, hidden_s) + visible_s for host in times.hosts)
        hosts_s.append((fastest, slowest))
    model_flops = executions[:, 0].astype(float) @ works.flops
    return PassTimes(tuple(segments), model_flops, tuple(hosts_s))


def whole_step(
    passes: PassTimes,
    optimizer_s: Floats,
    grad_accum: NDArray[np.int64],
    *,
    places: NDArray[np.int64] | slice = slice(None),
) -> StepTimes:
    """Optimizer steps of `grad_accum` (Q,) micro-steps each, at these `places` of the points.

    The first micro-step counts once, the second stands for all further ones.
    """
    breakdown: dict[str, Floats] = {}
    flops = np.zeros(len(grad_accum))
    hosts = [optimizer_s + np.zeros(len(grad_accum)) for _ in range(2)]
    for number, segment in enumerate(SEGMENTS):
        repeats = np.ones(len(grad_accum)) if segment.micro_step == 0 else grad_accum - 1.0
        for kind, seconds in passes.seconds[number].items():
            breakdown[kind] = breakdown.get(kind, 0.0) + repeats * seconds[places]
        flops += repeats * passes.model_flops[number][places]
        for which, seconds in enumerate(passes.hosts_s[number]):
            hosts[which] = hosts[which] + repeats * seconds[places]
    breakdown["optimizer"] = optimizer_s + np.zeros(len(grad_accum))
    step_s: Floats = sum(breakdown.values(), np.zeros(len(grad_accum)))
    first, later = (
        sum(passes.seconds[number].values(), np.zeros(1))[places] + np.zeros(len(grad_accum))
        for number, segment in enumerate(SEGMENTS)
        if segment.phase is Phase.BACKWARD
    )
    backward_s = np.where(grad_accum > 1, later, first)
    return StepTimes(step_s, breakdown, flops, backward_s, (hosts[0], hosts[1]))


def matmul_peak(gpu: Gpu, dtype: str, allow_tf32: bool) -> float:
    """Dense FLOP/s of the GPU for operands of `dtype` (a torch dtype name).

    A type without tensor cores for it (bf16 on Turing, int8 on Volta) runs at the fp32 rate.
    """
    return gpu.flops[_rate_of(gpu, dtype, allow_tf32)]


def power_limit(gpu: Gpu, dtype: str, allow_tf32: bool) -> float:
    """FLOP/s of steady products of `dtype` that the GPU's power limit allows."""
    return sustained_flops(gpu, _rate_of(gpu, dtype, allow_tf32))


def _rate_of(gpu: Gpu, dtype: str, allow_tf32: bool) -> str:
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
