"""What `guided` is compared with: Optuna's samplers, and what trainers offer by themselves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.replay import Asked
from benchmarks.search.samplers import CLASSES
from benchmarks.search.scenarios import BATCH, Trial
from benchmarks.search.tables import DEVICE, SAMPLES_PER_S, Table
from tuner.core.records import (
    Configuration,
    Measurement,
    Memory,
    MemoryBudget,
    Outcome,
    Speed,
    Status,
    TrialRecord,
)
from tuner.core.setup.schemas import memory_order
from tuner.predict.candidates import shortlist
from tuner.searches.candidates import Candidates
from tuner.searches.guided.goals import staircase
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge


class Measured:
    """Remembers what was measured to fit; recommends the fastest of it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.fitting: dict[int, float] = {}

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Note the trial."""
        usable = self.table.limit_bytes - self.table.margin_bytes
        if trial.device_bytes is not None and trial.device_bytes <= usable:
            assert trial.samples_per_s is not None
            self.fitting[asked.index] = trial.samples_per_s

    def recommend(self) -> int | None:
        """The fastest that was measured to fit with the margin."""
        return max(self.fitting, key=self.fitting.__getitem__, default=None)


class Proposed(Measured):
    """A strategy of a `Proposer`: each configuration at most once, OOM a constraint.

    That is more than plain Optuna has, which proposes invalid and repeated configurations.
    """

    def __init__(self, table: Table, adapter: Proposer) -> None:
        super().__init__(table)
        self.adapter = adapter
        self._index = {c.key: i for i, c in enumerate(table.configurations)}

    def ask(self) -> Asked | None:
        """The sampler's next configuration."""
        configuration = self.adapter.propose()
        return None if configuration is None else Asked(self._index[configuration.key])

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Tell the study."""
        super().tell(asked, trial)
        self.adapter.tell(record_of(self.table, asked.index, trial))


class Layers(Measured):
    """The predicted front, then the front of the rest, and so on: the order without learning.

    Of what is predicted to fit, each front from its fastest to its smallest.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._order = iter(self._by_layer())

    def ask(self) -> Asked | None:
        """The next one."""
        index = next(self._order, None)
        return None if index is None else Asked(index)

    def _by_layer(self) -> list[int]:
        left = _predicted_to_fit(self.table)
        order: list[int] = []
        while left.size:
            layer = predicted_front(self.table, left)
            order += layer.tolist()
            left = np.setdiff1d(left, layer)
        return order


def _predicted_to_fit(table: Table) -> NDArray[np.intp]:
    return np.flatnonzero(table.arrays[DEVICE] <= table.limit_bytes - table.margin_bytes)


def predicted_front(table: Table, places: NDArray[np.intp] | None = None) -> NDArray[np.intp]:
    """The predicted Pareto front of these places, fastest first; of all that fit by default."""
    places = _predicted_to_fit(table) if places is None else places
    speed, size = table.arrays[SAMPLES_PER_S][places], table.arrays[DEVICE][places]
    return places[staircase(speed, size)[::-1]]


class Random(Measured):
    """Configurations in random order, the baseline first."""

    def __init__(self, table: Table, *, seed: int) -> None:
        super().__init__(table)
        order = list(range(len(table.configurations)))
        random.Random(seed).shuffle(order)  # noqa: S311 - a search, not a secret
        first = [i for i in order if table.configurations[i] == table.baseline]
        self._order = iter(dict.fromkeys([*first, *order]))

    def ask(self) -> Asked | None:
        """The next one."""
        index = next(self._order, None)
        return None if index is None else Asked(index)


