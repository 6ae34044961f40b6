"""Shows a cluster that grows on demand which nodes are waited for."""

from __future__ import annotations

import time

import ray
from ray.util.placement_group import PlacementGroup

LOOK_S = 1.0


class PlaceholderDemand:
    """Keeps placement groups waiting for what no node offers yet; the autoscaler sees them.

    They end with the connection to Ray. Ray Tune's own trials are not used for that: with one of
    them waiting, Ray keeps no worker for its next trial.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[PlacementGroup]] = {}
        self._looked_s: dict[int, float] = {}

    def show(self, key: int, resources: dict[str, float], count: int) -> None:
        """So many nodes' worth of these resources are waited for now, 0 and more.

        A group that was placed gives its room to trials at once.
        """
        groups = self._groups.setdefault(key, [])
        if count == len(groups) == 0:
            return
        now_s = time.monotonic()
        if now_s - self._looked_s.get(key, 0.0) < LOOK_S and count == len(groups):
            return
        self._looked_s[key] = now_s
        waiting = [group for group in groups if not _is_placed(group)]
        for group in groups:
            if group not in waiting[:count]:
                ray.util.remove_placement_group(group)
        added = [ray.util.placement_group([resources]) for _ in range(count - len(waiting))]
        self._groups[key] = waiting[:count] + added


def _is_placed(group: PlacementGroup) -> bool:
    return bool(ray.util.placement_group_table(group).get("state") == "CREATED")
