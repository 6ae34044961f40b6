"""Finds code of the training that a run did not reach: branches on a counter that never were true.

A program whose loops and loaders are shortened ran some of its steps. Its own files are parsed. A
branch in its training loop whose test depends on a counter, such as `step == 500` or `epoch > 25`,
is evaluated with the values that the counter had. If it was not taken within these, may be later,
and may allocate on the device, it is told. So are sizes that grow.

A size that grows with a counter, such as `batch = 8 + step // 100`, is an expression that is
followed to an argument of `torch.randn` or `expand`, to the end of a slice, or to a parameter of
the program's own functions that becomes one. Rows that a loop takes from a list by its counter
count, too.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import functools
import inspect
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

from tuner.emulator.inside.branches import (
    BUILTINS,
    FUTURE,
    ON_DEVICE,
    PURE_CALLS,
    Counting,
    Place,
    Source,
    Test,
    counter_target,
    is_of_torch,
    is_on_device,
    is_safe,
    is_state,
    iterated,
    value_of,
)
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import frames_of, joined, package_of, parsed, shown
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.rounds import (
    MOST_CALLS,
    MOST_VISITS,
    called_in,
    last_name,
    loops,
    size_of,
)

_SIZED = re.compile(
    r"""
    \w*crop | batchsampler | dataloader | empty | expand | full | interpolate | new_empty |
    new_full | new_ones | new_zeros | ones | pad | rand | randint | randn | repeat |
    repeat_interleave | resize | tile | zeros
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Calls whose arguments are sizes."""

_KEYWORDS = re.compile(r"(.*_)?(batch|height|len|length|resolution|size|tokens|width)(_.*)?")
"""Keywords of calls of libraries whose values are sizes."""

RETURNED = ast.Name("return")
"""Stands for the value that a function returns: no other name is written so."""


@dataclass(eq=False)
class _Ramp:
    """An expression of a counter, in a function, that is a size, or rows of a list.

    `most` is the largest size that was seen, and `names` are its other values then. `seen` are the
    first and the last value of the counter, and `values` all of them, if they are known. One that
    the file is not seen to count has to change.
    """

    node: ast.expr
    function: ast.AST
    atom: ast.expr
    code: CodeType
    is_rows: bool
    is_counted: bool
    most: int = 0
    names: dict[str, Any] = field(default_factory=dict)
    seen: tuple[int, int] | None = None
    values: range | None = None

    def see(self, value: int, names: Mapping[str, Any], *, is_cut: bool = False) -> None:
        """Note the size at a value of the counter; after a cut, those between were not seen."""
        self.names = {name: names[name] for name in self.code.co_names if _is_plain(name, names)}
        if not (is_cut and self.seen):
            self.seen = (self.seen[0] if self.seen else value, value)
        self.most = max(self.most, self._size(value) or 0)

    def grows(self, steps_left: int | None) -> bool:
        """True if a coming value of the counter makes it larger than all that were seen."""
        if self.seen is None or not (self.most or self._size(self.seen[1]) is None):
            return False
        start, last = self.seen
        if start == last and not self.is_counted:
            return False
        coming = range(last + 1, last + min(steps_left or FUTURE, FUTURE) + 1)
        if self.values is not None and last in self.values:
            coming = self.values[self.values.index(last) + 1 :][:FUTURE]
        first = [self._size(last + number) for number in range(4)]
        if None not in first and [one - first[0] for one in first] == [0, 1, 2, 3]:  # type: ignore[operator]
            return False  # a counter itself
        return any((self._size(value) or 0) > self.most for value in coming)

    def _size(self, value: int) -> int | None:
        try:
            found = eval(self.code, {"__builtins__": BUILTINS}, {**self.names, "__0": value})  # noqa: S307
        except Exception:  # noqa: BLE001 - the program's own names
            return None
        return None if self.is_rows and isinstance(found, int) else size_of(found)


class _Ramps:
    """The ramps of one file of the program."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def see(self, ramp: _Ramp, names: Mapping[str, Any], line: int, *, is_cut: bool) -> None:
        """Note the size of a ramp at the end of a step, in `line` of its function."""
        value = value_of(ramp.atom, names)
        if isinstance(value, int):
            ramp.values = self._source.values(ramp.node, ramp.atom, names)
            value += self._source.shift(ramp.node, ramp.atom, line)
            ramp.see(value, names, is_cut=is_cut)

    def sizes(self, line: int) -> bool:
        """True if the items of the loop in a line are sizes."""
        loops = ((one, self._source.loop_of(one, line)) for one in self._source.bodies)
        return any(
            getattr(node, "id", "") in self._names[one]
            for one, loop in loops
            for node in ast.walk(getattr(loop, "target", ast.Pass()))
        )

    @cached_property
    def found(self) -> Mapping[ast.AST, list[_Ramp]]:
        """The ramps by the function that they are in."""
        found: dict[ast.AST, list[_Ramp]] = defaultdict(list)
        for function in self._source.bodies:
            sizes = {*self._sizes(function)}
            for node in {*sizes, *self._rows(function)}:
                counting = Counting(self._source.counters(function), {})
                test = counting.visit(copy.deepcopy(node))
                if (
                    isinstance(test, ast.Name)
                    or len(counting.atoms) != 1
                    or not is_safe(test, (*PURE_CALLS, "get"))
                ):
                    continue
                expression = ast.fix_missing_locations(ast.Expression(test))
                code = compile(expression, "<size>", "eval")
                atom = counting.atoms["__0"]
                is_counted = ast.unparse(atom) in self._source.counters(function)
                ramp = _Ramp(node, function, atom, code, node not in sizes, is_counted)
                found[function].append(ramp)
        return found

    def numbers(self, function: ast.AST) -> Iterator[ast.expr]:
        """The names, attributes and items in tests and sizes of a function."""
        for node in itertools.chain(self._source.tested(function), self._sizes(function)):
            for one in ast.walk(node):
                if isinstance(one, ast.Name | ast.Attribute | ast.Subscript):
                    yield one

    def _rows(self, function: ast.AST) -> Iterator[ast.expr]:
        """The items and slices that a function takes from its lists."""
        for one in self._source.parts(function):
            if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load):
                yield one

    def _sizes(self, function: ast.AST) -> Iterator[ast.expr]:
        """The expressions in a function that are sizes."""
        names = self._names[function]
        for one in self._source.parts(function):
            yield from self._used_as_size(one)
            targets = one.targets if isinstance(one, ast.Assign) else [RETURNED]
            is_size = any(ast.unparse(target) in names for target in targets)
            if isinstance(one, ast.Assign | ast.Return) and one.value and is_size:
                yield one.value

    def _used_as_size(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Slice) and node.upper is not None and node.lower is None:
            yield node.upper
        if not isinstance(node, ast.Call):
            return
        if _SIZED.fullmatch(last_name(node.func)):
            yield from node.args
        yield from (one.value for one in node.keywords if _KEYWORDS.fullmatch(one.arg or ""))
        for callee, name, given in self._source.passed_to(node):
            if name in self._names[callee]:
                yield given

    @cached_property
    def _names(self) -> dict[ast.AST, set[str]]:
        """The names in each function that are sizes; `return` if it returns one."""
        self.__dict__["_names"] = names = defaultdict(set)
        for _ in range(MOST_CALLS):
            for function in self._source.bodies:
                for size in list(self._sizes(function)):
                    for one in ast.walk(size):
                        if isinstance(one, ast.Name | ast.Attribute):
                            names[function].add(ast.unparse(one))
                        elif isinstance(one, ast.Call):
                            for callee in self._source.named(last_name(one.func)):
                                names[callee].add(RETURNED.id)
        return names


