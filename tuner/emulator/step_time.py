"""The time of a training step, from the operators that an emulated program ran in it.

The rules are the same as for a traced step (`tuner.cost.speed.roofline`): each pass takes as long
as the device or the host, whichever is slower, and the optimizer's launches cost no host time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Phase
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.calibrate import step_factors
from tuner.cost.interval import Floats, in_quadrature
from tuner.cost.operators.timeline import Work
from tuner.cost.parallel import NETWORK, Links, unknown_rate
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.rates import matmul_peak
from tuner.cost.step_details import MOST_EXPENSIVE, OperatorTime
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.rates import EXCHANGE, TRANSFER, pcie_bytes_per_s

_PASSES = (Phase.FORWARD, Phase.BACKWARD)

_MOST_UNPRICED = 0.95
"""The interval grows with the share of unknown kernels, up to this share."""


@dataclass(frozen=True, slots=True)
class EmulatedStepTime:
    """The emulated time of one optimizer step.

    `interval_s` contains the measured time with a probability of 90 %. `breakdown_s` splits
    `step_s` by kind of work, as in a prediction, and `phases_s` by phase; each adds up to it.
    `model_flops` excludes recomputation; `mfu` is None if no product ran. `unpriced` counts the
    launches in a step of kernels whose names alone are known: each takes the time of the shortest
    kernel. `estimated_share` is the share of the time in kernels that are priced by their tensor
    arguments. `notes` say what the time does not include.
    """

    step: int
    step_s: float
    interval_s: tuple[float, float]
    breakdown_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    most_expensive: tuple[OperatorTime, ...]
    model_flops: float
    mfu: float | None
    unpriced: Mapping[str, int]
    unpriced_share: float
    estimated_share: float
    notes: tuple[str, ...]


def step_time(
    report: Mapping[str, Any],
    gpu: Gpu,
    *,
    profile: DeviceProfile | None = None,
    repeats: float = 1.0,
) -> EmulatedStepTime | None:
    """The time of the program's median step; `report` comes from `Pricer.snapshot`.

    The first step, which creates the optimizer's state, counts only if there is no other. None if
    no step has ended. A device profile replaces the catalogue's rates, as in a prediction.
    `repeats` is the number of micro-batches in a whole step over the number that ran.
    """
    program = _Program(report, gpu, profile, repeats)
    ended = program.ended_steps()
    if not ended:
        return None
    steps = [program.step(number) for number in ended[1:] or ended]
    middle = median_low(sorted(step.step_s for step in steps))
    return next(step for step in steps if step.step_s == middle)


@dataclass(frozen=True, slots=True)
class _Call:
    """One kind of call in a step: its phase, its number in the report, and how often it runs."""

    phase: Phase
    again: bool
    number: int
    count: int


class _Program:
    """A report, with the seconds of each kind of call on one GPU."""

    def __init__(
        self, report: Mapping[str, Any], gpu: Gpu, profile: DeviceProfile | None, repeats: float
    ) -> None:
        self._repeats = repeats
        self._gpu, self._times, _ = on_measured_device(gpu, profile)
        self._has_profile = profile is not None
        self._allow_tf32 = bool(report["allow_tf32"])
        ranks = Parallelism(int(report["ranks"]), machines=int(report["machines"]))
        self._lacking = unknown_rate(self._gpu, ranks)
        self._ranks = ranks.ranks
        self._links = None
        if ranks.ranks > 1 and self._lacking is None:
            self._links = Links.of(self._gpu, self._gpu.link_bytes_per_s or 0.0, ranks)
        described = report["described"]
        self._labels = [str(entry[0]) for entry in described]
        self._sources = [str(entry[1]) for entry in described]
        self._works = [tuple(map(_work_from, entry[2])) for entry in described]
        self._launches = [int(entry[3]) for entry in described]
        self._kinds = [works[0].kind for works in self._works]
        arrays = WorkArrays.of_works([work for works in self._works for work in works])
        self._seconds = self._priced(
            self._times.seconds(arrays, self._gpu, allow_tf32=self._allow_tf32)
        )
        self._ends = [
            [self._priced(seconds) for seconds in each]
            for each in self._times.ends(arrays, self._gpu, allow_tf32=self._allow_tf32)
        ]
        self._counts = report["counts"]

    def ended_steps(self) -> list[int]:
        """The steps whose optimizer ran."""
        return sorted({step for step, phase, *_ in self._counts if phase == Phase.OPTIMIZER})

    def step(self, number: int) -> EmulatedStepTime:
        """The time of one step, with its interval and its parts."""
        calls = list(self._calls(number))
        phases = {phase: self._phase(phase, calls) for phase in (*_PASSES, Phase.OPTIMIZER)}
        breakdown: dict[str, float] = defaultdict(float)
        for kinds in phases.values():
            for kind, seconds in kinds.items():
                breakdown[kind] += seconds
        total = sum(breakdown.values())
        unpriced = self._unpriced(calls)
        share = sum(unpriced.values()) / max(1, sum(call.count for call in calls))
        low, high = in_quadrature(
            step_factors(has_profile=self._has_profile), *self._unknown(calls, total)
        )
        estimated_s = sum(
            call.count * self._seconds[call.number]
            for call in calls
            if self._sources[call.number] in {"triton", "product"}
        )
        flops = sum(self._flops(call) for call in calls)
        return EmulatedStepTime(
            step=number,
            step_s=total,
            # Unknown kernels may take as long as all others do on average.
            interval_s=(total * low, total * high / (1.0 - min(share, _MOST_UNPRICED))),
            breakdown_s={kind: s for kind, s in breakdown.items() if s > 0 or kind == "launch"},
            phases_s={str(phase): sum(kinds.values()) for phase, kinds in phases.items()},
            most_expensive=self._most_expensive(calls, total),
            model_flops=flops,
            mfu=self._mfu(calls, flops / total) if flops else None,
            unpriced=unpriced,
            unpriced_share=share,
            estimated_share=min(1.0, estimated_s / total) if total else 0.0,
            notes=tuple(self._notes(calls)),
        )

    # -- time -----------------------------------------------------------------------------------

    def _priced(self, on_device_s: Floats) -> list[float]:
        """Seconds of each kind of call, without exchanges; `on_device_s` (W, 1) has all works."""
        rate, each = pcie_bytes_per_s(self._gpu), iter(on_device_s[:, 0].tolist())
        priced = []
        for listed in self._works:
            total = 0.0
            for work, seconds in zip(listed, each, strict=False):
                apart = {TRANSFER: work.bytes_moved / rate, EXCHANGE: 0.0}
                total += apart.get(work.kind, seconds)
            priced.append(total)
        return priced

    def _calls(self, step: int) -> Iterator[_Call]:
        for number_of_step, phase, again, counts in self._counts:
            if number_of_step == step and phase in {*_PASSES, Phase.OPTIMIZER}:
                times = self._repeats if phase in _PASSES else 1.0
                for number, count in counts:
                    yield _Call(Phase(phase), bool(again), int(number), round(count * times))

    def _phase(self, phase: Phase, calls: list[_Call]) -> dict[str, float]:
        """Seconds of one phase by kind of work; "launch" is the device's wait for the host."""
        kinds: dict[str, float] = defaultdict(float)
        host_s = self._host_s([call for call in calls if call.phase is phase])
        for call in calls:
            if call.phase is phase:
                kinds[self._kind(call)] += call.count * self._seconds[call.number]
        device_s = sum(kinds.values())
        if phase is not Phase.OPTIMIZER:
            kinds["launch"] = max(0.0, host_s - (device_s if self._times.overlaps else 0.0))
        kinds[EXCHANGE] = self._exchange_s(phase, calls, device_s)
        return dict(kinds)

    def _unknown(self, calls: list[_Call], total_s: float) -> Iterator[tuple[float, float]]:
        """The lowest and highest factor on the step time, by unknown (host, kernels, board)."""
        known_s = self._passes_s(calls, self._seconds)
        ends = [[self._passes_s(calls, self._seconds, host) for host in self._times.hosts]]
        ends += [[self._passes_s(calls, seconds) for seconds in each] for each in self._ends]
        for low_s, high_s in ends:
            yield 1 + (low_s - known_s) / total_s, 1 + (high_s - known_s) / total_s

    def _passes_s(self, calls: list[_Call], seconds: list[float], host: float = 1.0) -> float:
        """Seconds of both passes, by `seconds` of each call and `host` times the launch costs."""
        passes_s = 0.0
        for phase in _PASSES:
            members = [call for call in calls if call.phase is phase]
            host_s = self._host_s(members) * host
            device_s = sum(call.count * seconds[call.number] for call in members)
            passes_s += max(host_s, device_s) if self._times.overlaps else host_s + device_s
        return passes_s

    def _host_s(self, calls: list[_Call]) -> float:
        launches = sum(call.count * self._launches[call.number] for call in calls)
        return launches * self._times.launch_s

    def _kind(self, call: _Call) -> str:
        kind = self._kinds[call.number]
        if call.phase is Phase.OPTIMIZER:
            return str(Phase.OPTIMIZER)
        return "recompute" if call.again else kind

    def _exchange_s(self, phase: Phase, calls: list[_Call], device_s: float) -> float:
        """Seconds that ranks wait for each other; gradient reductions overlap with backward."""
        if self._links is None:
            return 0.0
        reduced, others_s = [], 0.0
        for call in calls:
            if call.phase is phase and self._kinds[call.number] == EXCHANGE:
                work = self._works[call.number][0]
                sums = "allreduce" in work.name or "all_reduce" in work.name
                members, stride = (work.shape or (self._ranks, 1))[:2]
                seconds = self._links.collective_s(
                    work.bytes_moved, members=members, stride=stride, sums=sums
                )
                if sums:
                    reduced += [seconds] * call.count
                else:
                    others_s += call.count * seconds
        if not reduced:
            return others_s
        hidden_s = device_s * (1 - 1 / len(reduced)) if phase is Phase.BACKWARD else 0.0
        return others_s + max(min(reduced), sum(reduced) - hidden_s)

    # -- parts of the time ------------------------------------------------------------------------

    def _most_expensive(self, calls: list[_Call], step_s: float) -> tuple[OperatorTime, ...]:
        counts: Counter[int] = Counter()
        for call in calls:
            counts[call.number] += call.count
        ordered = sorted(counts, key=lambda number: -counts[number] * self._seconds[number])
        return tuple(
            OperatorTime(
                self._labels[number],
                self._kinds[number],
                counts[number],
                counts[number] * self._seconds[number],
                counts[number] * self._seconds[number] / step_s,
            )
            for number in ordered[:MOST_EXPENSIVE]
        )

    def _flops(self, call: _Call) -> int:
        if call.again or call.phase is Phase.OPTIMIZER:
            return 0
        return call.count * sum(work.flops for work in self._works[call.number])

    def _mfu(self, calls: list[_Call], flops_per_s: float) -> float:
        """Model FLOP/s over the dense peak of the precision with the most FLOPs."""
        by_dtype: Counter[str] = Counter()
        for call in calls:
            if not call.again:
                for work in self._works[call.number]:
                    by_dtype[work.dtype] += call.count * work.flops
        dtype = by_dtype.most_common(1)[0][0]
        return flops_per_s / matmul_peak(self._gpu, dtype, allow_tf32=self._allow_tf32)

    def _unpriced(self, calls: list[_Call]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for call in calls:
            if self._sources[call.number] == "launch":
                counts[self._labels[call.number]] += call.count
        return dict(counts.most_common())

    def _notes(self, calls: list[_Call]) -> Iterator[str]:
        kinds = {self._kinds[call.number] for call in calls}
        if EXCHANGE in kinds and self._lacking is not None:
            between = "machines" if self._lacking == NETWORK else "GPUs"
            yield f"without communication between {between}: no rate is known for {self._gpu.name}"
        if any(self._sources[call.number] == "product" for call in calls):
            yield "FLOPs of Triton kernels that multiply matrices are guessed from their tensors"


def _work_from(fields: list[Any]) -> Work:
    name, kind, flops, sizes, dtype, shape, workspace = fields
    return Work(
        name,
        kind,
        int(flops),
        tuple(sizes),
        dtype,
        None if shape is None else tuple(shape),
        tuple(workspace),
    )
