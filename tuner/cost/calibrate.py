"""Predictions corrected by measured trials, and the interval that every prediction carries.

Trials of one workload on one GPU share an error: a clock that the board's power does not
sustain, an allocator's habit, a kernel that is slower than its kind. `calibrations_from` learns
it from a journal, separately for each GPU and search space, with the model of
`tuner.cost.interval`; `_Calibrations.apply` corrects a prediction by it. Before
anything is measured, a prediction carries the interval of the prior: what the errors of published
runs let expect of a GPU and workload never seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.core.records import (
    Doubt,
    Memory,
    MemoryCategory,
    Outcome,
    Prediction,
    Speed,
    StageNumbers,
    Status,
    TrialRecord,
)
from tuner.cost.interval import (
    MEMORY_ERRORS,
    Calibration,
    Ends,
    ErrorPrior,
    Floats,
    Observation,
    in_quadrature,
)
from tuner.cost.speed.profile import uses_profile

DEVICE, RESERVED, ALLOCATED = "device_bytes", "peak_reserved_bytes", "peak_allocated_bytes"
STEP, TOKENS = "step_s", "tokens_per_s"

QUANTITIES = (DEVICE, RESERVED, ALLOCATED, STEP)
"""Calibrated quantities. Rates follow from `step_s`: the work of a step is known."""


def sizes_of(memory: Memory) -> dict[str, int]:
    """The peaks that are calibrated, by quantity."""
    return {
        DEVICE: memory.device_bytes,
        RESERVED: memory.peak_reserved_bytes,
        ALLOCATED: memory.peak_allocated_bytes,
    }


def uncorrected(prediction: Prediction) -> Prediction:
    """The prediction as the model of the GPU made it, before any correction by trials."""
    if not prediction.corrections:
        return prediction
    undo = {name: 1.0 / factor for name, factor in prediction.corrections.items()}
    return replace(multiplied(prediction, undo), corrections={})


def multiplied(prediction: Prediction, factors: Mapping[str, float]) -> Prediction:
    """The prediction with its quantities multiplied, and the verdict on the result."""
    if not factors:
        return prediction
    memory = _corrected_memory(prediction.memory, factors)
    before, after = sizes_of(prediction.memory), sizes_of(memory)
    corrections = {n: after[n] / before[n] for n in before if n in factors and before[n]}
    if STEP in factors:
        corrections[STEP] = factors[STEP]
    slower = factors.get(STEP, 1.0)
    return replace(
        prediction,
        memory=memory,
        speed=prediction.speed.slowed(slower),
        corrections=corrections,
        stages={
            name: StageNumbers(
                device_bytes=round(stage.device_bytes * factors.get(DEVICE, 1.0)),
                samples_per_s=stage.samples_per_s / slower,
                step_s=stage.step_s * slower,
            )
            for name, stage in prediction.stages.items()
        },
    )


def _corrected_memory(memory: Memory, factors: Mapping[str, float]) -> Memory:
    device = round(memory.device_bytes * factors.get(DEVICE, 1.0))
    # Each is part of the one before, whatever was learned of each alone.
    reserved = min(device, round(memory.peak_reserved_bytes * factors.get(RESERVED, 1.0)))
    allocated = min(reserved, round(memory.peak_allocated_bytes * factors.get(ALLOCATED, 1.0)))
    share = allocated / memory.peak_allocated_bytes if memory.peak_allocated_bytes else 1.0
    return replace(
        memory,
        device_bytes=device,
        peak_reserved_bytes=reserved,
        peak_allocated_bytes=allocated,
        phase_peak_bytes={
            name: round(size * share) for name, size in memory.phase_peak_bytes.items()
        },
        breakdown=_with_sum(memory.breakdown, device),
    )


def _with_sum(breakdown: Mapping[str, int], total: int) -> dict[str, int]:
    """The breakdown with another sum; the allocator's overhead, the least certain, gives first."""
    parts = dict(breakdown)
    overhead = str(MemoryCategory.ALLOCATOR_OVERHEAD)
    parts[overhead] = max(0, parts.get(overhead, 0) + total - sum(parts.values()))
    excess = sum(parts.values()) - total
    if excess:
        share = total / sum(parts.values())
        parts = {name: round(size * share) for name, size in parts.items()}
        largest = max(parts, key=parts.__getitem__)
        parts[largest] += total - sum(parts.values())
    return parts


