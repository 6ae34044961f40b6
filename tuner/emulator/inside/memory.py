"""The contents of this process's device memory at its peak, with the lines that allocated them.

The source is PyTorch's own allocator history: every allocation with its Python stack. Requests that
PyTorch gave up are kept too, and those of them that the program met later with less.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import math
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from tuner.emulator.here import device_core
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import frames_of, package_of, places
from tuner.emulator.inside.owners import (
    GRADIENT,
    LOGITS,
    UNSHARDED,
    Owners,
    Parts,
    Sightings,
    addresses,
)
from tuner.emulator.inside.process import replaces, when_imported

Entry = Mapping[str, Any]
"""An entry of the allocator's history, with its "frames"."""

Row = tuple[str, int, str]
"""The file, the line and the function of a frame."""

Function = tuple[str, str]
"""A file and a function in it."""


class _Refusals:
    """The refused requests of this process, in their order.

    `place_of` names the library's and the program's line of an entry.
    """

    def __init__(self, place_of: Callable[[Any], tuple[str, str]]) -> None:
        self._place_of = place_of
        self.all: list[dict[str, Any]] = []
        self._round: Any = None
        self._stepped_us: dict[frozenset[Function], int] = {}

    def note(self, size: int) -> dict[str, Any]:
        """Note a request that is being refused; returns its number, line and thread."""
        device_core().emu_give_up_attempt()
        names = ("filename", "line", "name")
        # A thread of PyTorch's that runs the backward pass has no caller.
        callers = itertools.islice(frames_of(sys._getframe()), 2, None)
        frames = [dict(zip(names, one, strict=True)) for one in callers]
        entry = {"size": size, "time_us": _now_us(), "frames": frames, "round": self._round}
        self.all.append(entry)
        thread = threading.current_thread()
        return {
            "number": len(self.all) - 1,
            "line": self._place_of(entry)[1] or None,
            "thread": "" if thread is threading.main_thread() else thread.name,
        }

    def follow_batches(self, module: Any) -> None:
        """Note each batch that a loop asks for: it is over with the one before."""

        @replaces(module._BaseDataLoaderIter, "__next__")
        def note_and_follow(following: Any, iterator: Any) -> Any:
            self._round = weakref.ref(iterator)
            for one in self.all:
                if one["round"] is self._round:
                    one.setdefault("over_us", _now_us())
            return following(iterator)

    def note_step(self, time_us: int, frame: FrameType | None) -> None:
        """Note the functions in which a step ended."""
        own = ((file, name) for file, _, name in frames_of(frame) if package_of(file) is None)
        self._stepped_us[frozenset(own)] = time_us

    def recovered(self, histories: Iterable[Iterable[Entry]]) -> list[int]:
        """The numbers of the requests whose line got as much or less later.

        So a search for the batch size goes on. Another line, as of a fallback to something else,
        does not tell that what was refused is not needed, nor does another caller: an evaluation
        and the training share the lines of their model. A call in another line counts if it trains,
        or if the first call had got less before. The next batch of a loop does not: what was
        refused is a batch that was left out.
        """
        made = [e for history in histories for e in history if e["action"] == "alloc"]
        return [n for n, one in enumerate(self.all) if self._is_met(one, made)]

    def _is_met(self, refused: Entry, made: Sequence[Entry]) -> bool:
        place, own = self._place_of(refused), _own(refused)
        functions = _functions(own)
        less = [e for e in made if e["size"] <= refused["size"] and _own(e)[:1] == own[:1]]
        over_us = refused.get("over_us", math.inf)
        has_got_less = any(_own(entry) == own for entry in less)
        for entry in less:
            is_later = refused["time_us"] < entry["time_us"] < over_us
            if not is_later or self._place_of(entry) != place:
                continue
            found = _own(entry)
            if _functions(found) <= functions and (has_got_less or self._trains(refused, found)):
                return True
        return False

    def _trains(self, refused: Entry, later: Sequence[Row]) -> bool:
        """True if steps end later in what was called where the two calls part."""
        pairs = itertools.zip_longest(reversed(_own(refused)), reversed(later))
        after = itertools.dropwhile(lambda pair: pair[0] == pair[1], pairs)
        called = [row for row, _ in after if row is not None][1:2]
        return any(
            time_us > refused["time_us"] and _functions(called) <= functions
            for functions, time_us in self._stepped_us.items()
        )


