"""One front for each level of the capacity knobs: more rank and length cost memory and time.

Less of them is always faster and smaller, so that a front over all levels says more of the model
that one gives up than of how it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.core.records import KnobValue, TrialRecord
from tuner.searches.front import fits_within, trusted, unbeaten
from tuner.searches.view import View

SHOWN_LEVELS = 200
"""More than a person reads; a table of a hundred thousand takes a minute to draw."""


@dataclass(frozen=True, slots=True)
class Level:
    """The trials of one level of `view`."""

    view: View
    values: Mapping[str, KnobValue]
    records: Sequence[TrialRecord]

    @property
    def trials(self) -> int:
        """How many were tried."""
        return len(self.records)

    def front(self) -> tuple[TrialRecord, ...]:
        """Those that no other one beats, least memory first; empty where none of them fits."""
        chosen = trusted(self.records, self.view.gpu.memory_bytes)
        fitting = [r for r in chosen if fits_within(r, self.view.gpu.memory_bytes)]
        return tuple(reversed(unbeaten(fitting, self.view.objectives)))


def levels(view: View) -> tuple[Level, ...]:
    """The levels that were tried, in the order of their values.

    Floors and conditions do not apply: each level stands for itself. Empty for a space without
    a capacity knob that varies.
    """
    names = [name for name in view.space.capacity if name in view.knobs]
    grouped: dict[tuple[KnobValue | None, ...], list[TrialRecord]] = {}
    for record in view.records:
        grouped.setdefault(record.configuration.values_of(names), []).append(record)
    if len(grouped) < 2:
        return ()
    return tuple(
        Level(
            view,
            values={n: v for n, v in zip(names, values, strict=True) if v is not None},
            records=grouped[values],
        )
        for values in sorted(grouped, key=lambda values: [_order(value) for value in values])
    )


def _order(value: KnobValue | None) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))  # type: ignore[arg-type]