class Halving(Random):
    """Successive halving as ASHA does it: a step for each, more for the best third so far.

    Jamieson and Talwalkar 2016, Li et al. 2020; reduction factor 3, two rungs. Ranked by
    throughput among those that fit. A promotion counts as a trial too.
    """

    def __init__(self, table: Table, *, seed: int) -> None:
        super().__init__(table, seed=seed)
        self._short: dict[int, float] = {}
        self._promoted: set[int] = set()

    def ask(self) -> Asked | None:
        """A promotion when one is due, else another short trial."""
        ranked = sorted(self._short, key=self._short.__getitem__, reverse=True)
        due = [i for i in ranked[: len(ranked) // 3] if i not in self._promoted]
        if due:
            self._promoted.add(due[0])
            return Asked(due[0])
        asked = super().ask()
        return None if asked is None else Asked(asked.index, steps=2)

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Note the trial in its rung."""
        super().tell(asked, trial)
        if asked.steps is not None and asked.index in self.fitting:
            self._short[asked.index] = self.fitting[asked.index]


class BatchFinder(Measured):
    """Finds the largest micro-batch that fits, for one setting of the other knobs after another.

    The baseline's setting comes first, then random ones. `halving` starts from the largest
    and halves when out of memory, as accelerate's `find_executable_batch_size` does; else it
    starts from the smallest and doubles until out of memory, as Lightning's batch size finder
    does.
    """

    def __init__(self, table: Table, *, seed: int, halving: bool) -> None:
        super().__init__(table)
        self._last: Trial | None = None
        self._plan = self._indices(seed, halving)

    def ask(self) -> Asked | None:
        """The next micro-batch."""
        index = next(self._plan, None)
        return None if index is None else Asked(index)

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Note the trial."""
        super().tell(asked, trial)
        self._last = trial

    def _indices(self, seed: int, halving: bool) -> Iterator[int]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, configuration in enumerate(self.table.configurations):
            groups.setdefault(self._others(configuration), []).append(index)
        order = list(groups)
        random.Random(seed).shuffle(order)  # noqa: S311 - a search, not a secret
        if self.table.baseline is not None and self._others(self.table.baseline) in groups:
            order = [self._others(self.table.baseline), *order]
        for key in dict.fromkeys(order):
            members = sorted(groups[key], key=self._batch, reverse=halving)
            for index in members:
                yield index
                assert self._last is not None
                if self._last.oom != halving:
                    break

    def _others(self, configuration: Configuration) -> tuple[object, ...]:
        return tuple(configuration[k] for k in self.table.knobs if k != BATCH)

    def _batch(self, index: int) -> int:
        return int(str(self.table.configurations[index].get(BATCH, 0)))


def optuna_searcher(
    name: str, table: Table, *, seed: int, trials: int, front: bool = False
) -> Proposed:
    """One of Optuna's samplers, by its name in the tables.

    It begins with the baseline, or with the predicted front.
    """
    candidates = Candidates(table.configurations, table.knobs)
    sampler = CLASSES.get(name, name)
    first = [table.baseline] if table.baseline is not None else []
    if front:
        first = [table.configurations[place] for place in predicted_front(table)]
    adapter = Proposer(candidates, sampler=sampler, seed=seed, trials=trials, initial=first)
    return Proposed(table, adapter)


def blind_searcher(table: Table, *, seed: int, trials: int) -> Proposed:
    """`guided` without predictions, as it searches a program, after the baseline.

    It knows the limit, and which knobs only add memory.
    """
    candidates = Candidates(table.configurations, table.knobs)
    first = [table.baseline] if table.baseline is not None else []
    budget = MemoryBudget(int(table.limit_bytes), int(table.margin_bytes))
    adapter = Proposer(
        candidates, sampler="guided", seed=seed, trials=trials, initial=first,
        knowledge=Knowledge(order=memory_order("causal_lm"), budget=budget),
    )  # fmt: skip
    return Proposed(table, adapter)


SHORTLIST_SHARE = 0.75
"""Part of the budget that `tuner search --searcher tpe` gives to the predicted short list."""


def shortlisted_searcher(name: str, table: Table, *, seed: int, trials: int) -> Proposed:
    """One of Optuna's samplers, after the baseline and the short list of the predicted space.

    It knows the predictions but does not learn how far they are off.
    """
    arrays = table.arrays
    budget = MemoryBudget(table.limit_bytes, table.margin_bytes)
    predictions = [
        SimpleNamespace(
            speed=SimpleNamespace(samples_per_s=speed),
            memory=SimpleNamespace(device_bytes=size),
            budget=budget,
            fits=budget.fits(size),
        )
        for speed, size in zip(arrays[SAMPLES_PER_S], arrays[DEVICE], strict=True)
    ]
    baseline = [table.baseline] if table.baseline is not None else []
    number = round(trials * SHORTLIST_SHARE)
    chosen = shortlist(table.configurations, predictions, number)  # type: ignore[arg-type]
    candidates = Candidates(table.configurations, table.knobs)
    adapter = Proposer(
        candidates, sampler=name, seed=seed, trials=trials, initial=[*baseline, *chosen]
    )
    return Proposed(table, adapter)


_NUMBERS = itertools.count()


def record_of(table: Table, index: int, trial: Trial) -> TrialRecord:
    """The trial as the journal would hold it."""
    return TrialRecord(
        trial_id=f"replay-{next(_NUMBERS)}",
        space=table.name,
        gpu=table.name,
        gpu_memory_bytes=int(table.limit_bytes),
        configuration=table.configurations[index],
        outcome=_outcome(trial),
        seed=0,
        started_at="2026-01-01T00:00:00+00:00",
        versions={},
        searcher="replay",
        margin_bytes=int(table.margin_bytes),
    )


def _outcome(trial: Trial) -> Outcome:
    if trial.failed:
        return Outcome(Status.CRASHED, message="RuntimeError: replayed", duration_s=trial.seconds)
    if trial.device_bytes is None or trial.samples_per_s is None:
        return Outcome(Status.OOM, duration_s=trial.seconds)
    size = int(trial.device_bytes)
    measurement = Measurement(
        memory=Memory(
            peak_allocated_bytes=size,
            peak_reserved_bytes=size,
            device_bytes=size,
            loaded_bytes=0,
            phase_peak_bytes={},
            peak_phase="backward",
            breakdown={},
        ),
        speed=Speed(
            step_s=1 / trial.samples_per_s,
            it_per_s=trial.samples_per_s,
            samples_per_s=trial.samples_per_s,
            tokens_per_s=trial.samples_per_s,
            mfu=None,
        ),
        trainable_params=0,
        total_params=0,
        device="replay",
        steps=3,
        loss_finite=bool(np.isfinite(trial.samples_per_s)),
    )
    return Outcome(Status.OK, measurement=measurement, duration_s=trial.seconds)
