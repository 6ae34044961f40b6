"""Tells those who watch a run of searches what happens in it: metrics of Ray's, and trackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner.core.errors import UnavailableError
from tuner.core.records import TrialRecord
from tuner.searches.progress import Progress
from tuner.searches.ray.metrics import SearchMetrics, Watched
from tuner.searches.ray.tracking import TrialTracker, tracker_of
from tuner.searches.request import SearchRequest
from tuner.searches.watch import Tracking, Watch


class Watching:
    """What watches the searches of `requests`, which are the GPU types of one run.

    It looks only from `begin` on, which is called once Ray is initialised. What it is told is
    kept elsewhere already: nothing that goes wrong here ends a search.
    """

    def __init__(self, requests: Sequence[SearchRequest]) -> None:
        self._requests = requests
        self._watch: Watch = requests[0].watch
        self._metrics: SearchMetrics | None = None
        self._trackers: list[tuple[Tracking, TrialTracker]] = []

    def begin(self, known: Iterable[TrialRecord]) -> None:
        """Begin with what earlier searches left. Raises `UnavailableError` for a dead tracker."""
        request = self._requests[0]
        for tracking in self._watch.track:
            try:
                tracker = tracker_of(tracking, request.space.name)
            except Exception as error:  # a server, a database or a folder, each with its own
                raise UnavailableError(
                    f"{tracking.tracker} at {tracking.where!r} cannot be written to: {error}",
                    hint="fix that, or search without --track",
                ) from error
            self._trackers.append((tracking, tracker))
        watched = [Watched(r.space.name, r.gpu.id, r.run_id, r.gpu.memory_bytes) for r in
                   self._requests]  # fmt: skip
        self._metrics = SearchMetrics(watched)
        self._metrics.known(known)

    def record(self, record: TrialRecord) -> None:
        """A trial ended, and its record is in the journal."""
        if self._metrics is not None:
            self._metrics.record(record)
        for tracking, tracker in list(self._trackers):
            try:
                tracker.record(record)
            except Exception as error:  # noqa: BLE001 - the search is worth more than its copy
                self._trackers.remove((tracking, tracker))
                self._watch.tell(
                    f"{tracking.tracker} at {tracking.where!r} gets no more trials, from "
                    f"{record.trial_id} on: {error}"
                )

    def progress(self, every: Sequence[Progress], *, now: bool = False) -> None:
        """Where the searches stand, in the order of the requests."""
        if self._metrics is not None:
            self._metrics.progress(every, now=now)

    def decided(self, gpu: str, seconds: float) -> None:
        """The search of this GPU type took so long to decide on a trial."""
        if self._metrics is not None:
            self._metrics.decided(gpu, seconds)
