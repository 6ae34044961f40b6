"""The data behind all outputs, computed once from the journal's records."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Source, Status, TrialRecord
from tuner.searches.best import BestTrial, best_of, find_baseline
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import (
    DEFAULT_OBJECTIVES,
    Objective,
    fits_within,
    trusted,
    unbeaten,
    undecided,
)
from tuner.searches.journal import latest
from tuner.searches.objectives import objectives_of


class Kind(enum.StrEnum):
    """The kind of a trial, which determines its mark in tables and pictures.

    `OUTSIDE` fits, but does not meet the minimums or `--where`; `UNTRIED` fits by weaker evidence
    than the front's: predicted where others were measured or emulated, or emulated where others
    were measured; `TOO_LARGE` ran out of memory or leaves less than its margin free; `FAILED` ended
    in any other way.
    """

    BEST = "best"
    FRONT = "front"
    FITS = "fits"
    OUTSIDE = "outside"
    UNTRIED = "untried"
    TOO_LARGE = "too_large"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class View:
    """One search's results on one GPU.

    `records` holds one record per configuration, `kinds` the kind of each, by position. `front` is
    sorted from the worst to the best in the first objective: by default from the least memory to
    the most.
    """

    space: SpaceFacts
    gpu: Gpu
    records: tuple[TrialRecord, ...]
    kinds: tuple[Kind, ...]
    front: tuple[TrialRecord, ...]
    best: BestTrial | None
    conditions: tuple[str, ...]
    command: str
    use: tuple[str, ...]
    """Commands that bring the recommendation, if there is one, into a file or to another tool."""
    knobs: tuple[str, ...]
    """The names of configuration values to show: the space's knobs, then others that vary."""
    notes: tuple[str, ...] = ()
    """Sentences about the search that people should read."""
    objectives: tuple[Objective, ...] = DEFAULT_OBJECTIVES
    """The objectives of the front; the first one decides the recommendation."""

    @property
    def numbers(self) -> tuple[tuple[int, float] | None, ...]:
        """Device memory in bytes and samples/s of each record, by position; None without them."""
        found = (record.outcome.evidence for record in self.records)
        return tuple((e.memory.device_bytes, e.speed.samples_per_s) if e else None for e in found)

    @property
    def source(self) -> str:
        """Source of the front's numbers: predicted, emulated or measured."""
        return source_label(self.front or self.records)

    @property
    def drawn_source(self) -> str:
        """Sources of all trials' numbers, such as "predicted and measured"."""
        return source_label(self.records)

    @property
    def fixed(self) -> Mapping[str, KnobValue]:
        """The configuration values beside `knobs`: the same in every trial."""
        every = self.records[0].configuration if self.records else {}
        return {name: value for name, value in every.items() if name not in self.knobs}

    @property
    def is_default(self) -> bool:
        """True if the front is over throughput and device memory."""
        return [o.name for o in self.objectives] == [o.name for o in DEFAULT_OBJECTIVES]

    @property
    def undecided(self) -> tuple[TrialRecord, ...]:
        """The records of the front that may be no faster than the next smaller one."""
        return undecided(self.front) if self.is_default else ()

    @property
    def margin_bytes(self) -> int:
        """The memory to keep free, in bytes: the best's margin, else the largest of any trial."""
        if self.best is not None:
            return self.best.record.budget.margin_bytes
        return max((record.budget.margin_bytes for record in self.records), default=0)


