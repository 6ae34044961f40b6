"""Finds impossible records: their configuration isn't in the space, or no device reaches them.

A journal may come from another person, or be edited. A rate that no device can reach would be
recommended before all others, and an invalid value would be written into the user's files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from tuner.core.errors import InputError
from tuner.core.records import KnobValue, Measurement, Prediction, Status, TrialRecord
from tuner.core.units import printable
from tuner.space import SearchSpace

MAX_DEVICE_BYTES = 1 << 46
"""64 TiB: a hundred times the largest processor's memory, and even more times a GPU's."""

MAX_RATE = 1e12
"""Samples or tokens per second: the rate of a million parameters at one exaFLOP/s."""

MIN_STEP_S = 1e-7
"""A GPU takes more than this to start a single kernel."""

SHOWN = 3

Excluded = tuple[TrialRecord, str]
"""A record, and the reason why it is ignored."""


def sorted_out(
    records: Iterable[TrialRecord], space: SearchSpace
) -> tuple[list[TrialRecord], list[Excluded]]:
    """The possible records, and the impossible ones with the reason for each."""
    kept, excluded = [], []
    knobs = _Knobs(space)
    for record in records:
        reason = _beyond_physics(record) or knobs.problem(record)
        if reason:
            excluded.append((record, reason))
        else:
            kept.append(record)
    return kept, excluded


def excluded_text(excluded: Sequence[Excluded]) -> str:
    """The number of records set aside, and the reasons of the first ones; empty if none was."""
    if not excluded:
        return ""
    told = "; ".join(f"{record.trial_id[:40]}: {why}" for record, why in excluded[:SHOWN])
    more = f"; and {len(excluded) - SHOWN} more" if len(excluded) > SHOWN else ""
    plural = "s" if len(excluded) > 1 else ""
    return printable(f"{len(excluded)} impossible record{plural} set aside ({told}{more})")


def say(excluded: Sequence[Excluded]) -> None:
    """Log a warning about records that were set aside."""
    if text := excluded_text(excluded):
        logging.getLogger("tuner").warning("note: %s", text)


def _beyond_physics(record: TrialRecord) -> str:
    outcome = record.outcome
    if record.gpu_memory_bytes <= 0:
        return "its GPU has no memory"
    for numbers in (outcome.measurement, outcome.emulation, outcome.prediction):
        if numbers is not None and outcome.status is Status.OK and (found := _wrong(numbers)):
            return found
    return ""


def _wrong(numbers: Measurement | Prediction) -> str:
    """The first number of a successful trial that no device can reach, or an empty string."""
    speed, size = numbers.speed, numbers.memory.device_bytes
    if size > MAX_DEVICE_BYTES:
        return f"device_bytes of {size}"
    if speed.step_s < MIN_STEP_S:
        return f"a step of {speed.step_s:g} s"
    for name, rate in (("samples", speed.samples_per_s), ("tokens", speed.tokens_per_s)):
        if rate > MAX_RATE or (name == "samples" and rate <= 0):
            return f"{rate:g} {name} a second"
    for name, (low, high) in numbers.intervals.items():
        if low > high:
            return f"{name} from {low:g} to {high:g}"
    return ""


class _Knobs:
    """The knobs of a space; each value is checked once."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._names = tuple(space.knobs)
        self._possible: list[set[object]] = [set() for _ in self._names]

    def problem(self, record: TrialRecord) -> str:
        """The reason why the configuration can't belong to the space; empty if it can."""
        values = record.configuration.values_of(self._names)
        for name, value, possible in zip(self._names, values, self._possible, strict=True):
            key = (type(value), value)
            if key in possible:
                continue
            problem = f"no value of {name}" if value is None else _refused(self._space, name, value)
            if problem:
                return problem
            possible.add(key)
        return ""


def _refused(space: SearchSpace, name: str, value: KnobValue) -> str:
    """The reason why a knob can't have this value. Values not listed in the space may be valid."""
    if value in space.knobs[name].values and type(value) in map(type, space.knobs[name].values):
        return ""
    try:
        read = space.terms[name].read(value)
    except InputError as error:
        return error.message
    if isinstance(value, bool) != isinstance(read, bool) or read != value:
        return f"{name} cannot be {str(value)[:60]!r}"
    return ""
