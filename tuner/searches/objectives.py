"""Objectives of a front, by name; some need the space's data or a price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tuner.core.errors import UnavailableError, unknown
from tuner.core.gpu import Gpu
from tuner.core.records import Measurement, Prediction, Status, TrialRecord
from tuner.searches.cost import run_cost
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import DEVICE_MEMORY, THROUGHPUT, Direction, Objective

UP, DOWN = Direction.MAXIMIZE, Direction.MINIMIZE
NAMES = (
    "samples_per_s", "device_bytes", "tokens_per_s", "step_s", "peak_allocated_bytes",
    "peak_reserved_bytes", "epoch_usd", "lora_rank", "length_coverage",
)  # fmt: skip

SHORT = {"throughput": "samples_per_s", "memory": "device_bytes", "cost": "epoch_usd"}
"""Short names of the most common objectives."""

NEEDS = {
    "epoch_usd": "it needs --price and the number of examples in the space's data",
    "length_coverage": "it needs the quantiles or a histogram of token_lengths in the space's data",
    "lora_rank": "the configurations have none",
}
"""Requirements of the objectives that not every trial has a value of, for people."""


def objectives_of(names: Sequence[str], space: SpaceFacts, gpu: Gpu) -> tuple[Objective, ...]:
    """The objectives with these names, each once. Raises `InputError` for an unknown name.

    The short names of `SHORT` are allowed.

    - "epoch_usd" is unknown without a price and the number of examples.
    - "length_coverage" is the share of examples that `max_length` does not truncate; without the
      distribution of lengths it is only known if no example is truncated.
    """

    def usd(record: TrialRecord) -> float | None:
        cost = run_cost(record, space, gpu)
        return cost.epoch_usd if cost else None

    def covered(record: TrialRecord) -> float | None:
        length = _number(record, "max_length")
        return None if length is None else coverage(space, length)

    every = (
        THROUGHPUT,
        DEVICE_MEMORY,
        _of("tokens_per_s", UP, "tokens/s", lambda e: e.speed.tokens_per_s),
        _of("step_s", DOWN, "time of an optimizer step (s)", lambda e: e.speed.step_s),
        _of(
            "peak_allocated_bytes",
            DOWN,
            "peak allocated (bytes)",
            lambda e: e.memory.peak_allocated_bytes,
        ),
        _of(
            "peak_reserved_bytes",
            DOWN,
            "peak reserved (bytes)",
            lambda e: e.memory.peak_reserved_bytes,
        ),
        Objective("epoch_usd", DOWN, "cost per epoch (USD)", usd),
        Objective("lora_rank", UP, "LoRA rank", lambda record: _number(record, "lora_rank")),
        Objective("length_coverage", UP, "examples not truncated (share)", covered),
    )
    known = {objective.name: objective for objective in every}
    full = dict.fromkeys(SHORT.get(name, name) for name in names)
    for name in full:
        if name not in known:
            raise unknown("objective", name, (*SHORT, *NAMES))
    return tuple(known[name] for name in full)


def require_known(records: Iterable[TrialRecord], objectives: Iterable[Objective]) -> None:
    """Raise `UnavailableError` for an objective that no successful trial has a value of."""
    ended = [record for record in records if record.outcome.status is Status.OK]
    for objective in objectives:
        if ended and all(objective.value(record) is None for record in ended):
            raise UnavailableError(
                f"no trial has a value for objective {objective.name!r}: {objective.label}",
                hint=NEEDS.get(objective.name),
            )


def _of(
    name: str, direction: Direction, label: str, value: Callable[[Prediction | Measurement], float]
) -> Objective:
    def of(record: TrialRecord) -> float | None:
        evidence = record.outcome.evidence
        return value(evidence) if evidence else None

    return Objective(name, direction, label, of)


def coverage(space: SpaceFacts, max_length: float) -> float | None:
    """The share of examples with at most `max_length` tokens; None if unknown."""
    lengths = space.lengths
    if lengths is None:
        return None
    if max_length >= lengths.max:
        return 1.0
    return lengths.share_up_to(max_length) if lengths.known else None


def _number(record: TrialRecord, name: str) -> float | None:
    value = record.configuration.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