def build_view(  # noqa: PLR0913 - one argument for each choice of the reader
    records: Sequence[TrialRecord],
    space: SpaceFacts,
    gpu: Gpu,
    *,
    where: Callable[[Configuration], bool] | None = None,
    conditions: Sequence[str] = (),
    command: str = "",
    use: Sequence[str] = (),
    notes: Sequence[str] = (),
    objectives: Sequence[str] = (),
) -> View:
    """The results of the records of this space and GPU; others are left out.

    `where` narrows the front and the best; `conditions` are its texts. Records for another amount
    of memory than `gpu.memory_bytes` are left out too, because they were made under another limit.
    `objectives` are names; if empty, those of the space are used.
    """
    own = [
        r
        for r in latest(records)
        if (r.space, r.gpu, r.gpu_memory_bytes) == (space.name, gpu.id, gpu.memory_bytes)
    ]
    meets = [where is None or where(r.configuration) for r in own]
    allowed = trusted((r for r, ok in zip(own, meets, strict=True) if ok), gpu.memory_bytes)
    chosen = objectives_of(objectives or space.objectives, space, gpu) or DEFAULT_OBJECTIVES
    fits = {r.configuration.key for r in own if fits_within(r, gpu.memory_bytes)}
    fitting = [r for r in allowed if r.configuration.key in fits]
    front = unbeaten(fitting, chosen)
    shown = max((r.source.rank for r in front), default=0)
    best = best_of(
        fitting,
        space,
        gpu,
        trials=len(allowed),
        baseline=find_baseline(own, space.baseline),
        conditions=conditions,
        objective=chosen[0],
        gone=[r for r, ok in zip(own, meets, strict=True) if ok],
    )
    drawn = {r.configuration.key: Kind.FRONT for r in front}
    # The front may hold another configuration that equals the best one in every objective.
    drawn |= {best.configuration.key: Kind.BEST} if best else {}
    kinds = tuple(
        Kind.UNTRIED if kind in (Kind.FITS, Kind.OUTSIDE) and r.source.rank < shown else kind
        for r, ok in zip(own, meets, strict=True)
        for kind in (_kind(r, r.configuration.key in fits, ok, drawn),)
    )
    return View(
        space=space,
        gpu=gpu,
        records=tuple(own),
        kinds=kinds,
        front=tuple(reversed(front)),
        best=best,
        conditions=tuple(conditions),
        command=command,
        use=tuple(use) if best is not None else (),
        knobs=_shown_names(own, space),
        notes=tuple(notes),
        objectives=chosen,
    )


def source_label(records: Sequence[TrialRecord]) -> str:
    """The sources of the numbers in `records`, in words."""
    sources = {e.source for r in records if (e := r.outcome.evidence) is not None}
    return " and ".join(source for source in Source if source in sources) or "no numbers"


def _shown_names(records: Sequence[TrialRecord], space: SpaceFacts) -> tuple[str, ...]:
    names = sorted({name for record in records for name in record.configuration})
    values: dict[str, set[KnobValue | None]] = {name: set() for name in names}
    for record in records:
        for name, value in zip(names, record.configuration.values_of(names), strict=True):
            values[name].add(value)
    first = [name for name in space.knobs if name in names]
    rest = [name for name in names if name not in first and len(values[name]) > 1]
    return (*first, *rest)


def _kind(record: TrialRecord, fits: bool, meets: bool, drawn: Mapping[str, Kind]) -> Kind:
    if not fits:
        # A successful trial that leaves less than the margin free does not fit either.
        full = record.outcome.status in (Status.OOM, Status.OK)
        return Kind.TOO_LARGE if full else Kind.FAILED
    if not meets:
        return Kind.OUTSIDE
    return drawn.get(record.configuration.key, Kind.FITS)


SHOWN_LEVELS = 200
"""Maximum number of levels to show; a table of a hundred thousand takes a minute to draw."""


@dataclass(frozen=True, slots=True)
class Level:
    """The trials of one level of `view`."""

    view: View
    values: Mapping[str, KnobValue]
    records: Sequence[TrialRecord]

    def front(self) -> tuple[TrialRecord, ...]:
        """The Pareto front of the level, worst in the first objective first; empty if none fits."""
        chosen = trusted(self.records, self.view.gpu.memory_bytes)
        fitting = [r for r in chosen if fits_within(r, self.view.gpu.memory_bytes)]
        return tuple(reversed(unbeaten(fitting, self.view.objectives)))


def levels(view: View) -> tuple[Level, ...]:
    """The levels that were tried, in the order of their values.

    Minimums and conditions do not apply, because each level stands for itself. Empty for a space
    without a capacity knob that varies.
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
    """Sort key: numbers by size, then words."""
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))  # type: ignore[arg-type]