_SOURCE = (
    "{} published runs in {} groups of one GPU and program (and machine, for step times): a prior "
    "with the interval that all priors give, each as probable as the runs make it, printed by "
    "benchmarks/accuracy/coverage.py"
)
_DEVICE_PRIOR = ErrorPrior(
    bias_scale=0.02,
    spread=0.05,
    spread_sd=1.0,
    # Identical published runs differed by up to 11.7 % in reserved memory, most by far less.
    least_spread=0.02,
    source=_SOURCE.format(99, 5),
)
_ALLOCATED_PRIOR = ErrorPrior(
    bias_scale=0.002,
    spread=0.005,
    spread_sd=1.0,
    # What gaps left by loading 4-bit weights change (0.1 to 0.8 %, docs/notebook/accuracy.md).
    least_spread=0.003,
    source=_SOURCE.format(99, 5),
)
_STEP_PRIOR = ErrorPrior(  # of the whole error, which is what trials teach
    bias_scale=0.07,
    spread=0.07,
    spread_sd=0.6,
    # Configurations that one T4 ran twice on one day differ by 0.3 to 11 %.
    least_spread=0.03,
    source=_SOURCE.format(96, 9),
    # Seconds that a micro-step takes beyond its kernels: thousands of operators at some
    # microseconds each for the host (`speed.host`), and a batch to prepare.
    fixed_cost=0.02,
)
_STEP_PRIOR_WITH_PROFILE = replace(
    _STEP_PRIOR,
    # A profile measures the GPU's rates. What programs make of them differs still: by 4 to 13 %
    # between programs on the A100, by 15 % one configuration on two days of a T4.
    bias_scale=0.05,
    source="the two pairs of groups that share a GPU; no rows with a device profile yet",
)
PROGRAM_PRIOR = replace(
    _STEP_PRIOR,
    # What is left of the errors of step times beside what host, kernels and board account for.
    bias_scale=0.05,
    spread=0.05,
    source="the most probable prior of 113 published runs in 10 groups of one GPU, program and "
    "machine, less what `StepTimes.unknown` allows for; benchmarks/accuracy/coverage.py",
)

STEP_DOUBTS: Mapping[Doubt, Ends] = {Doubt.OLD_RELEASES: (0.85, 1.38)}
"""Ends of a step's time over the prediction, by doubt: they hold 90 % of 116 runs with code and
PyTorch of 2019 to 2022 (`benchmarks.accuracy`)."""


def doubted_step(doubts: Collection[Doubt]) -> Ends:
    """The ends that these doubts give a step's time, over the prediction."""
    return in_quadrature(*(STEP_DOUBTS[doubt] for doubt in doubts if doubt in STEP_DOUBTS))


def prior_of(quantity: str, *, has_profile: bool) -> ErrorPrior:
    """The expected errors of one of `QUANTITIES`, before trials.

    A device profile narrows the step time: the GPU's own rates are then measured. It hardly
    changes memory, of which it measures only the CUDA context.
    """
    if quantity == STEP:
        return _STEP_PRIOR_WITH_PROFILE if has_profile else _STEP_PRIOR
    return {DEVICE: _DEVICE_PRIOR, RESERVED: _DEVICE_PRIOR, ALLOCATED: _ALLOCATED_PRIOR}[quantity]


def prior_intervals(
    memory: Memory,
    speed: Speed,
    method: str,
    unknown: Ends = (1.0, 1.0),
    *,
    limit_bytes: int | None = None,
    doubts: Collection[Doubt] = (),
) -> dict[str, Ends]:
    """The 90 % interval of each quantity of a prediction that nothing was measured for.

    `method` is that of the prediction: it says whether a device profile was used. `unknown` are
    the ends of what host, kernels and board may make of the step, over what is predicted
    (`StepTimes.unknown`); how much programs differ comes on top. `limit_bytes` is the memory of
    the GPU, and `doubts` widen the intervals (`MemoryErrors`, `STEP_DOUBTS`).
    """
    # Thousands of predictions are made at once: plain tuples, and nothing looked up twice.
    has_profile = uses_profile(method)
    factors = step_factors(has_profile=has_profile)
    low, high = in_quadrature(factors, unknown, doubted_step(doubts))
    device, reserved, allocated = MEMORY_ERRORS.ends(
        memory, limit_bytes=limit_bytes, measured_context=has_profile, doubts=doubts
    )
    return _named(
        device,
        reserved,
        allocated,
        (speed.step_s * low, speed.step_s * high),
        tokens=speed.tokens_per_s * speed.step_s,
    )