def _is_plain(name: str, names: Mapping[str, Any]) -> bool:
    """True for a value whose items run no operators, and that keeps no memory of the device."""
    value = names.get(name)
    if name == "__0" or name not in names or is_of_torch(value):
        return False
    if isinstance(value, list | tuple):
        return not getattr(value[0] if value else None, "is_cuda", False)
    return isinstance(value, dict) or not hasattr(value, "get")  # a queue's takes something away


MOST_SHOWN = 20
"""Lines that are told."""

_FOLLOWED_STEPS = 4
"""The first steps, in which the calls that get counters are followed."""

_FROM_ONE = frozenset({"global_step", "global_steps", "completed_steps"})


class Horizon:
    """The branches of this program's training that a run has taken, and has not."""

    def __init__(self) -> None:
        self._sources: dict[str, Source | None] = {}
        self._ramps: dict[str, _Ramps] = {}
        self._numbers: dict[tuple[ast.AST, str], int | float] = {}
        """The first value of what may be a counter, as it is written in a function."""
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
        self._advanced: list[Test] = []
        """The tests whose counters were set to a later value, up to two times."""
        self._advanced_at = -1
        """The steps that were done then: of a step of many batches, each asks."""
        self._is_cut = False
        """True if counters have left out values."""
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
            if self._done <= _FOLLOWED_STEPS:
                self._follow_calls(source, function, names)
                self._find_counters(source, function, names)
            for test in source.tests_in(function):
                if is_in_loop or source.is_within(test.node, loops[0]):
                    before = {*test.taken}
                    _note(test, names, source, line, is_cut=self._is_cut)
                    # A branch that adds to lists comes twice: what both times left there grows.
                    for outcome in test.taken - before:
                        if source.adds(test, outcome):
                            test.kept.setdefault(outcome, []).append(self._done)
                            if len(test.kept[outcome]) == 1:
                                test.taken.discard(outcome)
            ramps = self._ramps.setdefault(source.name, _Ramps(source))
            for ramp in ramps.found.get(function, ()):
                if is_in_loop or source.is_within(ramp.node, loops[0]):
                    ramps.see(ramp, names, line, is_cut=self._is_cut)
            totals += _progress(source, loops, names)
            is_in_loop = True
            del names
        if not self._is_cut:
            self._note_total(totals[::-1])

    def _follow_calls(self, source: Source, function: ast.AST, names: dict[str, Any]) -> None:
        """Note counters that go to callbacks, and to functions of other files."""
        for call, given in source.counted_arguments(function):
            for callee in _callees(call, source, names):
                code, first = _code_of(callee)
                if code is None or package_of(code.co_filename) is not None:
                    continue
                name, line = joined(code.co_filename, code.co_firstlineno)
                other = self._source(name)
                found = other.function_of(code.co_name, line) if other is not None else None
                if other is not None and found is not None:
                    known = code.co_varnames[first : code.co_argcount + code.co_kwonlyargcount]
                    places = dict(enumerate(known))
                    other.note_counters(found, {places.get(key, key) for key in given} & {*known})

    def _find_counters(self, source: Source, function: ast.AST, names: dict[str, Any]) -> None:
        """Note the numbers in tests and sizes of a function that differ from step to step."""
        found = set()
        for one in self._ramps.setdefault(source.name, _Ramps(source)).numbers(function):
            value, text = value_of(one, names), ast.unparse(one)
            if isinstance(value, int | float) and not isinstance(value, bool):
                before = self._numbers.setdefault((function, text), value)
                if value != before:
                    found.add(text)
                    source.falling |= {text} if value < before else set()
        if source.note_counters(function, found):
            self._ramps.pop(source.name)

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
        """True if a counter comes to a branch that may allocate, in these steps.

        One that comes to it later in the training is set to what it has there.
        """
        # It is asked before each round while one is near: the far ones take a hundred times longer.
        if self._advanced_at == self._done or any(True for _ in self._coming(steps)):
            return True
        coming = sorted(self._coming(self.steps_left or 0), key=lambda one: one[0])
        return any(self._advance(*one) for _, *one in coming)

    def _coming(self, most: int) -> Iterator[tuple[int, Test, Any, int]]:
        """The steps until a test waits no more, the loop that counts, and what is left to count."""
        for source in self._all:
            for test in source.tests:
                if not test.code or len(test.now) != 1 or test.function not in self._on_stack:
                    continue
                ((name, value),) = test.now.items()
                loop = source.loop_that_counts(test)
                is_range = loop is not None and "enumerate" not in called_in(loop.iter)
                if is_range or isinstance(value, float) or self._advanced.count(test) > 1:
                    continue
                by = -test.each if source.falls(test.atoms[name]) else test.each
                total = test.totals.get(name)
                coming = range(int(value) + by, int(value) + by * most + by, by)
                at = next((n for n, one in enumerate(coming) if test.is_new(one)), None)
                if at is None or (total is not None and coming[at] > total):
                    continue
                if any(source.left_by(test, self._boundaries)):
                    yield at, test, loop, at * by

    def _advance(self, test: Test, loop: Any, by: int) -> bool:
        """Add to the counter of a test; false if that is impossible."""
        self._advanced.append(test)
        if not self._is_cut:
            self._look_back(self._done, 1, self._boundaries)
        for frame, _, function, _ in self._own(sys._getframe()):
            if function is test.function:
                if loop is not None:
                    loops().ahead[id(frame), loop.lineno] = by
                has = loop is not None or _add(frame, next(iter(test.atoms.values())), by)
                if has:
                    self._is_cut, self._advanced_at = True, self._done
                return has
        return False

    def cut(
        self, frame: FrameType, left: range, done: int, epochs: int, ran: Iterable[Place]
    ) -> int | None:
        """Note that a loop leaves out rounds; of the numbers `left`, it has to go on with this.

        It is the next one of a training, or one at which a branch is taken that was not. From now
        on counters don't tell which values they had.
        """
        if not self._is_cut:
            self._look_back(done, epochs, {joined(*place) for place in ran})
        _, source, function, line = next(self._own(frame))
        loop = source.loop_of(function, line)
        if loop is None:
            return None
        place = source.name, loop.lineno
        if place not in self._cut:
            self._is_cut = True
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
        for name, line, outcome in loops().decided:
            place = joined(name, line)
            if (source := self._source(place[0])) is not None:
                source.decided[place[1]].add(outcome)
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
            used = (one for one in source.bodies if one in self._on_stack or source.is_used(one))
            found += [
                (source.name, line) for one in used for line in source.left_in_tables(one, ran)
            ]
            ramps = self._ramps.setdefault(source.name, _Ramps(source))
            for ramp in itertools.chain(*ramps.found.values()):
                if ramp.function not in self._on_stack and source.is_used(ramp.function):
                    ramp.values = source.values(ramp.node, ramp.atom, source.globals)
                    for value in range(done + 1):
                        ramp.see(value, source.globals)
                if ramp.grows(self.steps_left):
                    found.append((source.name, ramp.node.lineno))
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
                # A `while` that no step ends in has rounds of its own.
                elsewhere = not isinstance(test.node, ast.While)
                elsewhere &= test.function not in self._on_stack and source.is_used(test.function)
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


