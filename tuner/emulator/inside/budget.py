"""Bounds the part of a run that follows its first steps, by counts of launches.

Seconds would make the answer depend on the load of this machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from tuner.emulator.inside.core import DeviceCore
from tuner.emulator.inside.one_rank import STANDS_FOR

RUN_ON = 50_000
"""Launches with which a program may go on as it is; what takes more is shortened."""

LEAST_LAUNCHES = 20
"""A batch counts as this many launches at least: it also has to be read."""

WORTHWHILE = 100
"""A loop of unknown length goes on if this many of its steps fit into the budget."""

REST = 1_000_000
"""Launches after the first steps at which the rest of a run, such as a long generation, ends."""

REST_TIMES = 20
"""A rest may take this many times the launches of loading and of the first steps, if more."""


class Budget:
    """The launches of this process, and those that are left to run on with."""

    @functools.cached_property
    def launch_count(self) -> Callable[[], int]:
        """A function that returns the number of kernels that this process has launched."""
        count: Callable[[], int] = DeviceCore().launch_count
        return count

    @property
    def launches(self) -> int:
        """The kernels that this process has launched."""
        return self.launch_count()

    def affords(self, number: int, launches: float) -> bool:
        """True if `number` more batches of `launches` each fit into what is left."""
        # Ranks that run beside each other have to serve the same number of batches.
        is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "ranks" not in STANDS_FOR
        left = 0 if is_one_of_many else RUN_ON - self.launches
        return number * max(launches, LEAST_LAUNCHES) <= left

    def rest(self) -> int:
        """The number of launches at which the rest of a run ends, if its first steps end now."""
        return self.launches + max(REST, REST_TIMES * self.launches)
