"""Everything the outputs are drawn from, computed once from the journal's records."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.records import Configuration, KnobValue, Source, Status, TrialRecord
from tuner.results.best import BestTrial, recommend
from tuner.results.facts import GpuLike, SpaceFacts
from tuner.results.front import (
    DEFAULT_OBJECTIVES,
    Objective,
    fits_within,
    pareto_front,
    trusted,
)
from tuner.results.journal import latest
from tuner.results.objectives import objectives_of
from tuner.results.undecided import undecided


class Kind(enum.StrEnum):
    """How a trial is drawn.

    `OUTSIDE` fits, and does not meet the floors or `--where`; `UNTRIED` fits by its prediction,
    where others were measured or emulated, or as emulated where others were measured; `TOO_LARGE`
    ran out of memory or leaves less than its margin free; `FAILED` ended any other way.
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

    `records` holds one record per configuration, `kinds` says of each, by position, how it
    is drawn; `front` is sorted from the worst in the first objective to the best: by default
    from the least memory to the most. `objectives` are names; empty, those of the space count.
    """

    space: SpaceFacts
    gpu: GpuLike
    records: tuple[TrialRecord, ...]
    kinds: tuple[Kind, ...]
    front: tuple[TrialRecord, ...]
    best: BestTrial | None
    conditions: tuple[str, ...]
    command: str
    source: str
    """Where the numbers of the front are from: predicted, emulated or measured."""
    drawn_source: str
    """Where the numbers of all trials are from; also "predicted and measured"."""
    knobs: tuple[str, ...]
    """The names of configuration values to show: the space's knobs, then what else varies."""
    fixed: Mapping[str, KnobValue]
    """The other configuration values: the same in every trial."""
    notes: tuple[str, ...] = ()
    """Sentences about the search that people should read."""
    objectives: tuple[Objective, ...] = DEFAULT_OBJECTIVES
    """What the front is over; the first one decides what is recommended."""

    @property
    def is_default(self) -> bool:
        """Whether the front is over throughput and device memory."""
        return [o.name for o in self.objectives] == [o.name for o in DEFAULT_OBJECTIVES]

    @property
    def undecided(self) -> tuple[TrialRecord, ...]:
        """Those of the front that may be no faster than the next smaller one."""
        return undecided(self.front) if self.is_default else ()

    @property
    def margin_bytes(self) -> int:
        """The memory to keep free: of the best, else the largest that any trial asked for."""
        if self.best is not None:
            return self.best.record.budget.margin_bytes
        return max((record.budget.margin_bytes for record in self.records), default=0)


def build_view(  # noqa: PLR0913 - one argument for each choice of the reader
    records: Sequence[TrialRecord],
    space: SpaceFacts,
    gpu: GpuLike,
    *,
    where: Callable[[Configuration], bool] | None = None,
    conditions: Sequence[str] = (),
    command: str = "",
    notes: Sequence[str] = (),
    objectives: Sequence[str] = (),
) -> View:
    """The results of the records of this space and GPU; others are left out.

    `where` narrows the front and the best; `conditions` are its texts. Records made for
    another amount of memory than `gpu.memory_bytes` are left out too, since their trials
    were searched under another limit.
    """
    own = [
        r
        for r in latest(records)
        if (r.space, r.gpu, r.gpu_memory_bytes) == (space.name, gpu.id, gpu.memory_bytes)
    ]
    meets = [where is None or where(r.configuration) for r in own]
    meeting = (r for r, ok in zip(own, meets, strict=True) if ok)
    chosen = objectives_of(objectives or space.objectives, space, gpu) or DEFAULT_OBJECTIVES
    front = pareto_front(trusted(meeting, gpu.memory_bytes), objectives=chosen)
    shown = max((r.source.rank for r in front), default=0)
    best = recommend(own, space, gpu, where=where, conditions=conditions, objective=chosen[0])
    on_front = {r.configuration.key for r in front}
    best_key = best.configuration.key if best else ""
    kinds = tuple(
        Kind.UNTRIED if kind in (Kind.FITS, Kind.OUTSIDE) and r.source.rank < shown else kind
        for r, ok in zip(own, meets, strict=True)
        for kind in (_kind(r, ok, gpu.memory_bytes, on_front=on_front, best_key=best_key),)
    )
    knobs = _shown_names(own, space)
    return View(
        space=space,
        gpu=gpu,
        records=tuple(own),
        kinds=kinds,
        front=tuple(reversed(front)),
        best=best,
        conditions=tuple(conditions),
        command=command,
        source=source_label(front or own),
        drawn_source=source_label(own),
        knobs=knobs,
        fixed={k: v for k, v in own[0].configuration.items() if k not in knobs} if own else {},
        notes=tuple(notes),
        objectives=chosen,
    )


def source_label(records: Sequence[TrialRecord]) -> str:
    """Which kinds of numbers `records` hold, in words."""
    sources = {e.source for r in records if (e := r.outcome.evidence) is not None}
    return " and ".join(source for source in Source if source in sources) or "no numbers"


def _shown_names(records: Sequence[TrialRecord], space: SpaceFacts) -> tuple[str, ...]:
    values: dict[str, set[KnobValue | None]] = {}
    names = {name for record in records for name in record.configuration}
    for record in records:
        for name in names:
            values.setdefault(name, set()).add(record.configuration.get(name))
    first = [name for name in space.knobs if name in names]
    rest = [name for name in sorted(names) if name not in first and len(values[name]) > 1]
    return (*first, *rest)


def _kind(
    record: TrialRecord, meets: bool, limit_bytes: int, *, on_front: set[str], best_key: str
) -> Kind:
    if not fits_within(record, limit_bytes):
        # A trial that ran, and leaves less than the margin free, does not fit either.
        full = record.outcome.status in (Status.OOM, Status.OK)
        return Kind.TOO_LARGE if full else Kind.FAILED
    if not meets:
        return Kind.OUTSIDE
    key = record.configuration.key
    if key in on_front:
        return Kind.BEST if key == best_key else Kind.FRONT
    return Kind.FITS