def _add(frame: FrameType, atom: ast.expr, by: int) -> bool:
    """Add to a counter of a running function; false if that is impossible."""
    names = _names(frame)
    value, local = value_of(atom, names), frame.f_locals
    if not isinstance(value, int):
        return False
    try:
        if isinstance(atom, ast.Attribute):
            setattr(value_of(atom.value, names), atom.attr, value + by)
        elif isinstance(atom, ast.Subscript):
            value_of(atom.value, names)[value_of(atom.slice, names)] = value + by
        elif isinstance(atom, ast.Name):
            (local if atom.id in local else frame.f_globals)[atom.id] = value + by
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    except Exception:  # noqa: BLE001 - the program's own objects
        return False
    return bool(value_of(atom, _names(frame)) == value + by)


def _callees(call: ast.Call, source: Source, names: Mapping[str, Any]) -> Iterator[Any]:
    """The functions that a call runs; of a loop over callbacks, each."""
    for loop in source.up(call):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            items = value_of(loop.iter, names)
            for item in items if isinstance(items, list | tuple) else ():
                yield value_of(call.func, {**names, loop.target.id: item})
    yield value_of(call.func, names)


def _code_of(callee: Any) -> tuple[CodeType | None, int]:
    """The code of a function of the program, and the number of arguments that are given before."""
    first = 0
    while isinstance(callee, functools.partial):
        first, callee = first + len(callee.args), callee.func
    if not inspect.isroutine(callee):
        callee = getattr(callee, "__call__", None)  # noqa: B004 - the method itself
    if inspect.ismethod(callee):
        first, callee = first + 1, callee.__func__
    return getattr(inspect.unwrap(callee), "__code__", None), first