def widened(prediction: Prediction, doubts: Collection[Doubt]) -> Prediction:
    """The prediction with intervals that are wider by these doubts.

    Doubts add as squares, to what the intervals allow for already.
    """
    if not doubts or not prediction.intervals:
        return prediction
    ends = dict(prediction.intervals)
    shares = [MEMORY_ERRORS.doubts[doubt] for doubt in doubts]
    for name, size in sizes_of(prediction.memory).items():
        low, high = ends[name]
        pairs = [
            (s.allocated, s.allocated) if name == ALLOCATED else (s.below, s.above) for s in shares
        ]
        below = math.hypot(size - low, *(size * share for share, _ in pairs))
        above = math.hypot(high - size, *(size * share for _, share in pairs))
        ends[name] = (round(size - below), round(size + above))
    low, high = doubted_step(doubts)
    step_s, tokens = prediction.speed.step_s, prediction.speed.tokens_per_s
    if step_s and (low, high) != (1.0, 1.0):
        own = min(ends[STEP][0] / step_s, 1.0), max(ends[STEP][1] / step_s, 1.0)
        low, high = in_quadrature(own, (low, high))
        ends[STEP], ends[TOKENS] = (step_s * low, step_s * high), (tokens / high, tokens / low)
    return replace(prediction, intervals=ends)


@functools.cache
def step_factors(*, has_profile: bool) -> Ends:
    """Range of a program's step time, over a prediction without measurements."""
    prior = _STEP_PRIOR_WITH_PROFILE if has_profile else PROGRAM_PRIOR
    factors = _prior_calibration(prior).factors
    return factors.low, factors.high


@functools.cache
def _prior_calibration(prior: ErrorPrior) -> Calibration:
    return Calibration.fit((), prior)


def _named(
    device: Ends, reserved: Ends, allocated: Ends, step: Ends, *, tokens: float
) -> dict[str, Ends]:
    """Ends by name, sizes in whole bytes; a step's `tokens` give those of the rate."""
    return {
        DEVICE: (round(device[0]), round(device[1])),
        RESERVED: (round(reserved[0]), round(reserved[1])),
        ALLOCATED: (round(allocated[0]), round(allocated[1])),
        STEP: step,
        TOKENS: (tokens / step[1], tokens / step[0]),
    }


# -- learning from trials -------------------------------------------------------------------


_Key = tuple[str, str, str, bool]
"""Quantity, GPU, space, and whether a device profile was used (for step times only)."""


@dataclass(frozen=True, slots=True)
class _Calibrations:
    """The scatter learned from trials, by GPU, space and quantity; the prior without trials."""

    learned: Mapping[_Key, Calibration] = field(default_factory=dict)

    def of(self, quantity: str, prediction: Prediction, space: str) -> Calibration:
        """Scatter of measured values of `quantity` around predictions made like this one."""
        key = _key(quantity, prediction, space)
        return self.learned.get(key) or _prior_calibration(
            prior_of(quantity, has_profile=uses_profile(prediction.method))
        )

    def probabilities_of_fitting(self, predictions: Sequence[Prediction], space: str) -> Floats:
        """The probability of each that its device memory is within the limit: (predictions,)."""
        groups: dict[tuple[Calibration, int], list[tuple[int, int]]] = {}
        for place, prediction in enumerate(map(uncorrected, predictions)):
            limit = prediction.budget.limit_bytes
            group = groups.setdefault((self.of(DEVICE, prediction, space), limit), [])
            group.append((place, prediction.memory.device_bytes))
        fitting = np.empty(len(predictions))
        for (calibration, limit), members in groups.items():
            places, sizes = zip(*members, strict=True)
            above = calibration.probabilities_above(np.array(sizes, dtype=float), limit)
            fitting[list(places)] = 1.0 - above
        return fitting

    def apply(self, prediction: Prediction, space: str) -> Prediction:
        """The prediction with medians corrected by what was measured, and its intervals.

        Applying to a prediction that was corrected before replaces that correction.
        """
        raw = uncorrected(prediction)
        calibrations = {name: self.of(name, raw, space) for name in QUANTITIES}
        values = {**sizes_of(raw.memory), STEP: raw.speed.step_s}
        units = _micro_steps(raw.speed)
        expected = {n: calibrations[n].correct(value, units=units) for n, value in values.items()}
        factors = {
            name: expected[name].median / value
            for name, value in values.items()
            if calibrations[name].count and value
        }
        ends = {name: (expected[name].low, expected[name].high) for name in QUANTITIES}
        unmeasured = [name for name in QUANTITIES if not calibrations[name].count]
        # Its own knows host, kernels, board and doubts; where it was corrected, it may be older.
        own = {} if prediction.corrections else prediction.intervals
        if not own.keys() >= set(unmeasured):
            limit = raw.budget.limit_bytes
            own = {**prior_intervals(raw.memory, raw.speed, raw.method, limit_bytes=limit), **own}
        ends |= {name: own[name] for name in unmeasured}
        tokens = raw.speed.tokens_per_s * raw.speed.step_s
        return replace(multiplied(raw, factors), intervals=_named(*ends.values(), tokens=tokens))


