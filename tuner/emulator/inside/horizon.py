"""Finds code of the training that a run did not reach: branches on a counter that never were true.

A program whose loops and loaders are shortened ran some of its steps. Its own files are parsed. A
branch in its training loop whose test depends on a counter, such as `step == 500` or `epoch > 25`,
is evaluated with the values that the counter had. If it was not taken within these, may be later,
and may allocate on the device, it is told. So are sizes that grow (ramps.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from tuner.emulator.inside.branches import (
    FUTURE,
    ON_DEVICE,
    Place,
    Source,
    Test,
    counter_target,
    is_of_torch,
    is_on_device,
    iterated,
    value_of,
)
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import frames_of, joined, package_of, parsed, shown
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.ramps import Ramps
from tuner.emulator.inside.rounds import MOST_VISITS, last_name, loops

MOST_SHOWN = 20
"""Lines that are told."""

_FROM_ONE = frozenset({"global_step", "global_steps", "completed_steps"})


class Horizon:
    """The branches of this program's training that a run has taken, and has not."""

    def __init__(self) -> None:
        self._sources: dict[str, Source | None] = {}
        self._ramps: dict[str, Ramps] = {}
        self._boundaries: set[Place] = set()
        self._on_stack: set[ast.AST] = set()
        self.steps_left: int | None = None
        """Steps that the loops around the last one have left; None if that is not known."""
        self.trainings: set[Place] = set()
        """The lines in which optimizers were made, with their callers'."""
        self.is_whole = False
        """True if the first rank ran to its end, unlike the others."""
        self._of_steps: int | None = None
        self._first: tuple[int, int] | None = None
        """The rounds before the first step whose loops have a length, and the steps then."""
        self._done = 0
        self._cut: list[Place] = []
        """The loops that left out rounds."""
        self._left: list[Place] = []
        """Lines that are told: loops that left out trainings, and later uses of a loop's lists."""

    # -- while it runs --------------------------------------------------------------------------

    @guarded("the place of an optimizer")
    def note_training(self, frame: FrameType | None) -> None:
        """Note the lines in which an optimizer is made: a training begins there."""
        self.trainings |= {joined(name, line) for name, line, _ in frames_of(frame)}

    @guarded("the training loop")
    def note_step(self, frame: FrameType | None) -> None:
        """Note the end of a step, and the values of the counters there."""
        self._done += 1
        totals: list[tuple[int | None, int]] = []
        is_in_loop = False
        for one, source, function, line in reversed(list(self._own(frame))):  # the outermost first
            self._boundaries.add((source.name, line))
            self._on_stack.add(function)
            loops = source.loops_at(function, line)
            if not loops and not is_in_loop:
                continue
            names = _names(one)
            for test in source.tests_in(function):
                if is_in_loop or source.is_within(test.node, loops[0]):
                    before = {*test.taken}
                    _note(test, names, source, line, is_cut=bool(self._cut))
                    self._have_again(test, test.taken - before, source)
            ramps = self._ramps.setdefault(source.name, Ramps(source))
            for ramp in ramps.of(function):
                if is_in_loop or source.is_within(ramp.node, loops[0]):
                    ramps.see(ramp, names, line, is_cut=bool(self._cut))
            totals += [_progress(loop, names) for loop in loops]
            is_in_loop = True
            del names
        if not self._cut:
            self._note_total(totals[::-1])

    def _have_again(self, test: Test, outcomes: set[bool], source: Source) -> None:
        """Have a branch that adds to lists come twice: what both times left there grows."""
        for outcome in outcomes:
            if source.adds(test, outcome):
                test.kept.setdefault(outcome, []).append(self._done)
                if len(test.kept[outcome]) == 1:
                    test.taken.discard(outcome)

    def _note_total(self, totals: Sequence[tuple[int | None, int]]) -> None:
        """`totals` are the iterations of the loops and those that ran, the innermost first."""
        whole, ran = 1, 0
        for total, index in totals:
            if total is None:
                whole = 0
                break
            ran += whole * index
            whole *= total
        if not totals or not whole:
            self.steps_left = None
            return
        if self._first is None:
            self._first, self._each = (ran, self._done), ran + 1  # batches of a step
        before, first = self._first
        if self._done == first + 1:
            self._each = max(1, ran - before)
        self._of_steps = max(first + (whole - before - 1) // self._each, self._done)
        self.steps_left = self._of_steps - self._done

    def _own(self, frame: FrameType | None) -> Iterator[tuple[FrameType, Source, ast.AST, int]]:
        """The program's own functions that run, each with its line, the innermost first."""
        while frame is not None:
            code = frame.f_code
            if package_of(code.co_filename) is None:
                name, line = joined(code.co_filename, frame.f_lineno)
                source = self._source(name)
                first = joined(code.co_filename, code.co_firstlineno)[1]
                function = source.function_of(code.co_name, first) if source is not None else None
                if source is not None and function is not None:
                    yield frame, source, function, line
            frame = frame.f_back

    def _source(self, name: str) -> Source | None:
        if name not in self._sources:
            tree = parsed(name)
            self._sources[name] = None if tree is None else Source(name, tree)
        return self._sources[name]

    @property
    def _all(self) -> list[Source]:
        return [source for source in self._sources.values() if source is not None]

    @guarded("the branches that come")
    def waits(self, steps: int) -> bool:
        """True if the program's own counter comes to a branch that may allocate, in these steps."""
        for source in self._all:
            for test in source.tests:
                if not test.code or len(test.values) != 1 or test.function not in self._on_stack:
                    continue
                ((name, value),) = test.values.items()
                sign = -1 if source.falls(test.atoms[name]) else 1
                coming = (test.is_new(int(value) + sign * one) for one in range(1, steps + 1))
                is_near = source.is_counted(test.atoms[name]) and any(coming)
                if is_near and any(source.left_by(test, self._boundaries)):
                    return True
        return False

    def cut(
        self, frame: FrameType, left: range, done: int, epochs: int, ran: Iterable[Place]
    ) -> int | None:
        """Note that a loop leaves out rounds; of the numbers `left`, it has to go on with this.

        It is the next one of a training, or one at which a branch is taken that was not. From now
        on counters don't tell which values they had.
        """
        if not self._cut:
            self._look_back(done, epochs, {joined(*place) for place in ran})
        _, source, function, line = next(self._own(frame))
        loop = source.loop_of(function, line)
        if loop is None:
            return None
        place = source.name, loop.lineno
        if place not in self._cut:
            self._cut.append(place)
            self._left += ((source.name, at) for at in source.uses_of_lists(function, loop))
        if source.has_run(loop.body, self.trainings):
            if not left:
                self._left.append(place)
            elif len(left) <= MOST_VISITS:
                return left[0]
        coming = (
            next((one for one in left[:FUTURE] if test.is_new(one)), None)
            for test in source.tests_in(function)
            if source.counts(loop, test)
        )
        return min((one for one in coming if one is not None), default=None)

    # -- at the end -----------------------------------------------------------------------------

    def result(
        self, done: int, epochs: int, ran: Mapping[Place, set[Place]], *, grows: bool = False
    ) -> dict[str, Any]:
        """The lines that were not reached, and the steps of the whole training.

        `ran` are places that allocated memory, each with the lines of what they still hold and the
        steps before that. A loop of rounds whose memory `grows` was not reached whole.
        """
        held = {joined(*place): steps for place, steps in ran.items()}
        held |= {place: set() for place in self._boundaries if place not in held}
        found = self._unreached(done, epochs, held, grows=grows)
        lines = list(dict.fromkeys(shown(name, line) for name, line in sorted(found or ())))
        return {"unreached": lines[:MOST_SHOWN], "of_steps": self._of_steps}

    @guarded("the end of the training loop")
    def _unreached(
        self, done: int, epochs: int, ran: Mapping[Place, set[Place]], *, grows: bool
    ) -> list[Place]:
        self._look_back(done, epochs, ran)
        if self.is_whole:
            every = [
                (source, test) for source in self._all for test in source.tests if test.of_rank
            ]
            return [(one.name, line) for one, test in every for line in one.left_by(test, ran)]
        found = [*self._left, *(self._cut if grows else ())]
        larger = {joined(*place) for place, is_larger in loops().larger.items() if is_larger}
        for source in self._all:
            for test in source.tests:
                if test.taken:  # in the loop
                    found += [(source.name, line) for line in source.left_by(test, ran)]
                    found += [(source.name, test.node.lineno)] * source.keeps(test, ran)
            ramps = self._ramps.setdefault(source.name, Ramps(source))
            for ramp in ramps.all:
                if ramp.function not in self._on_stack and source.is_used(ramp.function):
                    ramps.look_back(ramp, done)
            found += [(source.name, line) for line in ramps.growing(self.steps_left)]
            found += [
                place for place in larger if place[0] == source.name and ramps.sizes(place[1])
            ]
        return found

    def _look_back(self, done: int, epochs: int, ran: Iterable[Place]) -> None:
        """Evaluate the tests in functions that no step ended in, once."""
        for name, _ in ran:
            if package_of(name) is None:
                self._source(name)
        for source in self._all:
            for test in source.tests:
                elsewhere = test.function not in self._on_stack and source.is_used(test.function)
                if (elsewhere or test.of_rank) and not test.taken:
                    _look_back(test, source, done, epochs)


def _names(frame: FrameType) -> dict[str, Any]:
    """The names of a running function and of its module."""
    local = frame.f_locals
    if local is frame.f_globals:
        return local
    found = {**frame.f_globals, **local}
    if isinstance(local, dict) and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: a copy
        local.clear()  # it would keep tensors alive
    return found


def _note(test: Test, names: Mapping[str, Any], source: Source, line: int, *, is_cut: bool) -> None:
    """Evaluate a test with the counters of this step; after a cut, the first ones are kept."""
    values: dict[str, Any] = {}
    for name, atom in test.atoms.items():
        value = value_of(atom, names)
        if not isinstance(value, int | float):  # a clock, a tensor, or a state
            test.code, test.taken = None, {False}
            return
        values[name] = value + source.shift(test.node, atom, line)
        all_values = source.values(test.node, atom, names)
        test.totals[name] = all_values[-1] if all_values else None
        if is_cut:
            test.values.setdefault(name, all_values[0] if all_values else 0)
    test.names = {name: names[name] for name in _plain_names(test, names)}
    test.names |= {name: ON_DEVICE for name in test.added if is_on_device(names.get(name))}
    if not is_cut:
        test.values = values
    outcome = test.outcome(values, test.names)
    if outcome is None:
        test.code = None
    test.taken.add(bool(outcome))


def _plain_names(test: Test, names: Mapping[str, Any]) -> Iterator[str]:
    for name in test.code.co_names if test.code is not None else ():
        if name in names and not is_of_torch(names[name]):
            yield name


def _progress(loop: Any, names: Mapping[str, Any]) -> tuple[int | None, int]:
    """The iterations of a loop, None if unknown, and those that are done."""
    values = iterated(loop.iter, names) if isinstance(loop, ast.For | ast.AsyncFor) else None
    if values is None:
        return None, 0
    target = counter_target(loop)
    now = names.get(target) if target else None
    return len(values), values.index(now) if isinstance(now, int) and now in values else 0


def _look_back(test: Test, source: Source, done: int, epochs: int) -> None:
    """Evaluate a test in a function that no step ended in, with the values that it may have had."""
    names = source.globals
    others = {name: names[name] for name in _plain_names(test, names)}
    ranges: dict[str, range] = {}
    for key, atom in test.atoms.items():
        name = last_name(atom)
        value = value_of(atom, names) if not isinstance(atom, ast.Attribute) else None
        if test.of_rank:
            ranges[key] = range(1)
        elif isinstance(value, int):
            ranges[key] = range(value + 1)
        elif "epoch" in name:
            ranges[key] = range(max(1, epochs))
        else:
            first = source.begins_at(test, atom) or int(name in _FROM_ONE)
            ranges[key] = range(first, done + 1)
    test.names, test.values = others, {key: one[-1] for key, one in ranges.items()}
    test.totals = dict.fromkeys(ranges, STANDS_FOR["ranks"] - 1 if test.of_rank else None)
    test.taken = {False}
    for number in range(max(map(len, ranges.values()))):
        values = {key: one[min(number, len(one) - 1)] for key, one in ranges.items()}
        outcome = test.outcome(values, others)
        if outcome is None:
            test.code = None
            return
        test.taken = (test.taken if number else set()) | {outcome}
