"""Shortens a run from within: each data loader serves the batches that decide its memory.

The program itself then reaches its evaluation, its saving and its end. A loader draws the whole
epoch from its real sampler, and reads how long the rows are. It serves the first batches, until
the training has taken enough steps, and then the largest batch, that with the longest row, and the
last one. A program without a data loader is not shortened.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.process import when_imported

FIRST = 2
"""Batches of an evaluation before its largest."""

AHEAD = 64
"""Batches that a trainer may read before the first backward pass: it collects those of a step."""

MOST_BATCHES = 1_000_000
"""Batches that are drawn from a sampler without a length."""

READING_S = 20.0
"""Rows that can only be had one by one are read for this long."""

FULL_ROUNDS = 2
"""Rounds of a loader that serve the batches that decide memory; further ones serve the first."""

MOST_ROUNDS = 20
"""A shortened loader that a program goes through more often than this has no more batches."""

MOST_EMPTY_ROUNDS = 1000
"""A program that asks for batches in more rounds than this is stopped."""

LIMITS = tuple(2**power for power in range(7, 18))
"""Lengths for which the share of longer rows is told."""

Report = Callable[[dict[str, Any]], None]


class Shortening:
    """The shortened loaders of this process. The training ends its first part after `steps` steps.

    `report` sends an event; `stop` ends the program; `after_training` is called when a loader that
    trained has no more batches. `accumulation` is the number of micro-batches of a step, as far as
    it is known, and `evaluates` is true while the model is being evaluated; `evaluated` is then
    called before each batch.
    """

    def __init__(
        self,
        steps: int,
        *,
        report: Report,
        stop: Callable[[], None],
        after_training: Callable[[], None],
        accumulation: Callable[[], int],
        evaluates: Callable[[], bool],
        evaluated: Callable[[], None],
    ) -> None:
        self._steps, self._report, self._stop = steps, report, stop
        self._after_training, self._accumulation = after_training, accumulation
        self._evaluates, self._evaluated = evaluates, evaluated
        self._done = 0
        self._backwards = 0
        self._ended_at = -2
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._exhausted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
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
        loaders, iterators = module.DataLoader, module._BaseDataLoaderIter
        whole: Any = loaders._index_sampler
        begin, following = loaders.__iter__, iterators.__next__
        shortening = self

        @functools.wraps(begin)
        def begin_and_note(loader: Any) -> Any:
            iterator = begin(loader)
            iterator._tuner_began = shortening._backwards
            iterator._tuner_waits_s = shortening._waits_s[loader] = []
            iterator._tuner_loader = weakref.ref(loader)
            shortening._open.add(iterator)
            return iterator

        @functools.wraps(following)
        def follow_to_the_end(iterator: Any) -> Any:
            if shortening._evaluates():
                shortening._evaluated()
            started = time.perf_counter()
            try:
                batch = following(iterator)
                getattr(iterator, "_tuner_waits_s", []).append(time.perf_counter() - started)
                return batch
            except StopIteration:
                shortening._open.discard(iterator)
                shortening._ended_at = shortening._done
                loader = getattr(iterator, "_tuner_loader", lambda: None)()
                if loader is not None:
                    shortening._exhausted.add(loader)
                if shortening._backwards > getattr(iterator, "_tuner_began", 0):
                    shortening._after_training()
                raise

        loaders._index_sampler = property(lambda loader: _Chosen(whole.fget(loader), loader, self))
        loaders.__iter__ = begin_and_note
        iterators.__next__ = follow_to_the_end

    def chosen(self, sampler: Any, loader: Any) -> Iterator[Any]:
        """The batches of indices that are served, from all of one epoch."""
        rounds = self._rounds[loader] = self._rounds.get(loader, 0) + 1
        has_done = self._done >= self._steps
        if rounds > MOST_ROUNDS and has_done:
            if loader not in self._exhausted or rounds > MOST_EMPTY_ROUNDS:
                self._stop()  # it asks for single batches, or until it has done its steps
            return
        began, done = self._backwards, self._done
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        first = FIRST if self._evaluates() else max(AHEAD, self._accumulation())
        first = 1 if has_done and rounds > 1 else first
        if loader._dataset_kind == 1:  # _DatasetKind.Iterable: a stream has no rows to look up
            batches, is_whole = sampler, False
        else:
            batches, is_whole = _drawn(sampler)
        served, is_all = yield from self._first(batches, first + ahead, began)
        if is_all or (has_done and rounds > FULL_ROUNDS):
            return
        trains = self._backwards > began
        if not isinstance(batches, list):
            self._report({"event": "data", "trains": trains, "read": served, "of": None})
            return
        micro_steps, steps = self._backwards - began, self._done - done
        accumulation = max(1, round(micro_steps / steps)) if steps else 1
        numbers = self._deciding(loader, batches, is_whole, accumulation, trains) or ()
        for number in self._at_their_places(numbers, served, accumulation, len(batches)):
            yield batches[number]

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
            if served >= most if not trains else self._done >= self._steps:
                return served, False
            yield batch
            served += 1
        return served, True

    @guarded("the sizes of batches")
    def _deciding(
        self, loader: Any, batches: list[Any], is_whole: bool, accumulation: int, trains: bool
    ) -> list[int]:
        """The numbers of the batches that decide memory, in their order."""
        lists = [batch if isinstance(batch, list) else [batch] for batch in batches]
        sizes = self._sizes.get(loader)
        if sizes is None:
            sizes = self._sizes[loader] = row_sizes(loader.dataset)
        found = {len(lists) - 1}
        told = {"event": "data", "trains": trains, "of": sizes.rows, "read": len(sizes.by_row)}
        if sizes.by_row:
            known = [[sizes.by_row.get(index, 0) for index in rows] for rows in lists]
            numbers = range(len(lists))
            padded = max(numbers, key=lambda n: len(lists[n]) * max(known[n], default=0))
            longest = max(numbers, key=lambda n: max(known[n], default=0))
            in_steps = [len(one) * max(one, default=0) for one in known]
            is_read = len(sizes.by_row) == sizes.rows
            firsts = range(0, self._steps * accumulation * is_read, accumulation)
            fullest = max(numbers, key=lambda n: sum(known[n]))
            found |= {padded, longest, fullest}
            row = max(lists[padded], key=lambda index: sizes.by_row.get(index, 0))
            lengths = list(sizes.by_row.values())
            told |= {
                "row": row,
                "size": sizes.by_row.get(row, 0),
                "unit": sizes.unit,
                "rows": len(lists[padded]),
                "batch": padded + 1,
                "step": padded // accumulation + 1,
                "step_sizes": [sum(in_steps[at : at + accumulation]) for at in firsts],
                "epoch_size": sum(in_steps),
                "longer": {
                    limit: sum(length > limit for length in lengths) / len(lengths)
                    for limit in LIMITS
                },
            }
        told |= {"batches": len(batches), "is_whole": is_whole, "accumulation": accumulation}
        waits_s = self._waits_s.get(loader, [])[1:]  # the first draws the whole epoch
        if waits_s and not loader.num_workers:
            told["read_s"] = statistics.median(waits_s)
        if self._rounds.get(loader) == 1:
            self._report(told)
        return sorted(found)

    # -- trainers -------------------------------------------------------------------------------

    def _end_epochs(self, module: Any) -> None:
        """Evaluate and save at the end of the first epoch where it is asked for at any time."""
        flow = module.DefaultFlowCallback
        end = flow.on_epoch_end

        @functools.wraps(end)
        def end_training(callback: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
            control = end(callback, args, state, control, **more)
            if self._done < self._steps:
                return control
            evaluates = _word(
                getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")
            )
            if evaluates != "no":
                control.should_evaluate = True
            every = {"steps": state.eval_steps, "epoch": state.max_steps // state.num_train_epochs}
            number = state.max_steps // every[evaluates] if every.get(evaluates) else 0
            self._report({"event": "run", "steps": state.max_steps, "evaluations": number})
            if _word(args.save_strategy) != "no":
                control.should_save = True
            control.should_training_stop = True
            return control

        flow.on_epoch_end = end_training

    def _end_lightning_epochs(self, module: Any) -> None:
        """Validate and stop where a shortened loader ends: Lightning counts on its length."""
        loops = module._TrainingEpochLoop
        advance = loops.advance

        @functools.wraps(advance)
        def advance_or_end(loop: Any, fetcher: Any) -> None:
            try:
                advance(loop, fetcher)
            except StopIteration:
                if self._done >= self._steps:
                    trainer = loop.trainer
                    trainer.check_val_every_n_epoch = None
                    trainer.fit_loop.min_epochs = loop.min_steps = None
                    trainer.should_stop = True
                    loop.on_advance_end(fetcher)
                raise

        loops.advance = advance_or_end


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


# -- the sizes of rows ----------------------------------------------------------------------------


class RowSizes:
    """The sizes of rows that are known, of `rows`, in tokens, characters or elements."""

    def __init__(self, by_row: dict[int, int], rows: int, unit: str) -> None:
        self.by_row, self.rows, self.unit = by_row, rows, unit


def row_sizes(dataset: Any, reading_s: float = READING_S) -> RowSizes:
    """The sizes of the rows: of the columns of a table at once, of other rows by reading them.

    What follows from the program's random numbers stays as it would be.
    """
    rows = _length(dataset)
    if rows == 0:
        return RowSizes({}, 0, "elements")
    of_table = _of_table(dataset)
    if of_table is not None:
        sizes, unit = of_table
        return RowSizes(dict(enumerate(sizes)), rows, unit)
    states = _random_states()
    try:
        unit = _unit(dataset[0])
        found, until = {}, time.monotonic() + reading_s
        for number in range(rows):
            found[number] = _size(dataset[number])
            if time.monotonic() > until:
                break
    finally:
        _restore(states)
    return RowSizes(found, rows, unit)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def _of_table(dataset: Any) -> tuple[Sequence[int], str] | None:
    """The sizes of the rows of a `datasets.Dataset`, from its Arrow table; None for others."""
    table, indices = getattr(dataset, "data", None), getattr(dataset, "_indices", None)
    if table is None or not hasattr(table, "column_names") or _is_transformed(dataset):
        return None
    arrow, compute = map(importlib.import_module, ("pyarrow", "pyarrow.compute"))

    kinds = {name: table.schema.field(name).type for name in table.column_names}
    shown = [name for name in kinds if name in (dataset.column_names or ())]
    lists = [name for name in shown if _is_list(arrow, kinds[name])]
    texts = [name for name in shown if arrow.types.is_string(kinds[name])]
    if lists:
        measure, columns, unit = compute.list_value_length, lists, "tokens"
        named = [name for name in lists if name.endswith("input_ids")]
        columns = named or lists
    elif texts:
        measure, columns, unit = compute.utf8_length, texts, "characters"
    else:
        return None
    total: Any = None
    for name in columns:
        lengths = compute.fill_null(measure(table.column(name)), 0)
        total = lengths if total is None else compute.add(total, lengths)
    if indices is not None:
        total = total.take(indices.column(0))
    sizes: list[int] = total.to_pylist()
    return sizes, unit


def _is_list(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_list(kind) or arrow.types.is_large_list(kind))


def _is_transformed(dataset: Any) -> bool:
    """True if rows are made of the table's columns when they are read."""
    return getattr(dataset, "_format_type", None) == "custom"


def _unit(row: Any) -> str:
    return "tokens" if hasattr(row, "keys") and "input_ids" in row else "elements"


def _size(row: Any) -> int:
    """The number of elements of a row; of one with input ids, of these."""
    if hasattr(row, "keys"):
        values = [row["input_ids"]] if "input_ids" in row else [row[name] for name in row]
        return sum(map(_size, values))
    if hasattr(row, "numel"):
        return int(row.numel())
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, list | tuple):
        return len(row) if row and isinstance(row[0], int | float) else sum(map(_size, row))
    size = getattr(row, "size", 1)
    if isinstance(size, tuple):  # an image
        width, height = size[:2]
        return int(width) * int(height)
    return int(size) if isinstance(size, int) else 1


def _random_states() -> tuple[Any, ...]:
    import torch

    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    import torch

    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2]:
        sys.modules["numpy"].random.set_state(states[2])
