"""Objectives of a front, by name; some need the space's data or a price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tuner.core.errors import UnavailableError, unknown
from tuner.core.gpu import Gpu
from tuner.core.records import Memory, Speed, Status, TrialRecord
from tuner.searches.cost import run_cost
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import DEVICE_MEMORY, THROUGHPUT, Direction, Objective

UP, DOWN = Direction.MAXIMIZE, Direction.MINIMIZE
NAMES = (
    "samples_per_s", "device_bytes", "tokens_per_s", "step_s", "peak_allocated_bytes",
    "peak_reserved_bytes", "epoch_usd", "lora_rank", "length_coverage",
)  # fmt: skip

SHORT = {
    "throughput": "samples_per_s",
    "memory": "device_bytes",
    "cost": "epoch_usd",
}
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
    known = {
        "samples_per_s": THROUGHPUT,
        "device_bytes": DEVICE_MEMORY,
        "tokens_per_s": _of_speed("tokens_per_s", UP, "tokens/s", lambda s: s.tokens_per_s),
        "step_s": _of_speed("step_s", DOWN, "time of an optimizer step (s)", lambda s: s.step_s),
        "peak_allocated_bytes": _of_memory(
            "peak_allocated_bytes", "peak allocated (bytes)", lambda m: m.peak_allocated_bytes
        ),
        "peak_reserved_bytes": _of_memory(
            "peak_reserved_bytes", "peak reserved (bytes)", lambda m: m.peak_reserved_bytes
        ),
        "epoch_usd": Objective(
            "epoch_usd", DOWN, "cost per epoch (USD)", lambda r: _epoch_usd(r, space, gpu)
        ),
        "lora_rank": Objective("lora_rank", UP, "LoRA rank", _lora_rank),
        "length_coverage": Objective(
            "length_coverage", UP, "examples not truncated (share)", lambda r: _coverage(r, space)
        ),
    }
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


def _of_speed(
    name: str, direction: Direction, label: str, value: Callable[[Speed], float]
) -> Objective:
    def of(record: TrialRecord) -> float | None:
        evidence = record.outcome.evidence
        return value(evidence.speed) if evidence else None

    return Objective(name, direction, label, of)


def _of_memory(name: str, label: str, value: Callable[[Memory], int]) -> Objective:
    def of(record: TrialRecord) -> float | None:
        evidence = record.outcome.evidence
        return value(evidence.memory) if evidence else None

    return Objective(name, DOWN, label, of)


def _epoch_usd(record: TrialRecord, space: SpaceFacts, gpu: Gpu) -> float | None:
    cost = run_cost(record, space, gpu)
    return cost.epoch_usd if cost else None


def _lora_rank(record: TrialRecord) -> float | None:
    return _number(record, "lora_rank")


def _coverage(record: TrialRecord, space: SpaceFacts) -> float | None:
    length = _number(record, "max_length")
    return None if length is None else coverage(space, length)


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
