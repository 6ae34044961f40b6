"""Predictions corrected by measured trials, and the interval that every prediction carries.

Trials of one workload on one GPU share an error: a clock that the board's power does not
sustain, an allocator's habit, a kernel that is slower than its kind. `calibrations_from` learns
it from a journal, separately for each GPU and search space, with the model of
`tuner.estimate.interval`; `Calibrations.apply` corrects a prediction by it. Before anything is
measured, a prediction carries the interval of the prior: what the errors of published runs let
expect of a GPU and workload never seen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.estimate.interval import Calibration, Floats, Interval, Observation, Prior
from tuner.estimate.profile import METHOD as PROFILE_METHOD
from tuner.records import Memory, MemoryCategory, Outcome, Prediction, Speed, Status, TrialRecord

DEVICE, RESERVED, ALLOCATED = "device_bytes", "peak_reserved_bytes", "peak_allocated_bytes"
STEP, TOKENS = "step_s", "tokens_per_s"

QUANTITIES = (DEVICE, RESERVED, ALLOCATED, STEP)
"""What is calibrated. Rates follow from `step_s`: the work of a step is known."""

_SOURCE = (
    "benchmarks/accuracy/coverage.py: of the {} rows of grade A in {} groups of one GPU and "
    "program, the prior under which they are the most probable"
)
_DEVICE_PRIOR = Prior(0.01, 0.05, 1.0, 0.02, _SOURCE.format(99, 4))
_ALLOCATED_PRIOR = Prior(0.002, 0.003, 1.0, 0.003, _SOURCE.format(99, 4))
_STEP_PRIOR = Prior(0.15, 0.1, 1.0, 0.03, _SOURCE.format(96, 7))
_STEP_PRIOR_WITH_PROFILE = Prior(0.08, 0.1, 1.0, 0.03, _SOURCE)


def prior_of(quantity: str, *, has_profile: bool) -> Prior:
    """What is expected of the errors of one of `QUANTITIES` before anything is measured.

    A device profile narrows the step time: the GPU's own rates are then measured. It hardly
    changes memory, of which it measures only the CUDA context.
    """
    if quantity == STEP:
        return _STEP_PRIOR_WITH_PROFILE if has_profile else _STEP_PRIOR
    return {DEVICE: _DEVICE_PRIOR, RESERVED: _DEVICE_PRIOR, ALLOCATED: _ALLOCATED_PRIOR}[quantity]


def prior_intervals(memory: Memory, speed: Speed, method: str) -> dict[str, tuple[float, float]]:
    """The 90 % interval of each quantity of a prediction that nothing was measured for.

    `method` is that of the prediction: it says whether a device profile was used.
    """
    has_profile = PROFILE_METHOD in method
    factors = {quantity: _prior_factors(quantity, has_profile) for quantity in QUANTITIES}
    return _intervals(memory, speed, factors)


@functools.cache
def _prior_factors(quantity: str, has_profile: bool) -> Interval:
    return _prior_calibration(prior_of(quantity, has_profile=has_profile)).factors


@functools.cache
def _prior_calibration(prior: Prior) -> Calibration:
    return Calibration.fit((), prior)


def _intervals(
    memory: Memory, speed: Speed, factors: Mapping[str, Interval]
) -> dict[str, tuple[float, float]]:
    step = factors[STEP]
    intervals: dict[str, tuple[float, float]] = {
        name: (round(size * factors[name].low), round(size * factors[name].high))
        for name, size in _sizes(memory).items()
    }
    intervals[STEP] = (speed.step_s * step.low, speed.step_s * step.high)
    intervals[TOKENS] = (speed.tokens_per_s / step.high, speed.tokens_per_s / step.low)
    return intervals


def _sizes(memory: Memory) -> dict[str, int]:
    return {
        DEVICE: memory.device_bytes,
        RESERVED: memory.peak_reserved_bytes,
        ALLOCATED: memory.peak_allocated_bytes,
    }


# -- learning from trials -------------------------------------------------------------------


_Key = tuple[str, str, str, bool]
"""Quantity, GPU, space, and whether a device profile was used (for step times only)."""


@dataclass(frozen=True, slots=True)
class Calibrations:
    """What trials taught, by GPU, space and quantity; where they taught nothing, the prior."""

    learned: Mapping[_Key, Calibration] = field(default_factory=dict)

    def of(self, quantity: str, prediction: Prediction, space: str) -> Calibration:
        """How measured values of `quantity` scatter around predictions made like this one."""
        key = _key(quantity, prediction, space)
        return self.learned.get(key) or _prior_calibration(
            prior_of(quantity, has_profile=PROFILE_METHOD in prediction.method)
        )

    def probability_of_fitting(
        self, prediction: Prediction, space: str, limit_bytes: int | None = None
    ) -> float:
        """The probability that device memory stays within the limit (by default the GPU's)."""
        raw = uncorrected(prediction)
        limit = raw.limit_bytes if limit_bytes is None else limit_bytes
        return self.of(DEVICE, raw, space).probability_of_fitting(raw.memory.device_bytes, limit)

    def probabilities_of_fitting(
        self, predictions: Sequence[Prediction], space: str, limit_bytes: int | None = None
    ) -> Floats:
        """`probability_of_fitting` of many predictions at once, shape (predictions,)."""
        groups: dict[tuple[Calibration, int], list[tuple[int, int]]] = {}
        for place, prediction in enumerate(map(uncorrected, predictions)):
            limit = prediction.limit_bytes if limit_bytes is None else limit_bytes
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
        medians = {name: c.factors.median for name, c in calibrations.items() if c.count}
        factors = {name: c.factors for name, c in calibrations.items()}
        intervals = _intervals(raw.memory, raw.speed, factors)
        return replace(_multiplied(raw, medians), intervals=intervals)


def _key(quantity: str, prediction: Prediction, space: str) -> _Key:
    has_profile = quantity == STEP and PROFILE_METHOD in prediction.method
    return quantity, prediction.gpu, space, has_profile


def calibrations_from(records: Iterable[TrialRecord]) -> Calibrations:
    """What the measured trials among `records` teach, for each GPU and space.

    A trial needs a prediction to be compared with: its own, or that of another record of the
    same configuration. Simulated trials teach nothing.
    """
    records = list(records)
    predictions: dict[tuple[str, str, str], Prediction] = {}
    for record in records:
        if record.outcome.prediction is not None:
            predictions[_trial_key(record)] = uncorrected(record.outcome.prediction)
    groups: dict[_Key, list[Observation]] = {}
    priors: dict[_Key, Prior] = {}
    for record in records:
        prediction = predictions.get(_trial_key(record))
        if prediction is None:
            continue
        if record.outcome.prediction is not None:
            prediction = uncorrected(record.outcome.prediction)
        for observation in observations_of(record, prediction):
            key = _key(observation.quantity, prediction, record.space)
            groups.setdefault(key, []).append(observation)
            priors[key] = prior_of(observation.quantity, has_profile=key[-1])
    return Calibrations({key: Calibration.fit(seen, priors[key]) for key, seen in groups.items()})


def _trial_key(record: TrialRecord) -> tuple[str, str, str]:
    return record.space, record.gpu, record.configuration.key


def observations_of(record: TrialRecord, prediction: Prediction) -> list[Observation]:
    """What a trial says of an uncorrected prediction; nothing, when the trial was simulated."""
    outcome, limit = record.outcome, float(record.gpu_memory_bytes)
    if outcome.status is Status.OOM:
        return _bounds(prediction, at_least=limit) if _ran_out(outcome) else []
    if outcome.measurement is None:
        return []
    sizes = _sizes(outcome.measurement.memory)
    seen = [
        Observation(name, predicted, measured=sizes[name])
        for name, predicted in _sizes(prediction.memory).items()
        if sizes[name] > 0 and predicted > 0
    ]
    if outcome.status is Status.OK:
        if sizes[DEVICE] <= 0:  # the driver did not tell, but it was enough
            seen += _bounds(prediction, at_most=limit)[:1]
        step_s = outcome.measurement.speed.step_s
        seen.append(Observation(STEP, prediction.speed.step_s, measured=step_s))
    return seen


def _ran_out(outcome: Outcome) -> bool:
    """Whether a device ran out of memory, rather than a simulation that counted.

    Only a device has a request that it refused, and only a device can refuse what was
    predicted to fit.
    """
    prediction = outcome.prediction
    return outcome.requested_bytes is not None or (
        prediction is None or prediction.memory.device_bytes <= prediction.limit_bytes
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


# -- correcting a prediction ----------------------------------------------------------------


def uncorrected(prediction: Prediction) -> Prediction:
    """The prediction as the model of the GPU made it, before any correction by trials."""
    if not prediction.corrections:
        return prediction
    undo = {name: 1.0 / factor for name, factor in prediction.corrections.items()}
    return replace(_multiplied(prediction, undo), corrections={})


def _multiplied(prediction: Prediction, factors: Mapping[str, float]) -> Prediction:
    """The prediction with its quantities multiplied, and the verdict on the result."""
    if not factors:
        return prediction
    memory = _corrected_memory(prediction.memory, factors)
    before, after = _sizes(prediction.memory), _sizes(memory)
    corrections = {n: after[n] / before[n] for n in before if n in factors and before[n]}
    if STEP in factors:
        corrections[STEP] = factors[STEP]
    return replace(
        prediction,
        fits=memory.device_bytes + prediction.margin_bytes <= prediction.limit_bytes,
        memory=memory,
        speed=_corrected_speed(prediction.speed, factors.get(STEP, 1.0)),
        corrections=corrections,
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


def _corrected_speed(speed: Speed, factor: float) -> Speed:
    return Speed(
        step_s=speed.step_s * factor,
        it_per_s=speed.it_per_s / factor,
        samples_per_s=speed.samples_per_s / factor,
        tokens_per_s=speed.tokens_per_s / factor,
        mfu=None if speed.mfu is None else speed.mfu / factor,
        breakdown_s={kind: seconds * factor for kind, seconds in speed.breakdown_s.items()},
    )
