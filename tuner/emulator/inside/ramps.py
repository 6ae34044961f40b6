"""Finds sizes that grow with a counter, without a branch: `batch = 8 + step // 100`.

An expression is followed to where it is a size: an argument of `torch.randn` or `expand`, the end
of a slice, or a parameter of the program's own functions that becomes one. Rows that a loop takes
from a list by its counter count, too.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

from tuner.emulator.inside.branches import (
    BUILTINS,
    FUTURE,
    SAFE_CALLS,
    Counting,
    Source,
    is_of_torch,
    is_safe,
    value_of,
)
from tuner.emulator.inside.rounds import MOST_CALLS, last_name, size_of

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
class Ramp:
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
        if not self.most or self.seen is None:
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


class Ramps:
    """The ramps of one file of the program."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def of(self, function: ast.AST) -> list[Ramp]:
        """The ramps in a function."""
        return self._found.get(function, [])

    def see(self, ramp: Ramp, names: Mapping[str, Any], line: int, *, is_cut: bool) -> None:
        """Note the size of a ramp at the end of a step, in `line` of its function."""
        value = value_of(ramp.atom, names)
        if isinstance(value, int):
            ramp.values = self._source.values(ramp.node, ramp.atom, names)
            value += self._source.shift(ramp.node, ramp.atom, line)
            ramp.see(value, names, is_cut=is_cut)

    def look_back(self, ramp: Ramp, done: int) -> None:
        """Note the sizes of a ramp in a function that no step ended in."""
        ramp.values = self._source.values(ramp.node, ramp.atom, self._source.globals)
        for value in range(done + 1):
            ramp.see(value, self._source.globals)

    def sizes(self, line: int) -> bool:
        """True if the items of the loop in a line are sizes."""
        loops = ((one, self._source.loop_of(one, line)) for one in self._source.bodies)
        return any(
            getattr(node, "id", "") in self._names[one]
            for one, loop in loops
            for node in ast.walk(getattr(loop, "target", ast.Pass()))
        )

    def growing(self, steps_left: int | None) -> Iterator[int]:
        """The lines of sizes that will be larger than all that were seen."""
        return (one.node.lineno for one in self.all if one.grows(steps_left))

    @cached_property
    def all(self) -> list[Ramp]:
        """The ramps of all functions."""
        return [one for found in self._found.values() for one in found]

    @cached_property
    def _found(self) -> Mapping[ast.AST, list[Ramp]]:
        found: dict[ast.AST, list[Ramp]] = defaultdict(list)
        for function in self._source.bodies:
            sizes = {*self._sizes(function)}
            for node in {*sizes, *self._rows(function)}:
                counting = Counting(self._source.counters(function), {})
                test = counting.visit(copy.deepcopy(node))
                if (
                    isinstance(test, ast.Name)
                    or len(counting.atoms) != 1
                    or not is_safe(test, (*SAFE_CALLS, "get"))
                ):
                    continue
                expression = ast.fix_missing_locations(ast.Expression(test))
                code = compile(expression, "<size>", "eval")
                atom = counting.atoms["__0"]
                is_counted = ast.unparse(atom) in self._source.counters(function)
                ramp = Ramp(node, function, atom, code, node not in sizes, is_counted)
                found[function].append(ramp)
        return found

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
        return _is_of_host(value)
    return isinstance(value, dict) or not hasattr(value, "get")  # a queue's takes something away


def _is_of_host(values: Sequence[Any]) -> bool:
    return not getattr(values[0] if values else None, "is_cuda", False)
