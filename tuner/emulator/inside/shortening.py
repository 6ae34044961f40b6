"""Shortens a run from within: each data loader serves the batches that decide its memory.

The program itself then reaches its evaluation, its saving and its end. A loader draws the whole
epoch from its real sampler, and reads how long the rows are. It serves the first batches, until
the training has taken enough steps, and then all others, if the `Budget` affords it. If not, it
serves the largest batches, those with the longest rows, and the last one. Loops of the program
without a loader are shortened by rounds.py.

What follows the first steps is bounded by counts of launches: seconds would make the answer depend
on the load of this machine.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from tuner.emulator.inside.core import DeviceCore
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.memory import MemoryWatch
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.process import replaces, when_imported
from tuner.emulator.inside.rounds import loops
from tuner.emulator.inside.row_sizes import (
    ALL,
    RowSizes,
    Sizes,
    collated_sizes,
    row_sizes,
    rows_of,
    table_sizes,
)

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


FIRST = 2
"""Batches of an evaluation before its largest."""

AHEAD = 64
"""Batches that a trainer may read before the first backward pass: it collects those of a step."""

MOST_BATCHES = 1_000_000
"""Batches that are drawn from a sampler without a length."""

FULL_ROUNDS = 2
"""Shortened rounds of a loader that serve the batches that decide memory; others the first."""

MOST_ROUNDS = 50
"""A loader that trains has no more batches after this many shortened rounds."""

MOST_EMPTY_ROUNDS = 1000
"""A program that asks for batches in more rounds than this is stopped."""

LIMITS = tuple(2**power for power in range(7, 18))
"""Lengths for which the share of longer rows is told."""

Report = Callable[[dict[str, Any]], None]


class Shortening:
    """The shortened loaders of this process. The training ends its first part after `steps` steps.

    `report` sends an event; `stop` ends the program; `after_training` is called when a loader that
    trained has no more batches, and `before_training` when it is read again. `accumulation` is the
    number of micro-batches of a step, as far as it is known, and `evaluates` is true while the
    model is being evaluated. The `budget` bounds the rounds that are not shortened. While `memory`
    grows, or a branch `waits` for a step, more of the first steps run; `memory` is told of rounds
    that train, and of evaluated batches.
    """

    def __init__(  # noqa: PLR0913 - what it asks of the follower
        self,
        steps: int,
        budget: Budget,
        *,
        report: Report,
        stop: Callable[[], None],
        before_training: Callable[[], object],
        after_training: Callable[[], None],
        accumulation: Callable[[], int],
        evaluates: Callable[[], bool],
        waits: Callable[[], bool | None],
        memory: MemoryWatch,
    ) -> None:
        self._steps, self._budget = steps, budget
        self._report, self._stop = report, stop
        self._before_training = before_training
        self._after_training, self._accumulation = after_training, accumulation
        self._evaluates, self._waits, self._memory = evaluates, waits, memory
        self._done = 0
        self._backwards = 0
        self._ended_at = -2
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._exhausted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._costs: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._goes_on = False
        self._turn = 0
        self._turns: dict[int, int] = {}
        """The rounds that are being read, in their order, with the backward passes before each."""
        self.is_granted = False
        """True while a loader serves all batches that it has, which the budget afforded."""
        self.has_cut = False
        """True if any loader served fewer batches than it has."""
        self.epochs = 0
        """Rounds of loaders that trained."""
        self._sizes: weakref.WeakKeyDictionary[Any, RowSizes] = weakref.WeakKeyDictionary()
        self._waits_s: weakref.WeakKeyDictionary[Any, list[float]] = weakref.WeakKeyDictionary()

    @property
    def is_over(self) -> bool:
        """True if no loader is being read."""
        return not self._open

    @property
    def drives(self) -> bool:
        """True while a loader is being read, whose end brings the program on, or has just ended."""
        # Trainers read ahead: the step of the last batches comes after the loader's end.
        return bool(self._open) or self._done <= self._ended_at + 1

    def note_backward(self) -> None:
        """Note that a backward pass begins."""
        self._backwards += 1

    def note_step(self) -> None:
        """Note that an optimizer step ended."""
        self._done += 1

    def install(self) -> None:
        """Shorten the loaders that are read from now on, and epochs of trainers."""
        when_imported("torch.utils.data.dataloader", self._shorten_loaders)
        when_imported("transformers.trainer_callback", self._end_epochs)
        for name in ("lightning.pytorch", "pytorch_lightning"):
            when_imported(f"{name}.loops.training_epoch_loop", self._end_lightning_epochs)

    # -- loaders --------------------------------------------------------------------------------

    def _shorten_loaders(self, module: Any) -> None:
        loaders, shortening = module.DataLoader, self
        whole: Any = loaders._index_sampler
        loaders._index_sampler = property(lambda loader: _Chosen(whole.fget(loader), loader, self))

        @replaces(loaders, "__iter__")
        def begin_and_note(begin: Any, loader: Any) -> Any:
            if loader in shortening._trained:
                shortening._before_training()
            iterator = begin(loader)
            iterator._tuner_began = shortening._backwards
            iterator._tuner_waits_s = shortening._waits_s[loader] = []
            iterator._tuner_loader = weakref.ref(loader)
            shortening._open.add(iterator)
            left = weakref.finalize(iterator, shortening._is_left, shortening._backwards)
            left.atexit = False
            iterator._tuner_left = left
            return iterator

        @replaces(module._BaseDataLoaderIter, "__next__")
        def follow_to_the_end(following: Any, iterator: Any) -> Any:
            if shortening._evaluates():
                shortening._memory.note_evaluated()
            started = time.perf_counter()
            try:
                batch = following(iterator)
                getattr(iterator, "_tuner_waits_s", []).append(time.perf_counter() - started)
                return batch
            except StopIteration:
                shortening._open.discard(iterator)
                shortening._ended_at = shortening._done
                left = getattr(iterator, "_tuner_left", None)
                if left is not None:
                    left.detach()
                loader = getattr(iterator, "_tuner_loader", lambda: None)()
                if loader is not None:
                    shortening._exhausted.add(loader)
                if shortening._backwards > getattr(iterator, "_tuner_began", 0):
                    shortening._after_training()
                raise

    def _is_left(self, began: int) -> None:
        """Note that a loop over a loader was left before its end."""
        if self._backwards > began:
            self._after_training()

    def chosen(self, sampler: Any, loader: Any) -> Iterator[Any]:
        """The batches of indices that are served, from all of one epoch."""
        is_over = self._rounds.get(loader, 0) > MOST_ROUNDS and self._done >= self._steps
        # A loop that is followed ends by itself, and its rounds are not empty.
        if is_over and loader in self._trained and not loops().enclose(sys._getframe()):
            rounds = self._rounds[loader] = self._rounds[loader] + 1
            if rounds > MOST_EMPTY_ROUNDS:
                self._stop()  # it asks until it has done its steps
            if loader in self._exhausted:
                return
        self._turn += 1
        turn = self._turn
        self._turns[turn] = self._backwards
        try:
            yield from self._round(sampler, loader, turn)
        finally:
            self._turns.pop(turn, None)

    def _round(self, sampler: Any, loader: Any, turn: int) -> Iterator[Any]:
        has_done = self._done >= self._steps
        is_known = loader in self._costs
        began, done, launches = self._backwards, self._done, self._budget.launches
        round_began = self._memory.begin_round()
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        first = FIRST if self._evaluates() else max(AHEAD, self._accumulation())
        first = 1 if has_done and is_known else first
        if loader._dataset_kind == 1:  # _DatasetKind.Iterable: a stream has no rows to look up
            batches, is_whole = sampler, False
        else:
            batches, is_whole = _drawn(sampler)
        served, is_all = yield from self._first(batches, first + ahead, began)
        # A trainer asks for a batch before it has run the one before.
        ran = max(1, served - ahead - 1)
        cost = max(self._costs.get(loader, 0.0), (self._budget.launches - launches) / ran)
        self._costs[loader] = cost
        trains = self._backwards > began
        micro_steps, steps = self._backwards - began, self._done - done
        accumulation = max(1, round(micro_steps / steps)) if steps else 1
        if not isinstance(batches, list):
            yield from self._worthwhile(batches, cost)
            self.has_cut = True
            self._report({"event": "data", "trains": trains, "read": served, "of": None})
            return
        left = len(batches) - served
        goes_on = is_all or self._budget.affords(left, cost)
        if trains:
            self._trained.add(loader)
            self.epochs += 1
            self._memory.rounds.append(round_began)
            self._goes_on = goes_on and self._budget.affords(left + len(batches), cost)
        if goes_on:
            if not is_known:
                self._note_data(loader, batches, is_whole, accumulation, trains)
            yield from self._granted(batches[served:])
            return
        self.has_cut = True
        rounds = self._rounds[loader] = self._rounds.get(loader, 0) + 1
        if has_done and rounds > FULL_ROUNDS:
            return
        served += yield from self._until_branches(batches[served:] if trains else [])
        numbers = self._deciding(loader, batches, is_whole, accumulation, trains) or ()
        due = list(self._at_their_places(numbers, served, accumulation, len(batches)))
        while due:
            number = due.pop(0)
            if not due:
                self._turns.pop(turn, None)
            yield batches[number]
        # A loader beside it, that was read after it, has not come to its largest batches.
        for batch in batches[served : served + AHEAD]:
            if not any(later > turn and self._backwards > at for later, at in self._turns.items()):
                break
            yield batch

    def _granted(self, batches: list[Any]) -> Iterator[Any]:
        self.is_granted = True
        try:
            yield from batches
        finally:
            self.is_granted = False

    def _worthwhile(self, batches: Any, cost: float) -> Iterator[Any]:
        """More batches of a stream, if the budget affords many of them."""
        if self._budget.affords(WORTHWHILE, cost):
            for batch in batches:
                yield batch
                if not self._budget.affords(1, cost):
                    return

    def _until_branches(self, batches: list[Any]) -> Generator[Any, None, int]:
        """The batches while a branch waits for a step; their number."""
        served = 0
        for batch in batches:
            if not self._waits():
                break
            yield batch
            served += 1
        return served

    def _at_their_places(
        self, numbers: Sequence[int], served: int, accumulation: int, of: int
    ) -> Iterator[int]:
        """Batches with those before them: a step begins where one does in the whole epoch.

        Results of the batch before are there when the next one runs, and gradients unless it is the
        first of its step.
        """
        last = served - 1
        for number in numbers:
            if number < served:
                continue
            before = int(number - 1 > last)
            is_first = number % accumulation == 0
            while accumulation > 1 and ((served + before) % accumulation == 0) is not is_first:
                before += 1
            yield from range(max(0, number - before), number + 1)
            served += min(before, number) + 1
            last = number
        # A trainer also steps after the last batch; a loop leaves the gradients as they are.
        left_over = 0 if self._accumulation() > 1 else of % accumulation
        yield from [last] * ((left_over - served) % accumulation)

    def _first(self, batches: Any, most: int, began: int) -> Generator[Any, None, tuple[int, bool]]:
        """The first `most` batches, or those of the first steps; their number, and if it is all."""
        served = 0
        for batch in batches:
            trains = self._backwards > began
            is_enough = self._done >= self._steps and not self._memory.grows
            if served >= most if not trains else is_enough:
                return served, False
            yield batch
            served += 1
        return served, True

    @guarded("the sizes of batches")
    def _deciding(
        self, loader: Any, batches: list[Any], is_whole: bool, accumulation: int, trains: bool
    ) -> list[int]:
        """The numbers of the batches that decide memory, in their order."""
        sizes = self._sizes.get(loader)
        if sizes is None:
            sizes = self._sizes[loader] = row_sizes(loader.dataset)
        lists = _lists(batches)
        found = {len(lists) - 1}
        for field in sizes.fields:
            found |= set(_largest(lists, field))
        for field in sizes.numbers:
            found.add(_largest(lists, field)[1])
        made: dict[str, dict[int, int]] = {}
        # PyTorch's own function makes no more of a row than it is.
        made_by = getattr(loader.collate_fn, "__module__", "")
        if not sizes.tells and sizes.rows and not made_by.startswith("torch.utils.data"):
            longest = [max((sizes.by_row.get(row, 0) for row in rows), default=0) for rows in lists]
            made = collated_sizes(loader, lists, longest)
            found |= {max(one, key=one.__getitem__) for one in made.values()}
        if self._rounds.get(loader, 1) == 1:
            told = self._told(sizes, lists, accumulation)
            if made.get(ALL) and len(set(made[ALL].values())) > 1:
                largest = max(made[ALL], key=made[ALL].__getitem__)
                told |= {"row": None, "size": made[ALL][largest], "unit": "elements"}
                told |= {"batch": largest + 1, "step": largest // accumulation + 1}
                told |= {"read": sum(len(lists[number]) for number in made[ALL])}
                told |= {"rows": len(lists[largest]), "step_sizes": [], "longer": {}}
            self._send(told, loader, trains, len(batches), is_whole, accumulation)
        return sorted(found)

    @guarded("the rows of a loader")
    def _note_data(
        self, loader: Any, batches: list[Any], is_whole: bool, accumulation: int, trains: bool
    ) -> None:
        """Report the data of a round that is not shortened: rows that it reads are read once."""
        sizes = table_sizes(loader.dataset)
        told: dict[str, Any] = dict.fromkeys(("of", "read"), rows_of(loader.dataset))
        if sizes is not None:
            self._sizes[loader] = sizes
            told = self._told(sizes, _lists(batches), accumulation)
        self._send(told, loader, trains, len(batches), is_whole, accumulation)

    def _told(self, sizes: RowSizes, lists: list[list[int]], accumulation: int) -> dict[str, Any]:
        """The rows, and the largest batch by what they hold together."""
        told: dict[str, Any] = {"of": sizes.rows, "read": len(sizes.by_row)}
        if not sizes.by_row:
            return told
        known = [[sizes.by_row.get(index, 0) for index in rows] for rows in lists]
        padded = _largest(lists, sizes.by_row)[0]
        in_steps = [len(one) * max(one, default=0) for one in known]
        is_read = len(sizes.by_row) == sizes.rows
        firsts = range(0, self._steps * accumulation * is_read, accumulation)
        row = max(lists[padded], key=lambda index: sizes.by_row.get(index, 0))
        lengths = list(sizes.by_row.values())
        return told | {
            "row": row,
            "size": sizes.by_row.get(row, 0),
            "unit": sizes.unit,
            "rows": len(lists[padded]),
            "batch": padded + 1,
            "step": padded // accumulation + 1,
            "step_sizes": [sum(in_steps[at : at + accumulation]) for at in firsts],
            "epoch_size": sum(in_steps),
            "longer": {
                limit: sum(length > limit for length in lengths) / len(lengths) for limit in LIMITS
            },
        }

    def _send(
        self,
        told: dict[str, Any],
        loader: Any,
        trains: bool,
        batches: int,
        is_whole: bool,
        accumulation: int,
    ) -> None:
        told |= {"event": "data", "trains": trains, "batches": batches, "is_whole": is_whole}
        told["accumulation"] = accumulation
        waits_s = self._waits_s.get(loader, [])[1:]  # the first draws the whole epoch
        if waits_s and not loader.num_workers:
            told["read_s"] = statistics.median(waits_s)
        self._report(told)

    # -- trainers -------------------------------------------------------------------------------

    def _end_epochs(self, module: Any) -> None:
        """Evaluate and save at the end of the first epoch where it is asked for at any time."""

        @replaces(module.DefaultFlowCallback, "on_epoch_end")
        def end_training(
            end: Any, flow: Any, args: Any, state: Any, control: Any, **more: Any
        ) -> Any:
            control = end(flow, args, state, control, **more)
            if self._done < self._steps:
                return control
            evaluates = _word(
                getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")
            )
            every = {"steps": state.eval_steps, "epoch": state.max_steps // state.num_train_epochs}
            number = state.max_steps // every[evaluates] if every.get(evaluates) else 0
            self._report({"event": "run", "steps": state.max_steps, "evaluations": number})
            if self._goes_on:
                return control
            self.has_cut = True
            if evaluates != "no":
                control.should_evaluate = True
            if _word(args.save_strategy) != "no":
                control.should_save = True
            control.should_training_stop = True
            return control

    def _end_lightning_epochs(self, module: Any) -> None:
        """Validate and stop where a shortened loader ends: Lightning counts on its length."""

        @replaces(module._TrainingEpochLoop, "advance")
        def advance_or_end(advance: Any, loop: Any, fetcher: Any) -> None:
            try:
                advance(loop, fetcher)
            except StopIteration:
                if self._done >= self._steps:
                    self.has_cut = True
                    trainer = loop.trainer
                    trainer.check_val_every_n_epoch = None
                    trainer.fit_loop.min_epochs = loop.min_steps = None
                    trainer.should_stop = True
                    loop.on_advance_end(fetcher)
                raise


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


class _Chosen:
    """A sampler of batches whose iterators serve a few; all else is the sampler's own."""

    def __init__(self, sampler: Any, loader: Any, shortening: Shortening) -> None:
        self._sampler, self._loader, self._shortening = sampler, loader, shortening

    def __iter__(self) -> Iterator[Any]:
        return self._shortening.chosen(self._sampler, self._loader)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _drawn(sampler: Any) -> tuple[list[Any], bool]:
    """The batches of one epoch, and whether these are all of them."""
    try:
        most = len(sampler) + 1
    except TypeError:
        most = MOST_BATCHES
    batches = list(itertools.islice(iter(sampler), most))
    return batches, len(batches) < most


def _lists(batches: list[Any]) -> list[list[int]]:
    return [batch if isinstance(batch, list) else [batch] for batch in batches]


def _largest(lists: list[list[int]], sizes: Sizes) -> tuple[int, int, int]:
    """The batch that is largest when padded, that with the longest row, and the fullest."""
    known = [[sizes.get(index, 0) for index in rows] for rows in lists]
    numbers = range(len(lists))
    return (
        max(numbers, key=lambda n: len(known[n]) * max(known[n], default=0)),
        max(numbers, key=lambda n: max(known[n], default=0)),
        max(numbers, key=lambda n: sum(known[n])),
    )
