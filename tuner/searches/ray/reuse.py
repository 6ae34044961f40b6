"""Which workers Ray Tune uses again: those of the same search, and as long as it needs them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ray import tune

IDLE_S = 10.0
"""A worker that had no trial for so long gives its GPU back to the cluster."""


class RequestedResources(tune.PlacementGroupFactory):  # type: ignore[misc]
    """The resources of one trial, on one node.

    Ray gives the worker of a trial that ended to one that asks for equal resources. Those of two
    searches are never equal, so that a worker stays with its runner.
    """

    def __init__(self, resources: Mapping[str, float], request: int) -> None:
        super().__init__([dict(resources)])
        self.request = request

    def __eq__(self, other: object) -> bool:
        """Equal for the same search only."""
        return (
            isinstance(other, RequestedResources)
            and self.request == other.request
            and bool(super().__eq__(other))
        )

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.request))

    def __reduce__(self) -> Any:
        return (RequestedResources, (self._bundles[0], self.request))


class WorkerCache:
    """The idle workers between two trials; takes the place of Ray Tune's own cache of actors.

    Ray's keeps a worker only while another trial with its resources waits, or nothing waits at
    all: while one search waits for its node, those of all others would be started anew for
    each trial. Has the methods that `TuneController` calls.
    """

    total_max_objects = 0

    def __init__(
        self, keeps: Callable[[int], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keeps = keeps
        self._clock = clock
        self._idle: defaultdict[RequestedResources, list[tuple[float, Any]]] = defaultdict(list)

    @property
    def num_cached_objects(self) -> int:
        """How many workers are idle."""
        return sum(len(idle) for idle in self._idle.values())

    def increase_max(self, key: RequestedResources, by: int = 1) -> None:
        """How many trials wait is asked of the states instead."""

    def decrease_max(self, key: RequestedResources, by: int = 1) -> None:
        """As `increase_max`."""

    def has_cached_object(self, key: RequestedResources) -> bool:
        """Whether a worker with these resources is idle."""
        return bool(self._idle.get(key))

    def cache_object(self, key: RequestedResources, worker: Any) -> bool:
        """Keep a worker that has become idle; False where it is to end."""
        if not self._keeps(key.request):
            return False
        self._idle[key].append((self._clock(), worker))
        return True

    def pop_cached_object(self, key: RequestedResources) -> Any:
        """A worker with these resources; the one that was idle last is the likeliest to live."""
        idle = self._idle.get(key)
        return idle.pop()[1] if idle else None

    def flush_cached_objects(self, force_all: bool = False) -> Iterator[Any]:
        """The workers that are to end."""
        now_s = self._clock()
        for key, idle in self._idle.items():
            keeps = not force_all and self._keeps(key.request)
            while idle and not (keeps and now_s - idle[0][0] < IDLE_S):
                yield idle.pop(0)[1]
