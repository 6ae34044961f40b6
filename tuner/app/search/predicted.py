"""A predicted search: every configuration is predicted, and the best ones are traced in full.

Timelines give the exact speed of all configurations, and their reserved memory within a few percent
(`RESERVED_TOLERANCE`). Replays of the allocator then decide the front and the recommendation; they
go into the journal.
"""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Sequence

from tuner.app.search.plan import SearchPlan
from tuner.app.target import comparable
from tuner.core.records import Configuration, Outcome, Prediction, TrialRecord
from tuner.predict.candidates import Bound, undecided
from tuner.predict.predictor import RESERVED_TOLERANCE, SpacePredictor
from tuner.searches.front import DEFAULT_OBJECTIVES, rate_of
from tuner.searches.interrupts import Interrupts
from tuner.searches.options import SearchOptions
from tuner.searches.progress import Progress, StoppedBy
from tuner.searches.request import SearchOutcome

WIDENING = 1.5
"""The tolerance becomes this factor times the worst error, if traces exceed the tolerance."""

SEARCHER = "predicted"
"""Name in the `searcher` field of predicted records; no sampler proposed them."""

OnRecord = Callable[[TrialRecord], None]
OnProgress = Callable[[Progress], None]
_End = tuple[tuple[float, ...], bool]


def search_predicted(
    plan: SearchPlan,
    predictions: Sequence[Prediction],
    known: Sequence[TrialRecord],
    predictor: SpacePredictor,
    *,
    on_record: OnRecord,
    on_progress: OnProgress,
) -> SearchOutcome:
    """Trace the configurations that decide the front; each record goes to `on_record`.

    `predictions` are those of the supported configurations, in their order. `known` are records of
    earlier searches, which are not traced again. The search's number of trials limits the number
    of traces. After Ctrl-C or the time limit the other configurations stay as estimated.
    """
    candidates = _Candidates(plan, predictions)
    for record in known:
        if plan.is_alike(record):
            candidates.settle(record)
    reused, stops = candidates.traced, _Stops(plan.options)
    # Forks inherit the handlers, so the traces under way finish and none is lost.
    with Interrupts(stops.interrupt).handled():
        while (todo := candidates.undecided()) and not stops.reached(candidates.traced):
            batch = todo[: min(predictor.at_once, plan.options.trials - candidates.traced)]
            run_id = uuid.uuid4().hex[:8]
            traced = predictor.trace([one.configuration for one in batch])
            for number, each in enumerate(traced):
                name = f"{run_id}-{number:03d}"
                record = _record(plan, each.configuration, each.prediction, trial_id=name)
                on_record(record)
                candidates.settle(record)
                on_progress(candidates.progress(reused, stops.spent_s))
    return SearchOutcome(
        records=tuple(candidates.records),
        reused=reused,
        candidates=len(candidates.records),
        traced=candidates.traced - reused,
        stopped_by=stops.by if candidates.undecided() else StoppedBy.EXHAUSTED,
        duration_s=stops.spent_s,
    )


class _Stops:
    """Limits and interruptions that end a search before the front is decided."""

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        self._started_s = time.monotonic()
        self.by = StoppedBy.EXHAUSTED

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._started_s

    def interrupt(self) -> None:
        """End the search when the traces under way are done."""
        self.by = StoppedBy.INTERRUPTED

    def reached(self, traced: int) -> bool:
        """True when the search must end now, after `traced` configurations."""
        limit_s = self._options.time_limit_s
        if self.by is StoppedBy.EXHAUSTED and traced >= self._options.trials:
            self.by = StoppedBy.BUDGET
        elif self.by is StoppedBy.EXHAUSTED and limit_s is not None and self.spent_s > limit_s:
            self.by = StoppedBy.TIME_LIMIT
        return self.by is not StoppedBy.EXHAUSTED