def _asks_state(test: Test, names: Mapping[str, Any], source: Source) -> bool:
    """True for a test of what is made from counters: its outcomes to come are not known."""
    if any(is_state(one, names) for one in source.states[test.node]):
        test.code, test.taken = None, {False}
        return True
    return False


def _note(test: Test, names: Mapping[str, Any], source: Source, line: int, *, is_cut: bool) -> None:
    """Evaluate a test with the counters of this step; after a cut, the first ones are kept."""
    values: dict[str, Any] = {}
    if _asks_state(test, names, source):
        return
    if not test.atoms:
        test.taken = set()  # of a tensor, which had no value in the first step
        return
    for name, atom in test.atoms.items():
        value = value_of(atom, names)
        if not isinstance(value, int | float):  # a clock, a tensor, or a state
            test.code, test.taken = None, {False}
            return
        values[name] = value + source.shift(test.node, atom, line)
        if not is_cut:
            test.each = max(test.each, int(values[name] - test.values.get(name, values[name])))
        all_values = source.values(test.node, atom, names)
        test.totals[name] = all_values[-1] if all_values else None
        if is_cut:
            test.values.setdefault(name, all_values[0] if all_values else 0)
    test.now = values
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


def _progress(
    source: Source, loops: Sequence[Any], names: Mapping[str, Any]
) -> list[tuple[int | None, int]]:
    """The iterations of loops, None if unknown, and those that are done, the outermost first.

    A loop that ends with a counter of an inner loop has as many rounds as both together.
    """
    found: list[tuple[int | None, int]] = []
    for loop in loops:
        values = None if isinstance(loop, ast.While) else iterated(loop.iter, names)
        now = None if values is None else names.get(counter_target(loop) or "")
        at = values.index(now) if values and isinstance(now, int) and now in values else 0
        found.append((None if values is None else len(values), at))
    for at, loop in enumerate(loops):
        now, values, inner = source.counted_by(loop, names)
        end = next((n + 1 for n, one in enumerate(loops) if one is inner), 0)
        whole = math.prod(total or sys.maxsize for total, _ in found[at:end])
        if values is not None and len(values) < whole:
            index = values.index(now) if now is not None and now in values else 0
            found[at:end] = [(len(values), index), *[(1, 0)] * (end - at - 1)]
    return found


def _look_back(test: Test, source: Source, done: int, epochs: int) -> None:
    """Evaluate a test in a function that no step ended in, with the values that it may have had."""
    names = source.globals
    if _asks_state(test, names, source) or not test.atoms:
        return
    others = {name: names[name] for name in _plain_names(test, names)}
    ranges: dict[str, range] = {}
    for key, atom in test.atoms.items():
        name = last_name(atom)
        value = value_of(atom, names) if not isinstance(atom, ast.Attribute) else None
        if test.of_rank:
            ranges[key] = range(1)
        elif isinstance(value, int):
            first = source.begins_at(test, atom)
            up, down = range(first, max(first, value) + 1), range(value + done, value - 1, -1)
            ranges[key] = down if source.falls(atom) else up
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