def _own(entry: Entry) -> list[Row]:
    """(file, line, function) of the program's own frames, innermost first."""
    rows = ((f["filename"], f["line"], f["name"]) for f in entry["frames"])
    return [row for row in rows if package_of(row[0]) is None]


def _functions(rows: Iterable[Row]) -> set[Function]:
    return {(file, name) for file, _, name in rows}


_ROUND = 512
"""PyTorch's allocator rounds sizes up to this (CUDACachingAllocator.cpp, kMinBlockSize)."""

_MOST_ROWS = 40

_OF_A_STEP = ("forward", "backward", "optimizer")

_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Entries of the history that change reserved memory."""

Round = tuple[int, int, int]
"""The beginning of a round of a loader: its time, the allocated bytes, and the steps until then."""

_GROWS_FROM = 3
"""Steps after which growing memory is seen."""

_GROWS_FOR = 64
"""Steps that run while memory grows: a queue or a cache that fills up ends to grow."""

_PARTS = 4
"""Parts of a run that all keep memory if it grows at some of the steps."""

_GROWTH_BYTES = 1 << 16
"""Smaller blocks, such as a loss that is kept, end no run."""

_NOT_KNOWN: dict[str, Any] = {
    "phase_peak_bytes": {},
    "peak_phase": "",
    "run_phases": {},
    "growth": [],
    "evaluation_growth_bytes": 0,
    "evaluation_peak_bytes": 0,
    "loaded_bytes": 0,
    "breakdown": {},
    "allocations": [],
}
"""The result for a device whose allocator keeps no history."""


class MemoryWatch:
    """Records the history of PyTorch's allocator from the first use of CUDA on.

    `steps` are the first training steps, after which a whole run goes on; 0 if all steps are run.
    """

    def __init__(self, steps: int = 0) -> None:
        self._first_steps = steps or sys.maxsize
        self._marks: list[tuple[int, str, int]] = [(0, "load", 0)]
        self.owners = Owners()
        self._sightings = Sightings()
        self._words = 0
        self._backward_line: list[tuple[int, str | None]] = []
        self._highest: Counter[tuple[int, str]] = Counter()
        self._has_history = False
        self._kept: dict[int, list[dict[str, Any]]] = {}
        self._steps_us: list[int] = []
        self._level = self._first_level = self._grown_for = 0
        self.rounds: list[tuple[int, int, int]] = []
        self._trained_us = 0
        """The time at which the first forward pass began."""
        self._evaluated_us: list[int] = []
        self.ran_lines: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        """Files and lines that allocated memory, with the line of what stays and the steps before.

        They are known with the result.
        """
        self.refusals = _Refusals(self._place_of)
        self.recovered: list[int] = []
        """The numbers of refused requests that were met later; known with the result."""

    def install(self, made: Callable[[], None]) -> None:
        """Record from the start of CUDA on, and keep peaks that the program resets.

        `made` is called whenever a model is created or moved.
        """
        self.owners.install(made)
        when_reduced(self._note_gradients, functools.partial(self._note_gradients, kind=UNSHARDED))
        when_imported("torch.utils.data.dataloader", self.refusals.follow_batches)
        torch.cuda._lazy_call(self._record)  # type: ignore[no-untyped-call]

        @replaces(torch._C, "_cuda_resetPeakMemoryStats")
        def keep_and_reset(reset: Any, device: int) -> None:
            self._keep_peaks(device)
            reset(device)

    @guarded("the history of the allocator")
    def _record(self) -> None:
        # CUDA's own allocator (cudaMallocAsync) keeps no history: only its peaks are known.
        self._has_history = torch.cuda.memory.get_allocator_backend() == "native"
        if self._has_history:
            _record_history(context="alloc")

    # -- parts of the history that are left out --------------------------------------------------

    @property
    def can_skip(self) -> bool:
        """True if there is a history from which requests can be left out."""
        options = inspect.signature(torch.cuda.memory._record_memory_history).parameters
        return self._has_history and "skip_actions" in options

    def drain(self) -> list[list[dict[str, Any]]]:
        """Keep the history, and return its entries since the last call, by device."""
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        for device, entries in enumerate(traces):
            self._kept.setdefault(device, []).extend(entries)
        _record_history(context="alloc", clear_history=True)
        return traces

    def pause(self) -> None:
        """Record nothing but segments."""
        skipped = ["alloc", "free_requested", "free_completed"]
        _record_history(context=None, clear_history=True, skip_actions=skipped)

    def resume(
        self,
        device: int,
        gone: Mapping[Any, dict[str, Any]],
        made: Mapping[Any, dict[str, Any]],
        blocks: Mapping[Any, torch.Tensor],
    ) -> None:
        """Record again: the blocks of `gone` have been freed meanwhile, and `made` allocated."""
        self.drain()
        kept, time_us = self._kept[device], _now_us()
        kept += [{**e, "action": "free_requested", "time_us": time_us} for e in gone.values()]
        kept += [
            {**entry, "addr": blocks[key].data_ptr(), "time_us": time_us}
            for key, entry in made.items()
            if key in blocks
        ]

    def mark(self, phase: str, step: int) -> None:
        """Mark the beginning of a phase."""
        self._marks.append((_now_us(), phase, step))
        self.look()

    def correct(self, phase: str) -> None:
        """Name the running phase anew: it turned out to be this one."""
        time_us, _, step = self._marks[-1]
        self._marks[-1] = (time_us, phase, step)

    def note_training(self) -> None:
        """Note that the first forward pass begins: what was loaded before counts."""
        self._trained_us = _now_us()
        device_core().emu_begin_attempt()

    def note_step(self) -> None:
        """Note that an optimizer step ended now."""
        self._steps_us.append(_now_us())
        self.refusals.note_step(self._steps_us[-1], sys._getframe(1))
        done, before = len(self._steps_us), self._level
        if done <= _GROWS_FOR:
            self._level = allocated_bytes()
            is_more = self._level >= before + _GROWTH_BYTES
            if done < _GROWS_FROM or (is_more and self._grown_for == done - 1):
                self._grown_for = done
            if done == 1:
                self._first_level = self._level
        device_core().emu_begin_attempt()

    @property
    def grows(self) -> bool:
        """True while more steps tell whether memory that has grown grows on.

        A few steps later, a queue that is full holds nothing of the first steps.
        """
        done = len(self._steps_us)
        if done < 2 * _GROWS_FROM:
            return done >= _GROWS_FROM and self._level >= self._first_level + _GROWTH_BYTES
        last = self._grown_for + self._grown_for // 8 + _GROWS_FROM
        return self._grown_for >= 2 * _GROWS_FROM and done < min(last, _GROWS_FOR)

    def begin_round(self) -> Round:
        """The time, the allocated bytes and the steps at which a loader is read."""
        return _now_us(), allocated_bytes(), len(self._steps_us)

    @property
    def grows_by_round(self) -> bool:
        """True if each round of the training, as an epoch, leaves more than the one before."""
        levels = [level for _, level, _ in self.rounds[1:]]
        grown = [later - before for before, later in itertools.pairwise(levels)]
        return len(grown) > 1 and min(grown) >= _GROWTH_BYTES

    def note_evaluated(self) -> None:
        """Note that an evaluation asks for its next batch."""
        self._evaluated_us.append(_now_us())

    @guarded("the parameters of the program")
    def look(self) -> None:
        """Note the current addresses of parameters, gradients and optimizer states."""
        if self._has_history:
            before_us = _now_us()
            found = list(self.owners.memory())
            # PyTorch's clock and this one differ by microseconds.
            time_us = (before_us + _now_us()) // 2
            for address, kind in found:
                self._sightings.add(time_us, address, kind)

    @guarded("gradients that are reduced")
    def _note_gradients(self, gradients: Iterable[Any], kind: str = GRADIENT) -> None:
        time_us = _now_us()
        for gradient in gradients:
            for address in addresses(gradient):
                self._sightings.add(time_us, address, kind)

    @guarded("the results of an operator")
    def note_logits(self, out: Any) -> bool:
        """Note the results of an operator that have one value for each word: these are logits.

        Returns True if there are any.
        """
        found = False
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[-1] == self._words:
                time_us = _now_us()
                found = True
                for address in addresses(one):
                    self._sightings.add(time_us, address, LOGITS)
        return found

    def note_vocabulary(self, words: int) -> None:
        """Set the number of words in the model's table, by which logits are recognised."""
        self._words = words

    def note_backward(self, line: str | None) -> None:
        """Note the program's line that starts a backward pass now."""
        self._backward_line.append((_now_us(), line))

    def _history(self, traces: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        return [[*self._kept.get(number, ()), *trace] for number, trace in enumerate(traces)]

    @guarded("the peak of the memory")
    def _keep_peaks(self, device: int) -> None:
        stats = torch.cuda.memory_stats(device)
        for name in ("allocated_bytes", "reserved_bytes"):
            key = (device, name)
            self._highest[key] = max(self._highest[key], stats.get(f"{name}.all.peak", 0))

    @guarded("what the memory holds at its peak")
    def result(self) -> list[dict[str, Any]]:
        """The memory use, one entry per device that this process has used."""
        self.look()
        count = torch.cuda.device_count()
        history: list[list[dict[str, Any]]] = [[]] * count
        if self._has_history:
            history = self._history(torch.cuda.memory._snapshot()["device_traces"])
            self.recovered = self.refusals.recovered(history)
        return [
            self._device(number, history[number])
            for number in range(count)
            if history[number] or torch.cuda.max_memory_allocated(number)
        ]

    def _device(self, device: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
        self._keep_peaks(device)
        stats = torch.cuda.memory_stats(device)
        allocated = self._highest[device, "allocated_bytes"]
        reserved = self._highest[device, "reserved_bytes"]
        if self.recovered and entries:
            peaks = self._run_phases(entries).values()
            allocated, reserved = (max(peak[n] for peak in peaks) for n in (0, 1))
        return {
            "device": device,
            # The session's number of what CUDA_VISIBLE_DEVICES makes `device`.
            "physical": int(device_core().emu_physical(device)),
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
            "trainable_params": self.owners.trainable_params,
            **(self._peak(entries) if entries else _NOT_KNOWN),
        }

    # -- the peak -------------------------------------------------------------------------------

    def _peak(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        blocks = _blocks(entries)
        last_us = max(self._steps_us, default=0)
        for one in blocks:
            held = set()
            if one["died_us"] > last_us and one["size"] >= _GROWTH_BYTES:
                step = bisect.bisect_left(self._steps_us, one["time_us"])
                held = {(self._place_of(one)[1], step)}
            for frame in one["frames"]:
                self.ran_lines[frame["filename"], frame["line"]] |= held
        at, peaks = self._highest_by_phase(entries)
        parts = Parts(
            self._sightings, self._phase_of, self._next, trains_adapters=self.owners.trains_adapters
        )
        parts.learn(blocks)
        breakdown: Counter[str] = Counter()
        rows: dict[tuple[str, str, str], list[int]] = {}
        for one in blocks:
            if not one["born"] <= at < one["died"]:
                continue
            kind = parts.of(one, entries[at]["time_us"])
            breakdown[kind] += one["size"]
            row = rows.setdefault((kind, *self._place_of(one)), [0, 0])
            row[0] += one["size"]
            row[1] += 1
        ordered = sorted(rows.items(), key=lambda item: -item[1][0])
        # The last model was loaded then.
        ends = (b[0] for a, b in itertools.pairwise(self._marks) if a[1] == "load" != b[1])
        loaded_us = max(ends, default=sys.maxsize)
        return {
            "run_phases": self._run_phases(entries),
            "growth": self._growth(blocks),
            **self._evaluation_growth(entries),
            "phase_peak_bytes": peaks,
            "peak_phase": max(peaks, key=lambda name: peaks[name], default=""),
            "loaded_bytes": self._allocated_at(entries, loaded_us),
            "breakdown": dict(breakdown),
            "allocations": [
                {"kind": kind, "where": where, "line": line, "bytes": size, "count": count}
                for (kind, where, line), (size, count) in ordered[:_MOST_ROWS]
            ],
        }

    def _highest_by_phase(self, entries: list[dict[str, Any]]) -> tuple[int, dict[str, int]]:
        """The index of the entry at the highest peak, and the peak of each phase in bytes."""
        allocated = highest = at = 0
        peaks: dict[str, int] = {}
        for number, entry in enumerate(entries):
            allocated += _change(entry)
            if self._was_given_up(entry):
                continue
            phase = self._phase_of(entry["time_us"])
            peaks[phase] = max(peaks.get(phase, 0), allocated)
            if allocated > highest:
                highest, at = allocated, number
        return at, peaks

    def _run_phases(self, entries: list[dict[str, Any]]) -> dict[str, list[int]]:
        """The most allocated and reserved bytes in each phase of the run, in their order."""
        allocated = reserved = number = 0
        peaks: dict[str, list[int]] = {}
        marks = list(self._marks)  # the program goes on while a timer ends it
        ends = [*(mark[0] for mark in marks[1:]), sys.maxsize]
        # A phase begins with what is there, and may allocate nothing.
        for (_, phase, step), end in zip(marks, ends, strict=True):
            most = peaks.setdefault(run_phase(phase, step, self._first_steps), [0, 0])
            if not (number and self._was_given_up(entries[number - 1])):
                most[:] = max(most[0], allocated), max(most[1], reserved)
            while number < len(entries) and entries[number]["time_us"] < end:
                entry, number = entries[number], number + 1
                allocated += _change(entry)
                reserved += _SEGMENTS.get(entry["action"], 0) * entry["size"]
                if not self._was_given_up(entry):
                    most[:] = max(most[0], allocated), max(most[1], reserved)
        return peaks

    def _was_given_up(self, entry: Mapping[str, Any]) -> bool:
        """True for what was held in a step that ended with a recovered refusal.

        That tells how much memory there is, not how much is needed.
        """
        if not self.recovered:
            return False
        time_us = entry["time_us"]
        began_us = [self._trained_us, *self._steps_us]
        refused_us = [one["time_us"] for one in self.refusals.all]
        place = bisect.bisect_left(refused_us, time_us)
        is_after = bisect.bisect_right(began_us, time_us)
        if place < len(refused_us) and bisect.bisect_right(began_us, refused_us[place]) == is_after:
            return True  # no step ended between this and the next refusal
        is_freed = entry["action"] not in ("alloc", "segment_alloc", "segment_map")
        return is_freed and place > 0

    def _growth(self, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lines that leak, with the bytes of each step that they hold after the first steps.

        The first one makes the optimizer's state, and what the last one made may be on its way. A
        queue that is full has let go of the first, and a cache that has all it needs gets nothing
        from the last. What is kept at some steps is seen by parts of a run. With `each_epoch` the
        next epoch began without what was kept.
        """
        ends, next_us = self._steps_us, sys.maxsize
        if len(self.rounds) > 1 and self.rounds[1][2] >= _GROWS_FROM:
            next_us, _, steps = self.rounds[1]
            ends = ends[:steps]
        if len(ends) < _GROWS_FROM:
            return []
        rows: dict[str, Counter[int]] = {}
        levels: dict[str, Counter[int]] = {}
        dies: dict[str, int] = {}
        part = len(ends) // _PARTS
        parts = [ends[part * number - 1] for number in range(1, _PARTS + 1)] if part else []
        for one in blocks:
            step = bisect.bisect_left(ends, one["time_us"])
            is_kept = one["died_us"] > ends[-1]
            there = [n for n, at in enumerate(parts) if one["time_us"] < at < one["died_us"]]
            is_large = 0 < step < len(ends) and one["size"] >= _GROWTH_BYTES
            if not (is_large and (is_kept or there)):
                continue  # most blocks: their lines take time to find
            line = self._place_of(one)[1]
            levels.setdefault(line, Counter()).update(dict.fromkeys(there, one["size"]))
            rows.setdefault(line, Counter())
            if is_kept:
                rows[line][step] += one["size"]
                dies[line] = max(dies.get(line, 0), one["died_us"])
        found = []
        for line, kept in rows.items():
            size = _kept_each_step([kept[step] for step in range(1, len(ends))])
            if not size and part >= _GROWS_FROM:
                size = _growth_of([levels[line][number] for number in range(_PARTS)]) // part
            if size:
                each = next_us < sys.maxsize and dies.get(line, 0) <= next_us
                found.append({"line": line, "bytes_per_step": size, "each_epoch": each})
        return found

    def _evaluation_growth(self, entries: list[dict[str, Any]]) -> dict[str, int]:
        """Bytes that the first evaluation keeps of each batch, and the peak of its third."""
        times = self._evaluated_us[1 : _GROWS_FROM + 1]
        if len(times) < _GROWS_FROM:
            return {}
        levels = [self._allocated_at(entries, time_us) for time_us in times]
        grown = min(later - before for before, later in itertools.pairwise(levels))
        changes = [_change(e) for e in entries if times[-2] <= e["time_us"] < times[-1]]
        peak = max(itertools.accumulate(changes, initial=levels[-2]))
        return {"evaluation_growth_bytes": max(0, grown), "evaluation_peak_bytes": peak}

    def _allocated_at(self, entries: list[dict[str, Any]], time_us: int) -> int:
        return sum(_change(entry) for entry in entries if entry["time_us"] < time_us)

    def _phase_of(self, time_us: int) -> str:
        return self._marks[bisect.bisect_right(self._marks, (time_us, "~", 0)) - 1][1]

    def _next(self, time_us: int) -> int:
        """The end of the phase that runs at `time_us`."""
        number = bisect.bisect_right(self._marks, (time_us, "~", 0))
        return self._marks[number][0] if number < len(self._marks) else sys.maxsize

    def _place_of(self, block: dict[str, Any]) -> tuple[str, str]:
        """The library's line and the program's line of an allocation."""
        own, library = places((f["filename"], f["line"], f["name"]) for f in block["frames"])
        if own is None and self._backward_line and self._phase_of(block["time_us"]) == "backward":
            number = bisect.bisect_right(self._backward_line, (block["time_us"], "~")) - 1
            own = self._backward_line[max(number, 0)][1]
            library = library or "the backward pass"
        return library or "PyTorch", own or ""


def _kept_each_step(sizes: Sequence[int]) -> int:
    """The bytes that each step keeps, of those that are kept of each; 0 if nothing grows."""
    few, kept = 1 + len(sizes) // 16, [step for step, size in enumerate(sizes) if size]
    size = sorted(sizes)[(len(sizes) - 1) // 2]
    is_whole = kept[:1] < [few] and kept[-1:] >= [len(sizes) - few]
    return size if size and len(sizes) < _GROWS_FOR and is_whole else 0


def _growth_of(levels: Sequence[int]) -> int:
    """The bytes by which each part of a run ends higher than the one before; 0 if one does not."""
    grown = [later - before for before, later in itertools.pairwise(levels)]
    return min(grown) if min(grown) > 3 / 4 * max(grown) else 0


def allocated_bytes() -> int:
    """The bytes that tensors hold on all devices of this process."""
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


def _record_history(**options: Any) -> None:
    torch.cuda.memory._record_memory_history(
        enabled="all", stacks="python", max_entries=sys.maxsize, **options
    )


def run_phase(phase: str, step: int, first_steps: int) -> str:
    """The phase, where a step is named "steps" or "largest batch"."""
    if phase not in _OF_A_STEP:
        return phase
    return "steps" if step < (first_steps or sys.maxsize) else "largest batch"


def _blocks(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every block: its allocation entry with "born", "died" (entry indices), "died_us", "size"."""
    live: dict[int, dict[str, Any]] = {}
    found = []
    for number, entry in enumerate(entries):
        if entry["action"] == "alloc":
            block = {**entry, "born": number, "died": sys.maxsize, "died_us": sys.maxsize}
            block["size"] = _rounded(entry["size"])
            live[entry["addr"]] = block
            found.append(block)
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            block = live.pop(entry["addr"])
            block["died"], block["died_us"] = number, entry["time_us"]
    return found


def _change(entry: dict[str, Any]) -> int:
    if entry["action"] == "alloc":
        return _rounded(entry["size"])
    return -_rounded(entry["size"]) if entry["action"] == "free_requested" else 0


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND


def _now_us() -> int:
    return time.time_ns() // 1000


Note = Callable[[Iterable[Any]], Any]


def when_reduced(note: Note, note_kept: Note) -> None:
    """Call `note` with the gradients that FSDP (PyTorch 2.8 to 2.13) is about to reduce.

    `note_kept` gets those that FSDP2 keeps whole, because more micro-batches follow.
    """
    fsdp = "torch.distributed.fsdp"
    when_imported(f"{fsdp}._fully_shard._fsdp_param", functools.partial(_watch_kept, note_kept))
    when_imported(f"{fsdp}._fully_shard._fsdp_collectives", functools.partial(_watch_second, note))
    when_imported(f"{fsdp}._runtime_utils", functools.partial(_watch_first, note))


def _watch_kept(note: Note, module: ModuleType) -> None:
    @replaces(module.FSDPParam, "to_accumulated_grad_if_needed")
    def keep_and_note(keep: Any, parameter: Any) -> None:
        whole = getattr(parameter, "_unsharded_param", None)  # of a module that didn't run: none
        note([getattr(whole, "grad", None)])
        keep(parameter)


def _watch_second(note: Note, module: ModuleType) -> None:
    """Watch FSDP2, which passes the gradients as an argument."""

    @replaces(module, "foreach_reduce")
    def note_and_reduce(
        reduce: Any, parameters: Any, gradients: Any, *args: Any, **kwargs: Any
    ) -> Any:
        note(gradients)
        return reduce(parameters, gradients, *args, **kwargs)


def _watch_first(note: Note, module: ModuleType) -> None:
    """Watch FSDP1, whose flat parameter has its gradient until it is reduced."""

    @replaces(module, "_reduce_grad")
    def note_and_reduce(reduce: Any, state: Any, handle: Any) -> Any:
        note([getattr(handle.flat_param, "grad", None)])
        return reduce(state, handle)
