"""Step time from the work of every operator: a roofline for one GPU.

A kernel takes the longer of its arithmetic and its memory traffic, and never less than a
launch. Efficiencies are properties of kinds of kernels, not of models or configurations; a
device profile can replace them with measured ones.

An elementwise kernel reads what the kernel before it wrote, and PyTorch's allocator gives it the
block that was freed last. Where all of its tensors fit into the L2 cache, that traffic never
reaches the memory. A copy within the cache takes hardly any time: on an
RTX 4090 (72 MB) 3.6 TB/s for 16 + 16 MB, and 0.8 TB/s, the memory's rate, for 64 + 64 MB; on an
A100 (40 MB) 2.2 and 1.2 TB/s for 16 + 16 and 32 + 32 MB (github.com/smallscientist1/
cuda_microbenchmark). The other part of the traffic is saved long before or read long after:
activations that backward waits for, weights, residuals.

Products read weights, which are touched once in a pass, and are priced as if from memory. So is
an optimizer's update: no tensor of it was touched shortly before.

The host's time of a step goes by kinds of call. A launch is the time to issue a plain operator:
from Python, with what modules do between, or from autograd's engine. All other kinds of calls take
a number of launches, from trials on one H100 (November 2026: PyTorch 2.11, transformers 5.17, peft
0.21, bitsandbytes 0.50; rows of benchmarks/emulated_runs/cards.csv).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.kinds import Phase
from tuner.cost.interval import in_quadrature
from tuner.cost.operators.timeline import MASK
from tuner.cost.speed.rates import (
    BOARDS_DIFFER,
    MASKED,
    MASKED_DIFFERS,
    attention_flops_per_s,
    fp32_share,
    matmul_peak,
    measured_masked,
    power_limit,
    rate_of,
    tile_use,
)
from tuner.cost.work_arrays import SEGMENTS, Floats, WorkArrays

LAUNCH_S = 20e-6
FASTEST_S, SLOWEST_S = 9e-6, 40e-6
"""A launch on a usual host, on the fastest and on the slowest. Published runs that were host-bound:
12 us (two programs on an A100), 18 us (Qwen's LoRA on an A100), 33 us (the H100), and 40 us
(an RTX 4080 under Windows). The fastest may not have been among them."""

HOSTS: Mapping[str, float] = {"h100_sxm": 33e-6}
"""A launch on the hosts that a GPU type was seen with, by `Gpu.id`. H100 SXM: fitted on the runs of
smollm2-135m, 8 x 1,024, and of the search with 4 x 1,024 tokens; a bare launch took 16 us there."""

RECOMPUTED = 2.0
"""Launches of an operator that repeats a checkpointed forward pass: hooks on saved tensors run
Python for each. Fitted between 2.4 of the search's LoRA with eager attention, 4 x 1,024 tokens, and
1.5 of a reentrant script (Qwen2.5-0.5B's shape in nf4), which no trace tells from the others."""

TRAINED = 1.0
"""Launches of the update for each parameter: to clip, group, update and forget its gradient, while
the device waits. Fitted on LoRA of llama-3.2-1b, 4 x 2,048, and of qwen3-8b, 3 x 2,048."""

BNB_UPDATE = 3.5
"""Further ones where bitsandbytes updates a parameter: a loop in Python. Fitted on LoRA of qwen3-8b
in nf4 with paged_adamw_8bit."""

INT8_LAYER = 12.0
"""Further launches of a product in int8: five operators of bitsandbytes in Python, and a question
to the device, whose answer the host waits for. Fitted on the only run in int8, llama-3.2-1b."""

_INT8 = "int8_linear_matmul"
_UPDATES = "optimizer_update_8bit_blockwise", "optimizer_update_32bit"


class Host(NamedTuple):
    """Seconds of a launch: expected, and on the fastest and the slowest host that it may be."""

    launch_s: float
    fastest_s: float
    slowest_s: float


def launches_of(names: NDArray[np.str_]) -> NDArray[np.float64]:
    """Launches that each operator takes, by its name."""
    return np.where(names == _INT8, 1.0 + INT8_LAYER, 1.0)


def waits_of(names: NDArray[np.str_]) -> NDArray[np.bool_]:
    """True for operators before which the host waits for the device: nothing runs ahead."""
    return np.isin(names, _INT8)


def update_launches(trained: int, names: NDArray[np.str_], executions: NDArray[np.int64]) -> float:
    """Launches of an update of `trained` parameters by these operators."""
    return TRAINED * trained + BNB_UPDATE * float(executions[np.isin(names, _UPDATES)].sum())


TRAFFIC_SHARE: Mapping[str, float] = {"t4": 0.86, "h100_sxm": 1.06}
"""Memory rate of a board over that of others, by `Gpu.id`.

T4: of its 320 GB/s 220 were measured, 69 % (Jia and others, "Dissecting the NVidia Turing T4 GPU
via microbenchmarking", arxiv.org/abs/1903.07486), and some 83 % of other boards' rates there.
H100 SXM: elementwise kernels reached 74 % of the memory's rate in four training steps, and 73 % in
six others (median of each step's kernels; kernel tables of November 2026)."""

KEPT = 0.5
"""Share of a small elementwise kernel's traffic that stays in the L2 cache: one of two tensors."""

KEPT_ENDS = (0.7, 0.0)
"""The most and the least of it: with 0.7, steps of LoRA on an L40S are 7 % too fast; without any,
4-bit steps on an RTX 4080 (Windows) are right, and with half of it 5 % too fast."""

CACHED = "elementwise"
"""The kind of operators whose tensors may stay in the cache."""

BLOCKWISE, BLOCKWISE_BYTES_PER_S = "optimizer_update_8bit_blockwise", 2.7e9
"""bitsandbytes' update with 8-bit states searches a code for each element, and the bytes a second
of each multiprocessor that this allows: 9.7 GB in 27 ms on an H100's 132, llama-3.2-1b in bf16."""

MEASURED_MASK, UNMEASURED_MASK = "masked", "masked, unmeasured"
"""Keys of `Efficiency.takes`: attention with a dense mask."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a GPU's peaks that kinds of kernels reach, and the cost of a launch.

    The values are what a first untuned comparison with published A100 and T4 step times used
    (docs/notebook/accuracy.md); `tuner calibrate` replaces them.
    """

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {"fp16": 0.77, "bf16": 0.77, "tf32": 0.77, "int8": 0.77}
    )
    """Share of the peak, by precision, in a product of many waves; in fp32, without tensor cores,
    that of the GPU's generation (`rates.FP32_SHARE`)."""
    fill: float = 0.25
    """Waves that a product's first loads and last stores take, which nothing hides: square
    products of 1,024 and 2,048 reach 80 and 88 % of what whole waves allow (16-bit, RTX PRO 6000
    Server Edition, github.com/zzc0721/torch-performance-test-data/issues/162)."""
    masked_attention: float = MASKED
    """Share of fused attention's rate that a dense mask leaves."""
    takes: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "fp32": (1.0, 0.95 / 0.75),
            UNMEASURED_MASK: (1 / MASKED_DIFFERS, MASKED_DIFFERS),
        }
    )
    """Factors by which arithmetic may take less and more time in kernels whose rate has no source
    for all their shapes: by precision of a product, and as `MEASURED_MASK` or `UNMEASURED_MASK` of
    attention. Rates of fp32 products without tensor cores were published for sizes of 4,096 and
    more; on an A100 we allow for three quarters of the peak, which is what all products were
    charged before shapes counted, and elsewhere for as much more."""
    bandwidth: Mapping[str, float] = field(
        default_factory=lambda: {"elementwise": 0.7, "matmul": 0.8, "dequantise": 0.6}
    )
    """Share of the memory's rate, by kind.

    That of elementwise kernels was chosen on published steps of 25 GPU types: their mean error
    falls from 0.8 to 0.66. Compared with 0.8 and a copy for each `_unsafe_view`, as it was before,
    no program on a GPU was 3 points worse with 0.68 to 0.72; two were with 0.66, four with 0.74."""
    kernel_s: float = 3e-6
    """Shortest time of a kernel on the device."""
    launch_s: float = LAUNCH_S
    """Time of a usual host for a launch (`speed.host`)."""
    tile: int = 128
    """Rows and columns of a matmul tile: the last tile and the last wave are padding."""

    def reached(self, gpu: Gpu, precision: str) -> float:
        """Share of the peak that a product of many waves reaches."""
        share = self.matmul.get(precision)
        return fp32_share(gpu) if share is None else share

    def ends_of(self, gpu: Gpu, name: str, kind: str, precision: str) -> tuple[float, float]:
        """Factors by which the arithmetic of an operator may take less and more time."""
        key = precision
        if kind == "attention":
            with_mask = MEASURED_MASK if measured_masked(gpu) else UNMEASURED_MASK
            key = with_mask if name.endswith(MASK) else ""
        return self.takes.get(key, (1.0, 1.0))