def keep_predictions(plan: SearchPlan, records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Write the predictions of the space beside the journal, and return what is written.

    Comparable predictions of earlier searches under other conditions are kept; they have had this
    search's margin since its journal was opened (`tuner.app.search.result_files`). Raises
    `UnavailableError` when the file cannot be written.
    """
    folder = plan.target.folder
    kept = {record.configuration.key: record for record in records}
    if not plan.options.fresh:
        for record in comparable(folder.read_predicted(), plan.target):
            if record.versions == plan.versions:
                kept.setdefault(record.configuration.key, record)
    folder.write_predicted(kept.values())
    return (*kept.values(),)


class _Candidates:
    """The records of a search's configurations: replayed ones replace estimates.

    Of configurations whose estimates are all equal, only one is replayed.
    """

    def __init__(self, plan: SearchPlan, predictions: Sequence[Prediction]) -> None:
        self._objectives = plan.objectives or DEFAULT_OBJECTIVES
        self._limit = plan.options.trials
        self.records = [
            _record(plan, configuration, prediction, trial_id=f"predicted-{place:05d}")
            for place, (configuration, prediction) in enumerate(
                zip(plan.part.supported, predictions, strict=True)
            )
        ]
        self._place = {r.configuration.key: place for place, r in enumerate(self.records)}
        self._twins: dict[object, list[int]] = {}
        for place, prediction in enumerate(predictions):
            numbers = (repr(prediction.memory), prediction.speed.step_s)
            self._twins.setdefault(numbers, []).append(place)
        self._twins_of = {place: twins for twins in self._twins.values() for place in twins}
        self._settled: set[int] = set()
        self._tolerance = RESERVED_TOLERANCE
        self._undecided: list[TrialRecord] | None = None
        self._ends: dict[float, list[_End]] = {}
        self.traced = 0

    def settle(self, record: TrialRecord) -> None:
        """Use the trace of a configuration for it and for those with equal estimates."""
        place = self._place.get(record.configuration.key)
        if place is None:
            return
        self.traced += 1
        self._undecided = None
        if place not in self._settled:
            off = abs(_reserved_bytes(record) / max(1, _reserved_bytes(self.records[place])) - 1)
            if off > RESERVED_TOLERANCE:
                self._tolerance = max(self._tolerance, WIDENING * off)
        for twin in self._twins_of[place]:
            if twin == place or twin not in self._settled:
                old = self.records[twin]
                self.records[twin] = dataclasses.replace(old, outcome=record.outcome)
                self._settled.add(twin)
        self.records[place] = record
        for of_all in self._ends.values():
            for twin in self._twins_of[place]:
                of_all[twin] = self._end(self.records[twin])

    def undecided(self) -> list[TrialRecord]:
        """Records that are not traced yet and may be on the front, best in the first goal first."""
        if self._undecided is None:
            best_first = undecided(self._bound(-self._tolerance), self._bound(self._tolerance))
            todo = [place for place in best_first if place not in self._settled]
            one_of_twins = {id(self._twins_of[place]): place for place in reversed(todo)}
            self._undecided = [self.records[place] for place in one_of_twins.values()][::-1]
        return self._undecided

    def progress(self, reused: int, elapsed_s: float) -> Progress:
        """The progress; its total counts the configurations that are known to need a trace."""
        traced = [self.records[place] for place in self._settled]
        fitting = [record for record in traced if record.fits]
        return Progress(
            done=self.traced,
            running=0,
            oom=sum(not record.fits for record in traced),
            failed=0,
            reused=reused,
            total=min(self._limit, self.traced + len(self.undecided())),
            best=max(fitting, key=rate_of, default=None),
            elapsed_s=elapsed_s,
            eta_s=None,
        )

    def _bound(self, share: float) -> Bound:
        """Gains and fits of all records, if estimated ones reserve this share more memory."""
        if share not in self._ends:
            self._ends[share] = [
                self._end(record if place in self._settled else _needing(record, share))
                for place, record in enumerate(self.records)
            ]
        gains, fits = zip(*self._ends[share], strict=True)
        return Bound(gains, fits)

    def _end(self, record: TrialRecord) -> _End:
        """The gains of a record, and whether it fits."""
        gains = (objective.gain(record) for objective in self._objectives)
        return tuple(-math.inf if gain is None else gain for gain in gains), record.fits


def _record(
    plan: SearchPlan, configuration: Configuration, prediction: Prediction, *, trial_id: str
) -> TrialRecord:
    return plan.record(
        configuration, Outcome.predicted(prediction), trial_id=trial_id, searcher=SEARCHER
    )


def _reserved_bytes(record: TrialRecord) -> int:
    prediction = record.outcome.prediction
    return 0 if prediction is None else prediction.memory.peak_reserved_bytes


def _needing(record: TrialRecord, share: float) -> TrialRecord:
    """The record with the memory that the allocator reserves raised by `share`."""
    prediction = record.outcome.prediction
    if not share or prediction is None:
        return record
    memory = prediction.memory
    more = round(share * memory.peak_reserved_bytes)
    changed = dataclasses.replace(
        memory,
        device_bytes=memory.device_bytes + more,
        peak_reserved_bytes=memory.peak_reserved_bytes + more,
    )
    moved = dataclasses.replace(prediction, memory=changed)
    return dataclasses.replace(record, outcome=Outcome.predicted(moved))
