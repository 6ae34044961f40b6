"""Runs one search in one world, and what came of it after each trial."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.search.scenarios import Scenario, Trial
from benchmarks.search.tables import Floats
from tuner.searches.guided.goals import staircase


@dataclass(frozen=True, slots=True)
class Asked:
    """An entry of the table to run, in full or for a few steps only."""

    index: int
    steps: int | None = None


class Searcher(Protocol):
    """One way to search a table."""

    def ask(self) -> Asked | None:
        """What to run next; None when nothing is left to try."""
        ...

    def tell(self, asked: Asked, trial: Trial) -> None:
        """What came of it."""
        ...

    def recommend(self) -> int | None:
        """The entry to use, of those that were run."""
        ...


@dataclass
class Replay:
    """One search: a value after each trial in every list."""

    oom: list[bool] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """GPU seconds so far."""
    wasted_s: float = 0.0
    """GPU seconds of the trials that ran out of memory."""
    hypervolume: list[float] = field(default_factory=list)
    """Share of the true hypervolume that the trials cover, with their true values."""
    regret: list[float] = field(default_factory=list)
    """What the recommended configuration lacks of the best feasible throughput, as a share; 1
    while there is none, or when it does not fit after all."""
    fewest_to_99: int = 0
    """Trials that who knows the truth needs for 99 % of the hypervolume."""
    decision_s: list[float] = field(default_factory=list)
    """Seconds that the searcher took for each proposal, learning from it, and recommending."""

    def trials_to(self, share: float) -> float:
        """Trials until `share` of the hypervolume was covered; infinite when it never was."""
        reached = np.flatnonzero(np.array(self.hypervolume) >= share)
        return float(reached[0] + 1) if reached.size else np.inf

    def seconds_to(self, share: float) -> float:
        """GPU seconds until then."""
        trials = self.trials_to(share)
        return self.seconds[int(trials) - 1] if np.isfinite(trials) else np.inf


def replay(world: Scenario, searcher: Searcher, *, trials: int, seed: int) -> Replay:
    """Let `searcher` run up to `trials` trials in `world`."""
    rng = np.random.default_rng([seed, 1])
    limit = world.table.limit_bytes
    everything = np.flatnonzero(world.feasible)
    whole = hypervolume(world.samples_per_s[everything], world.device_bytes[everything], limit)
    best = world.samples_per_s[everything].max()
    least = fewest(world.samples_per_s[everything], world.device_bytes[everything], limit, 0.99)
    result, fitting, spent = Replay(fewest_to_99=least), [], 0.0
    for _ in range(trials):
        started = time.perf_counter()
        asked = searcher.ask()
        asked_s = time.perf_counter() - started
        if asked is None:
            break
        trial = world.run(asked.index, rng, asked.steps)
        started = time.perf_counter()
        searcher.tell(asked, trial)
        chosen = searcher.recommend()
        result.decision_s.append(asked_s + time.perf_counter() - started)
        spent += trial.seconds
        result.wasted_s += trial.seconds if trial.oom else 0.0
        if world.feasible[asked.index]:
            fitting.append(asked.index)
        covered = hypervolume(world.samples_per_s[fitting], world.device_bytes[fitting], limit)
        works = chosen is not None and world.device_bytes[chosen] <= limit
        result.failed.append(trial.failed)
        result.oom.append(trial.oom)
        result.seconds.append(spent)
        result.hypervolume.append(covered / whole)
        result.regret.append(max(0.0, 1 - world.samples_per_s[chosen] / best) if works else 1.0)
    return result


def hypervolume(speed: Floats, size: Floats, limit: float) -> float:
    """The area under the front of speed (up) and size (down), to the reference (0, limit)."""
    area, covered = 0.0, 0.0
    for place in np.lexsort((size, -speed)):
        free = limit - size[place]
        if free > covered:
            area += speed[place] * (free - covered)
            covered = free
    return float(area)


def fewest(speed: Floats, size: Floats, limit: float, share: float) -> int:
    """How few points cover `share` of the hypervolume of all.

    By dynamic programming over the front from its large end: the most that a number of points,
    of which a given one is the smallest, cover (Auger, Bader, Brockhoff and Zitzler 2009).
    """
    kept = staircase(speed, size)
    speed, size = speed[kept], size[kept]
    covered = speed * (limit - size)
    whole = hypervolume(speed, size, limit)
    number = 1
    while covered.max() < share * whole:
        more = covered.copy()
        for i in range(len(speed) - 1):
            more[i] = max(more[i], np.max(speed[i] * (size[i + 1 :] - size[i]) + covered[i + 1 :]))
        covered, number = more, number + 1
    return number
