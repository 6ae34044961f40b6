"""The time of a training step, from the operators that an emulated program ran in it.

`tuner.cost.speed.roofline` says how long passes and updates take, as of a traced step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.core.gpu import Gpu
from tuner.core.records import Phase
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.calibrate import step_factors
from tuner.cost.interval import Floats, in_quadrature
from tuner.cost.operators.timeline import Work
from tuner.cost.parallel import NETWORK, Links, left_of_sums, unknown_rate
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.rates import matmul_peak
from tuner.cost.speed.roofline import (
    KernelSeconds,
    PassTimes,
    UpdateTime,
    pass_times,
    update_launches,
)
from tuner.cost.step_details import MOST_EXPENSIVE, OperatorTime
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.rates import EXCHANGE, EmulatedTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PASSES = (Phase.GENERATE, Phase.FORWARD, Phase.BACKWARD)

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

    @property
    def updating_s(self) -> float:
        """The time of the optimizer in a step, which accumulation does not repeat."""
        return self.phases_s.get("optimizer", 0.0)


def step_time(
    report: Mapping[str, Any],
    gpu: Gpu,
    *,
    profile: DeviceProfile | None = None,
    repeats: float = 1.0,
) -> EmulatedStepTime | None:
    """The time of the program's median step; `report` comes from `Pricer.snapshot`.

    The first step, which creates the optimizer's state, counts only if there is no other. None if
    no step has ended with its backward pass and fewer FLOP/s than the device has: another one
    can't be. A device profile replaces the catalogue's rates, as in a prediction.
    `repeats` is the number of micro-batches in a whole step over the number that ran.
    """
    program = _Program(report, gpu, profile, repeats)
    ended = program.ended_steps()
    steps = [program.step(number) for number in ended[1:] or ended]
    steps = [step for step in steps if (step.mfu or 0.0) <= 1.0]
    if not steps:
        return None
    middle = median_low(sorted(step.step_s for step in steps))
    return next(step for step in steps if step.step_s == middle)


class _Step(NamedTuple):
    """The calls of one step, by their number in the report.

    `passes` (3, 2, C) are the calls in `_PASSES`, first not recomputed, then recomputed; `update`
    (C,) those in the optimizer. `all` has those of all three, in the order of their first call.
    """

    passes: NDArray[np.int64]
    update: NDArray[np.int64]
    all: Counter[int]


class _Program:
    """A report, with the seconds of each kind of call on one GPU."""

    def __init__(
        self, report: Mapping[str, Any], gpu: Gpu, profile: DeviceProfile | None, repeats: float
    ) -> None:
        self._repeats = repeats
        self._gpu, kernel_times, _ = on_measured_device(gpu, profile)
        self._times = EmulatedTimes(kernel_times)
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
        self._kinds = [works[0].kind for works in self._works]
        self._kernels, self._update_s = self._priced([float(entry[3]) for entry in described])
        self._counts = report["counts"]
        self._trained, self._reads_loss = int(report["trained"]), bool(report["reads_loss"])

    def ended_steps(self) -> list[int]:
        """The steps whose optimizer ran, and their backward pass if the program has any."""
        ran: dict[int, set[str]] = defaultdict(set)
        for step, phase, _, calls in self._counts:
            ran[step] |= {phase} if calls else set()
        has_backward = any(Phase.BACKWARD in phases for phases in ran.values())
        needed = {Phase.OPTIMIZER, *([Phase.BACKWARD] if has_backward else [])}
        return sorted(step for step, phases in ran.items() if phases >= needed)

    def step(self, number: int) -> EmulatedStepTime:
        """The time of one step, with its interval and its parts."""
        import numpy as np

        step = self._calls(number)
        passes = pass_times(self._kernels, step.passes)
        phases = self._phases(step, passes)
        breakdown: dict[str, float] = defaultdict(float)
        for kinds in phases.values():
            for kind, seconds in kinds.items():
                breakdown[kind] += seconds
        total = sum(breakdown.values())
        unpriced = self._unpriced(step)
        share = sum(unpriced.values()) / max(1, step.all.total())
        unknown = 1.0 + np.sum(passes.added_s, axis=0)[:, :, 0] / total
        low, high = in_quadrature(
            step_factors(has_profile=self._has_profile), *map(tuple, unknown.tolist())
        )
        passes_s = step.passes.sum(axis=(0, 1)) * self._kernels.seconds[:, 0]
        calls_s: list[float] = (passes_s + step.update * self._update_s).tolist()
        estimated_s = sum(
            calls_s[call] for call in step.all if self._sources[call] in {"triton", "product"}
        )
        flops = int(passes.model_flops.sum())
        return EmulatedStepTime(
            step=number,
            step_s=total,
            # Unknown kernels may take as long as all others do on average.
            interval_s=(total * low, total * high / (1.0 - min(share, _MOST_UNPRICED))),
            breakdown_s={kind: s for kind, s in breakdown.items() if s > 0 or kind == "launch"},
            phases_s={
                str(phase): sum(kinds.values())
                for phase, kinds in phases.items()
                if phase is not Phase.GENERATE or any(kinds.values())
            },
            most_expensive=self._most_expensive(step, calls_s, total),
            model_flops=flops,
            mfu=self._mfu(step, flops / total) if flops else None,
            unpriced=unpriced,
            unpriced_share=share,
            estimated_share=min(1.0, estimated_s / total) if total else 0.0,
            notes=tuple(self._notes(step)),
        )

    # -- time -----------------------------------------------------------------------------------

    def _priced(self, launches: list[float]) -> tuple[KernelSeconds, Floats]:
        """Seconds of each kind of call in a pass and in the update, without exchanges."""
        import numpy as np

        works = [work for listed in self._works for work in listed]
        starts = np.cumsum([0, *map(len, self._works)])[:-1]

        def of_calls(values: Floats) -> Floats:
            added: Floats = np.add.reduceat(values, starts, axis=0) if len(starts) else values
            return added

        arrays = WorkArrays.of_works(works)
        found = KernelSeconds.of(arrays, self._gpu, self._times, allow_tf32=self._allow_tf32)
        kernels = KernelSeconds(
            kinds=np.array(self._kinds, dtype=np.str_),
            flops=of_calls(found.flops),
            seconds=of_calls(found.seconds),
            ends=tuple((of_calls(low), of_calls(high)) for low, high in found.ends),
            launches=np.array(launches, dtype=float),
            waits=of_calls(found.waits.astype(int)) > 0,
            host=found.host,
        )
        update_s = self._times.seconds(arrays, self._gpu, allow_tf32=self._allow_tf32, streams=True)
        return kernels, of_calls(update_s)[:, 0]

    def _update_time(self, step: _Step, ahead_s: Floats) -> float:
        """Seconds of an update after passes in which the host was `ahead_s` ahead."""
        import numpy as np

        names = np.array([works[0].name for works in self._works], dtype=np.str_)
        launches = update_launches(self._trained, names, step.update)
        host_s = np.array([launches * self._kernels.host.launch_s])
        update = UpdateTime(np.array([step.update @ self._update_s]), host_s)
        return float(update.after(ahead_s, reads_loss=self._reads_loss)[0])

    def _calls(self, number: int) -> _Step:
        import numpy as np

        passes = np.zeros((len(_PASSES), 2, len(self._works)), dtype=np.int64)
        step = _Step(passes, np.zeros(len(self._works), dtype=np.int64), Counter())
        for number_of_step, phase, again, counts in self._counts:
            if number_of_step != number or phase not in {*_PASSES, Phase.OPTIMIZER}:
                continue
            is_pass = phase in _PASSES
            into = passes[_PASSES.index(Phase(phase)), int(again)] if is_pass else step.update
            for call, count in counts:
                times = round(count * self._repeats) if is_pass else count
                into[call] += times
                step.all[call] += times
        return step

    def _phases(self, step: _Step, passes: PassTimes) -> dict[Phase, dict[str, float]]:
        """Seconds of each phase by kind of work; "launch" is the device's wait for the host."""
        phases = {
            phase: {kind: float(seconds[0]) for kind, seconds in by_kind.items()}
            for phase, by_kind in zip(_PASSES, passes.seconds, strict=True)
        }
        update_s = self._update_time(step, passes.ahead_s[-1])
        phases[Phase.OPTIMIZER] = {str(Phase.OPTIMIZER): update_s}
        calls = (*step.passes.sum(axis=1), step.update)
        for (phase, kinds), counts in zip(phases.items(), calls, strict=True):
            device_s = sum(kinds.values()) - kinds.get("launch", 0.0)
            kinds[EXCHANGE] = self._exchange_s(counts, device_s if phase is Phase.BACKWARD else 0.0)
        return phases

    def _exchange_s(self, calls: NDArray[np.int64], backward_s: float) -> float:
        """Seconds that ranks wait for each other in a phase; sums overlap with `backward_s`."""
        if self._links is None:
            return 0.0
        sums_s: list[float] = []
        others_s = 0.0
        for number, count in enumerate(calls.tolist()):
            if count and self._kinds[number] == EXCHANGE:
                work = self._works[number][0]
                sums = "allreduce" in work.name or "all_reduce" in work.name
                members, stride = (work.shape or (self._ranks, 1))[:2]
                seconds = self._links.collective_s(
                    work.bytes_moved, members=members, stride=stride, sums=sums
                )
                if sums:
                    sums_s += [seconds] * count
                else:
                    others_s += count * seconds
        return others_s + left_of_sums(sums_s, backward_s)

    # -- parts of the time ------------------------------------------------------------------------

    def _most_expensive(
        self, step: _Step, seconds: list[float], step_s: float
    ) -> tuple[OperatorTime, ...]:
        return tuple(
            OperatorTime(
                self._labels[call],
                self._kinds[call],
                step.all[call],
                seconds[call],
                seconds[call] / step_s,
            )
            for call in sorted(step.all, key=lambda call: -seconds[call])[:MOST_EXPENSIVE]
        )

    def _mfu(self, step: _Step, flops_per_s: float) -> float:
        """Model FLOP/s over the dense peak of the precision with the most FLOPs."""
        by_dtype: Counter[str] = Counter()
        for call, count in enumerate((step.passes[:, 0].sum(axis=0) + step.update).tolist()):
            for work in self._works[call]:
                by_dtype[work.dtype] += count * work.flops
        dtype = by_dtype.most_common(1)[0][0]
        return flops_per_s / matmul_peak(self._gpu, dtype, allow_tf32=self._allow_tf32)

    def _unpriced(self, step: _Step) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for call, count in step.all.items():
            if self._sources[call] == "launch":
                counts[self._labels[call]] += count
        return dict(counts.most_common())

    def _notes(self, step: _Step) -> Iterator[str]:
        kinds = {self._kinds[call] for call in step.all}
        if EXCHANGE in kinds and self._lacking is not None:
            between = "machines" if self._lacking == NETWORK else "GPUs"
            yield f"without communication between {between}: no rate is known for {self._gpu.name}"
        if any(self._sources[call] == "product" for call in step.all):
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
