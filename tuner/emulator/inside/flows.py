"""Follows what a file of the program makes from its counters: names, and functions that tell."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property

from tuner.emulator.inside.rounds import MOST_CALLS, last_name

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASKS = ("next", "anext", "send", "__next__", "__anext__")
"""Calls that ask an iterator or a generator, which may count."""
TO_HOST = frozenset({"cpu", "item", "numpy", "tolist"})
TAKES = frozenset({"heappop", ".heappop()", ".pop()", ".popleft()", "next", "zip"})
"""Calls whose answers depend on how often they were asked, as they are used."""
_PARTS = (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Subscript, ast.Await, ast.Tuple)
"""Parts of a test that are looked into for what it asks."""


class Tree:
    """A syntax tree whose nodes know what is around them."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }

    def up(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def around(self, node: ast.AST, kinds: tuple[type, ...]) -> ast.AST:
        """The innermost node of these kinds around a node; else the whole tree."""
        return next((one for one in self.up(node) if isinstance(one, kinds)), self._tree)

    def made_from(self, counters: Callable[[ast.AST], set[str]], known: set[str]) -> set[str]:
        """The names of values made from the counters of each function, and from what is `known`."""
        made = set(known)
        for _ in range(MOST_CALLS):
            for function, uses, makes in self._flows:
                if not uses.isdisjoint(made | counters(function)):
                    made |= makes
        return made

    @cached_property
    def _flows(self) -> list[tuple[ast.AST, set[str], set[str]]]:
        """For each statement: its function, what it uses, and what it makes of that."""
        found = []
        for one in ast.walk(self._tree):
            function = self.around(one, FUNCTIONS)
            if isinstance(one, ast.Return | ast.Yield) and one.value is not None:
                inside = set(ast.walk(function))
                if TO_HOST.isdisjoint(last_name(getattr(part, "func", part)) for part in inside):
                    ifs = (up for up in self.up(one) if isinstance(up, ast.If) and up in inside)
                    uses = used(one.value, *(up.test for up in ifs))
                    found.append((function, uses, self._told_by(function)))
            elif isinstance(one, ast.If):  # which sets a word or a sign
                words = (part for part in one.body if isinstance(part, ast.Assign))
                makes = (stored(part) for part in words if _is_word(part.value))
                found.append((function, used(one.test), set().union(*makes)))
            pairs = [(one.target, one.iter)] if isinstance(one, ast.For | ast.AsyncFor) else []
            for target, value in (*assigned(one), *pairs):
                found.append((function, used(value), stored(target)))
        return found

    def _told_by(self, function: ast.AST) -> set[str]:
        """The text of a call of a function of the file."""
        owner, name = self._parents.get(function), getattr(function, "name", "")
        if not isinstance(owner, ast.ClassDef):
            return {name}
        if name.startswith("__"):
            return {owner.name}
        is_property = "property" in map(last_name, getattr(function, "decorator_list", ()))
        return {f".{name}" if is_property else f".{name}()"}


def used(*nodes: ast.AST) -> set[str]:
    """The names, attributes, items and calls in some code, as `a`, `a.b`, `.b` and `.b()`."""
    every = [one for node in nodes for one in ast.walk(node)]
    calls = [one for one in every if isinstance(one, ast.Call)]
    called = {one.func for one in calls}
    attributes = (one for one in every if isinstance(one, ast.Attribute))
    last = {f".{one.attr}()" if one in called else f".{one.attr}" for one in attributes}
    items = (one.slice for one in every if isinstance(one, ast.Subscript))
    last |= {"." + str(one.value) for one in items if isinstance(one, ast.Constant)}
    lengths = {ast.unparse(one) for one in calls if last_name(one.func) in ("len", "next")}
    return written(*nodes) | last | lengths


def asked(test: ast.expr, made: set[str]) -> Iterator[ast.expr]:
    """The parts of a test that are made from counters, as they are seen in it."""
    if isinstance(test, _PARTS):
        parts = (one for one in ast.iter_child_nodes(test) if isinstance(one, ast.expr))
        yield from (found for one in parts for found in asked(one, made))
    elif isinstance(test, ast.Call | ast.Name | ast.Attribute):
        given = getattr(test, "args", [])
        uses = used(test) - (
            set() if last_name(getattr(test, "func", test)) in ASKS else used(*given)
        )
        if not uses.isdisjoint(made - TAKES):
            yield test


def _is_word(value: ast.expr) -> bool:
    return isinstance(getattr(value, "value", None), str | bool)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names that a statement or an expression assigns, with their values."""
    if isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        is_several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        several = (getattr(one, "elts", ()) for one in (target, value))
        yield from zip(*several, strict=False) if is_several else [(target, value)]


def written(*nodes: ast.AST) -> set[str]:
    """The names and attributes in some code."""
    every = (one for node in nodes for one in ast.walk(node))
    return {ast.unparse(one) for one in every if isinstance(one, ast.Name | ast.Attribute)}


def stored(node: ast.AST) -> set[str]:
    """The names and attributes that get values in some code."""
    every = (one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute))
    return {ast.unparse(one) for one in every if isinstance(one.ctx, ast.Store)}