def _micro_steps(speed: Speed) -> float:
    return float(round(speed.it_per_s * speed.step_s))


def _key(quantity: str, prediction: Prediction, space: str) -> _Key:
    has_profile = quantity == STEP and uses_profile(prediction.method)
    return quantity, prediction.gpu, space, has_profile


def calibrations_from(records: Iterable[TrialRecord]) -> _Calibrations:
    """Learn from the measured trials among `records`, for each GPU and space.

    A trial needs a prediction to be compared with: its own, or that of another record of the
    same configuration. Predictions teach nothing.
    """
    records = list(records)
    predictions: dict[tuple[str, str, str], Prediction] = {}
    for record in records:
        if record.outcome.prediction is not None:
            predictions[_trial_key(record)] = uncorrected(record.outcome.prediction)
    groups: dict[_Key, list[Observation]] = {}
    priors: dict[_Key, ErrorPrior] = {}
    for record in records:
        prediction = predictions.get(_trial_key(record))
        if prediction is None:
            continue
        if record.outcome.prediction is not None:
            prediction = uncorrected(record.outcome.prediction)
        if prediction.is_compiled:  # torch.compile's effect is no error of a prediction
            continue
        for observation in observations_of(record, prediction):
            key = _key(observation.quantity, prediction, record.space)
            groups.setdefault(key, []).append(observation)
            priors[key] = prior_of(observation.quantity, has_profile=key[-1])
    return _Calibrations({key: Calibration.fit(seen, priors[key]) for key, seen in groups.items()})


def _trial_key(record: TrialRecord) -> tuple[str, str, str]:
    return record.space, record.gpu, record.configuration.key


def observations_of(record: TrialRecord, prediction: Prediction) -> list[Observation]:
    """Errors of an uncorrected prediction in a trial; empty if none ran.

    Of an emulated one only what is not an estimate: its memory, and no time.
    """
    outcome = record.outcome
    limit = float(record.memory_limit_bytes or record.gpu_memory_bytes)
    if outcome.status is Status.OOM:
        ran_out = outcome.device_ran_out and _refused(outcome)
        return _bounds(prediction, at_least=limit) if ran_out else []
    ran = outcome.ran
    if ran is None:
        return []
    sizes = sizes_of(ran.memory)
    seen = [
        Observation(name, predicted, measured=sizes[name])
        for name, predicted in sizes_of(prediction.memory).items()
        if sizes[name] > 0 and predicted > 0
    ]
    # A trial that one stage ended has the speed of that stage, and was predicted for all.
    if outcome.status is Status.OK and outcome.stage is None:
        if sizes[DEVICE] <= 0:  # the driver did not tell, but it was enough
            seen += _bounds(prediction, at_most=limit)[:1]
        # Of the data's own lengths nothing is predicted: every sequence has the longest.
        if outcome.measurement is not None and ran.lengths != "data":
            step_s = ran.speed.step_s
            units = _micro_steps(prediction.speed)
            seen.append(Observation(STEP, prediction.speed.step_s, measured=step_s, units=units))
    return seen


def _refused(outcome: Outcome) -> bool:
    """Tell a device that refused memory from a prediction that counted.

    Only a device has a request that it refused, and only a device can refuse what was
    predicted to fit.
    """
    prediction = outcome.prediction
    return outcome.requested_bytes is not None or (
        prediction is None or prediction.memory.device_bytes <= prediction.budget.limit_bytes
    )


def _bounds(
    prediction: Prediction, *, at_least: float | None = None, at_most: float | None = None
) -> list[Observation]:
    """A bound on device memory, and what it means for reserved memory."""
    memory = prediction.memory
    context = memory.device_bytes - memory.peak_reserved_bytes

    def bound(name: str, predicted: int, outside: int) -> Observation:
        low = None if at_least is None else at_least - outside
        high = None if at_most is None else at_most - outside
        return Observation(name, predicted, at_least=low, at_most=high)

    return [
        bound(DEVICE, memory.device_bytes, 0),
        bound(RESERVED, memory.peak_reserved_bytes, context),
    ]