class KernelTimes(Protocol):
    """Seconds of kernels on a GPU, and its host."""

    def host(self, gpu: Gpu) -> Host:
        """The host of this GPU."""

    def seconds(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool, streams: bool = False
    ) -> Floats:
        """Seconds of each operator at each point, shape (W, P).

        An operator `streams` if nothing that it reads was touched shortly before, as an update
        of parameters does: its tensors come from memory, not from the L2 cache.
        """

    def ends(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool
    ) -> Iterator[tuple[Floats, Floats]]:
        """The least and most seconds of each operator, for each thing that is not known of them.

        Shapes (W, P), as of `seconds`; nothing where kernels were measured.
        """


class Roofline:
    """`KernelTimes` of a data sheet: the longest of arithmetic, power limit, traffic and launch."""

    def __init__(self, efficiency: Efficiency | None = None) -> None:
        self._efficiency = efficiency or Efficiency()
        self.shortest_s = self._efficiency.kernel_s

    def host(self, gpu: Gpu) -> Host:
        """See `KernelTimes.host`."""
        found = HOSTS.get(gpu.id, LAUNCH_S) / LAUNCH_S * self._efficiency.launch_s
        return Host(found, min(FASTEST_S, found), max(SLOWEST_S, found))

    def seconds(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool, streams: bool = False
    ) -> Floats:
        """See `KernelTimes.seconds`."""
        bounds = self.bounds(works, gpu, allow_tf32, kept=0.0 if streams else KEPT)
        return self._longest(*bounds)

    def ends(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool
    ) -> Iterator[tuple[Floats, Floats]]:
        """The ends of kernels whose rate has no source, of a power limit, and of the L2 cache."""
        arithmetic_s, limited_s, traffic_s = self.bounds(works, gpu, allow_tf32)
        may_take = np.array(
            [
                self._efficiency.ends_of(gpu, name, kind, rate_of(gpu, dtype, allow_tf32))
                for name, kind, dtype in zip(
                    works.names.tolist(), works.kinds.tolist(), works.dtypes.tolist(), strict=True
                )
            ]
        ).reshape(-1, 2)
        least, most = (
            self._longest(arithmetic_s * factor[:, None], limited_s, traffic_s)
            for factor in may_take.T
        )
        yield least, most
        yield (
            self._longest(arithmetic_s, limited_s / BOARDS_DIFFER, traffic_s),
            self._longest(arithmetic_s, limited_s * BOARDS_DIFFER, traffic_s),
        )
        least_s, most_s = (self._traffic_s(works, gpu, kept) for kept in KEPT_ENDS)
        yield (
            self._longest(arithmetic_s, limited_s, least_s),
            self._longest(arithmetic_s, limited_s, most_s),
        )

    def _longest(self, *bounds: Floats) -> Floats:
        longest: Floats = np.maximum.reduce([*bounds, np.full_like(bounds[0], self.shortest_s)])
        return longest

    def bounds(
        self, works: WorkArrays, gpu: Gpu, allow_tf32: bool, *, kept: float = KEPT
    ) -> tuple[Floats, Floats, Floats]:
        """Seconds (W, P) of arithmetic at the kernels' rates, at the power limit, of traffic."""
        efficiency = self._efficiency
        peak = np.array([matmul_peak(gpu, str(dtype), allow_tf32) for dtype in works.dtypes])
        reached = np.array(
            [
                efficiency.reached(gpu, rate_of(gpu, str(dtype), allow_tf32))
                for dtype in works.dtypes
            ]
        )
        used = tile_use(works, gpu, efficiency.tile, efficiency.fill)
        rate = peak[:, None] * reached[:, None] * used
        attends = works.kinds == "attention"
        rate[attends] = attention_flops_per_s(
            works.of(attends), gpu, masked=efficiency.masked_attention
        )
        # Padding and idle multiprocessors cost time, but no power: the limit is one of its own.
        limit = np.array([power_limit(gpu, str(dtype), allow_tf32) for dtype in works.dtypes])
        traffic_s = self._traffic_s(works, gpu, kept)
        return works.flops / rate, works.flops / limit[:, None], traffic_s

    def traffic_bytes_per_s(self, gpu: Gpu, kind: str) -> float:
        """The rate of traffic of a kind of operators."""
        shares = self._efficiency.bandwidth
        share = shares.get(kind, shares["elementwise"]) * TRAFFIC_SHARE.get(gpu.id, 1.0)
        most = BLOCKWISE_BYTES_PER_S * gpu.sm_count if kind == BLOCKWISE else np.inf
        return min(gpu.bandwidth_bytes_per_s * share, most)

    def _traffic_s(self, works: WorkArrays, gpu: Gpu, kept: float) -> Floats:
        """Seconds (W, P) of traffic; the L2 cache keeps the share `kept` of a small kernel's."""
        kinds = np.where(works.names == BLOCKWISE, BLOCKWISE, works.kinds).tolist()
        rates = {kind: self.traffic_bytes_per_s(gpu, kind) for kind in set(kinds)}
        rate = np.array([rates[kind] for kind in kinds]).reshape(-1, 1)
        seconds: Floats = works.bytes_moved / rate
        return seconds * left_by_l2(works, gpu, kept)


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
    trained: int
    """Parameters that the optimizer updates."""
    reads_loss: bool = True
    """True if the host reads the loss before the update, as transformers' Trainer does to see that
    it is a number: the device has nothing to do then until the update is issued."""


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
    """Time of the last micro-step's backward pass alone."""
    added_s: Floats
    """Seconds that each unknown takes off the step at least and adds at most: (U, 2, P)."""

    def unknown(self, point: int) -> tuple[float, float]:
        """The ends of what the step of one point may take, over `step_s`.

        The unknowns are independent, so that all are hardly ever at their worst together: their
        logarithms add as squares.
        """
        return in_quadrature(*(1.0 + self.added_s[:, :, point] / self.step_s[point]).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """Seconds of forward and backward passes at P points, by kind of work, and model FLOPs.

    One mapping and one row for each pass. The kind "launch" is host time that the device waits for.
    """

    seconds: tuple[Mapping[str, Floats], ...]
    model_flops: Floats
    added_s: tuple[Floats, ...]
    """Seconds that each unknown takes off a pass at least and adds at most: (U, 2, P)."""
    ahead_s: Floats
    """Seconds (S, P) by which the host is done before the device."""


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
    kernels = KernelSeconds.of(work.passes, gpu, times, allow_tf32=allow_tf32)
    passes = pass_times(kernels, work.executions)
    update = optimizer_time(
        work.optimizer, work.optimizer_executions, work.trained, gpu, times, allow_tf32
    )
    return whole_step(passes, update, grad_accum, reads_loss=work.reads_loss)


class UpdateTime(NamedTuple):
    """Seconds of an optimizer's update on the device, and of the host to issue it."""

    device_s: Floats
    host_s: Floats

    def after(self, ahead_s: Floats, *, reads_loss: bool) -> Floats:
        """Seconds that an update adds to a step in whose passes the host was `ahead_s` ahead."""
        waited_s: Floats = self.host_s - (0.0 if reads_loss else np.minimum(ahead_s, self.host_s))
        return self.device_s + waited_s


def optimizer_time(
    works: WorkArrays,
    executions: NDArray[np.int64],
    trained: int,
    gpu: Gpu,
    times: KernelTimes,
    allow_tf32: bool,
) -> UpdateTime:
    """An optimizer's update of `trained` parameters at each point of `works`.

    `executions` (V,).
    """
    each_s = times.seconds(works, gpu, allow_tf32=allow_tf32, streams=True)
    launches = update_launches(trained, works.names, executions)
    device_s: Floats = executions @ each_s
    return UpdateTime(device_s, np.full_like(device_s, launches * times.host(gpu).launch_s))


@dataclass(frozen=True, slots=True, eq=False)
class KernelSeconds:
    """Seconds of W operators at P points: `seconds` (W, P).

    `ends` are the least and most seconds of each operator, for each thing that is not known of
    them: see `KernelTimes.ends`. The host issues each operator in `launches` (W,), and before those
    in `waits` (W,) it waits for the device.
    """

    kinds: NDArray[np.str_]
    flops: Floats
    seconds: Floats
    ends: tuple[tuple[Floats, Floats], ...]
    launches: Floats
    waits: NDArray[np.bool_]
    host: Host

    @classmethod
    def of(
        cls, works: WorkArrays, gpu: Gpu, times: KernelTimes, *, allow_tf32: bool
    ) -> KernelSeconds:
        """The seconds of operators that are issued one by one."""
        return cls(
            works.kinds,
            works.flops,
            times.seconds(works, gpu, allow_tf32=allow_tf32),
            tuple(times.ends(works, gpu, allow_tf32=allow_tf32)),
            launches_of(works.names),
            waits_of(works.names),
            times.host(gpu),
        )


def pass_times(kernels: KernelSeconds, executions: NDArray[np.int64]) -> PassTimes:
    """Time of each pass at each point of `kernels`; `executions` (S, 2, W) of each operator.

    The second axis of `executions` tells operators that repeat a checkpointed forward from all
    others. Host and device run at once, and where the host waits they take turns at those two.
    """
    executed = executions.astype(float)
    launches = executed @ kernels.launches * (1.0, RECOMPUTED)
    waits: NDArray[np.bool_] = np.any(executions[:, :, kernels.waits], axis=(1, 2))

    def passes_s(seconds: Floats, launch_s: float = kernels.host.launch_s) -> Floats:
        """Seconds of each pass, (S, P)."""
        device_s, host_s = executed @ seconds, launches[:, :, None] * launch_s
        ahead = np.maximum(device_s.sum(axis=1), host_s.sum(axis=1))
        in_turns = np.maximum(device_s, host_s).sum(axis=1)
        longer: Floats = np.where(waits[:, None], in_turns, ahead)
        return longer

    expected_s = passes_s(kernels.seconds)
    ends = [[passes_s(kernels.seconds, launch_s) for launch_s in kernels.host[1:]]]
    ends += [[*map(passes_s, each)] for each in kernels.ends]
    added_s = np.moveaxis(np.array(ends) - expected_s, 2, 0)
    segments = []
    for (plain, again), pass_s in zip(executed, expected_s, strict=True):
        device_s = {"recompute": again @ kernels.seconds}
        for kind in np.unique(kernels.kinds):
            device_s[str(kind)] = (plain * (kernels.kinds == kind)) @ kernels.seconds
        device_s["launch"] = np.maximum(0.0, pass_s - sum(device_s.values()))
        segments.append(device_s)
    model_flops = executed[:, 0] @ kernels.flops
    ahead_s = np.maximum(0.0, expected_s - launches.sum(axis=1)[:, None] * kernels.host.launch_s)
    return PassTimes(tuple(segments), model_flops, tuple(added_s), ahead_s)


_BACKWARDS = [number for number, one in enumerate(SEGMENTS) if one.phase is Phase.BACKWARD]


def whole_step(
    passes: PassTimes,
    update: UpdateTime,
    grad_accum: NDArray[np.int64],
    *,
    reads_loss: bool,
    places: NDArray[np.int64] | slice = slice(None),
) -> StepTimes:
    """Optimizer steps of `grad_accum` (Q,) micro-steps each, at these `places` of the points.

    The first micro-step counts once, the second stands for all further ones.
    """
    breakdown: dict[str, Floats] = {}
    flops = np.zeros(len(grad_accum))
    added_s = np.zeros(1)
    for number, segment in enumerate(SEGMENTS):
        repeats = np.ones(len(grad_accum)) if segment.micro_step == 0 else grad_accum - 1.0
        for kind, seconds in passes.seconds[number].items():
            breakdown[kind] = breakdown.get(kind, 0.0) + repeats * seconds[places]
        flops += repeats * passes.model_flops[number][places]
        added_s = added_s + repeats * passes.added_s[number][:, :, places]
    first_s, later_s = (passes.ahead_s[number][places] for number in _BACKWARDS)
    ahead_s = np.where(grad_accum > 1, later_s, first_s)
    breakdown["optimizer"] = update.after(ahead_s, reads_loss=reads_loss)
    step_s: Floats = sum(breakdown.values(), np.zeros(len(grad_accum)))
    first, later = (
        sum(passes.seconds[number].values(), np.zeros(1))[places] + np.zeros(len(grad_accum))
        for number in _BACKWARDS
    )
    backward_s = np.where(grad_accum > 1, later, first)
    return StepTimes(step_s, breakdown, flops, backward_s, added_s)
