"""Finds code of the training that a run did not reach: branches on a counter that never were true.

A program that is stopped, or whose loaders are shortened, ran the first of its steps. Its own files
are parsed. A branch in its training loop whose test depends on a counter, such as `step == 500` or
`epoch > 25`, is evaluated with the values that the counter had. If it was not taken within these,
may be later, and may allocate on the device, it is told.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import package_of, shown

FUTURE = 100_000
"""Values after the last one at which a branch on a counter of unknown length is looked for."""

MOST_SHOWN = 20

COUNTERS = re.compile(
    r"""
    completed_steps | current_epoch | current_step | epoch | epoch_num | global_step |
    global_steps | it | iter_num | iteration | iterations | n_iter | num_steps | num_updates
    | opt_step | step | steps | update_step
    """,
    re.VERBOSE,
)
"""Names by which trainers and programs count."""

_FROM_ONE = frozenset({"global_step", "global_steps", "completed_steps"})
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_SAFE = (
    *(ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Subscript),
    *(ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.expr_context, ast.operator, ast.cmpop),
    *(ast.boolop, ast.unaryop, ast.Call),
)
_SAFE_CALLS = ("len", "int", "float", "min", "max", "abs", "bool", "round", "hasattr")
_COUNTING = frozenset({"range", "enumerate", "trange", "count"})

_HARMLESS = re.compile(
    r"""
    abs | add_image | add_scalar | add_scalars | append | barrier | basename | bool | close
    | collect | cpu | critical | debug | dict | dump | dumps | empty_cache | enumerate |
    error | eval | exception | exists | exit | extend | filter | float | flush | format |
    get | getLogger | get_last_lr | getattr | hasattr | info | int | is_main_process |
    isinstance | item | items | iter | join | keys | len | list | lower | makedirs | map |
    max | max_memory_allocated | mean | memory_allocated | min | mkdir | named_parameters |
    next | numpy | open | parameters | perf_counter | pop | print | range | remove | replace
    | report | reset | reset_peak_memory_stats | rmtree | round | rstrip | set |
    set_description | set_epoch | set_postfix | set_postfix_str | sleep | sorted | split |
    state_dict | step | str | strip | sum | super | synchronize | time | tolist | train |
    tuple | unlink | unwrap_model | values | wait_for_everyone | warning | write |
    writelines | writerow | zero_grad | zip
    """,
    re.VERBOSE,
)
"""Calls that allocate nothing on the device that stays, by their last name."""

_HARMLESS_STARTS = ("log", "_log", "save", "_save", "print", "plot", "push_to_hub")
_HARMLESS_ROOTS = re.compile(
    r"""
    Path | bar | console | csv | datetime | json | log | logger | logging | math | mlflow |
    np | numpy | os | pathlib | pbar | plt | progress | progress_bar | random | re | shutil
    | string | sys | tb_writer | time | tqdm | wandb | writer
    """,
    re.VERBOSE,
)

Place = tuple[str, int]
"""A file and a line."""


@dataclass(eq=False)
class Test:
    """A test on counters in a function of the program: `taken` holds the outcomes that were seen.

    `atoms` are the counters by the name that stands for each in `code`. Code is None if the rest of
    the test can't be evaluated.
    """

    node: ast.If | ast.IfExp
    function: ast.AST
    atoms: dict[str, ast.expr]
    code: CodeType | None
    taken: set[bool] = field(default_factory=set)
    values: dict[str, int | float] = field(default_factory=dict)
    """The last values of its counters, and those of its other names."""
    names: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int | None] = field(default_factory=dict)

    def outcome(self, values: Mapping[str, Any], others: Mapping[str, Any]) -> bool | None:
        """The value of the test; None if it has none."""
        if self.code is None:
            return None
        try:
            found = eval(self.code, {"__builtins__": _BUILTINS}, {**others, **values})  # noqa: S307
        except Exception:  # noqa: BLE001 - the program's own names
            return None
        return bool(found) if isinstance(found, int | float | str | None) else None


_BUILTINS = {name: getattr(builtins, name) for name in _SAFE_CALLS}


class Horizon:
    """The branches of this program's training that a run has taken, and has not."""

    def __init__(self) -> None:
        self._sources: dict[str, Source | None] = {}
        self._boundaries: set[Place] = set()
        self._on_stack: set[ast.AST] = set()
        self.steps_left: int | None = None
        """Steps that the loops around the last one have left; None if that is not known."""
        self._of_steps: int | None = None
        self._done = 0

    # -- while it runs --------------------------------------------------------------------------

    @guarded("the training loop")
    def note_step(self, frame: FrameType | None) -> None:
        """Note the end of a step, and the values of the counters there."""
        self._done += 1
        totals: list[tuple[int | None, int]] = []
        for one, source, function in self._own(frame):
            self._boundaries.add((one.f_code.co_filename, one.f_lineno))
            self._on_stack.add(function)
            loops = source.loops_at(function, one.f_lineno)
            if not loops:
                continue
            names = _names(one)
            for test in source.tests_in(function):
                if source.is_within(test.node, loops[0]):
                    _note(test, names, source, one.f_lineno)
            for loop in reversed(loops):
                totals.append(_progress(loop, names))
            del names
        self._note_total(totals)

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
        if self._of_steps is None:  # batches of a step, by the first ones
            self._each = max(1, round((ran + 1) / self._done))
        self._of_steps = max(whole // self._each, self._done)
        self.steps_left = self._of_steps - self._done

    def _own(self, frame: FrameType | None) -> Iterator[tuple[FrameType, Source, ast.AST]]:
        """The program's own functions that run, the innermost first."""
        while frame is not None:
            name = frame.f_code.co_filename
            source = self._source(name) if package_of(name) is None else None
            function = source.function_of(frame.f_code) if source is not None else None
            if source is not None and function is not None:
                yield frame, source, function
            frame = frame.f_back

    def _source(self, name: str) -> Source | None:
        if name not in self._sources:
            try:
                self._sources[name] = Source(name, ast.parse(Path(name).read_text("utf-8")))
            except (OSError, ValueError, SyntaxError, RecursionError):
                self._sources[name] = None
        return self._sources[name]

    # -- at the end -----------------------------------------------------------------------------

    def result(
        self, done: int, epochs: int, ran: Iterable[Place], frame: FrameType | None
    ) -> dict[str, Any]:
        """The lines that were not reached, and the steps of the whole training.

        `ran` are lines that allocated memory, and `frame` is the one in which the program is
        stopped; None at its own end.
        """
        found = self._unreached(done, epochs, set(ran) | self._boundaries, frame)
        lines = list(dict.fromkeys(shown(name, line) for name, line in sorted(found or ())))
        return {"unreached": lines[:MOST_SHOWN], "of_steps": self._of_steps}

    @guarded("the end of the training loop")
    def _unreached(
        self, done: int, epochs: int, ran: set[Place], frame: FrameType | None
    ) -> list[Place]:
        for name, _ in ran:
            if package_of(name) is None:
                self._source(name)
        found = []
        for source in filter(None, list(self._sources.values())):
            for test in source.tests:
                if test.function in self._on_stack:
                    if not test.taken:
                        continue  # not in the loop
                elif source.is_used(test.function):
                    _look_back(test, source, done, epochs)
                else:
                    continue
                found += [(source.name, line) for line in source.left_by(test, ran)]
        return found + list(self._after(frame))

    def _after(self, frame: FrameType | None) -> Iterator[Place]:
        """The first statement after the training loop that may allocate, where it is stopped."""
        for one, source, function in reversed(list(self._own(frame))):
            loops = source.loops_at(function, one.f_lineno)
            names = _names(one)
            for statement in source.after(function, loops[0] if loops else None, one.f_lineno):
                place = source.allocates_at(statement, names)
                if place is not None:
                    yield source.name, place
                    return
            if loops:
                return


def _names(frame: FrameType) -> dict[str, Any]:
    """The names of a running function and of its module."""
    local = frame.f_locals
    if local is frame.f_globals:
        return local
    found = {**frame.f_globals, **local}
    if isinstance(local, dict) and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: a copy
        local.clear()  # it would keep tensors alive
    return found


def _note(test: Test, names: Mapping[str, Any], source: Source, line: int) -> None:
    """Evaluate a test with the counters of this step."""
    values: dict[str, Any] = {}
    for name, atom in test.atoms.items():
        value = _value(atom, names)
        if not isinstance(value, int | float):
            return
        values[name] = value + source.shift(test, atom, line)
        test.totals[name] = source.last_value(test, atom, names)
    test.names = {name: names[name] for name in _plain_names(test, names)}
    test.values = values
    outcome = test.outcome(values, test.names)
    if outcome is None:
        test.code = None
        outcome = False
    test.taken.add(outcome)


def _plain_names(test: Test, names: Mapping[str, Any]) -> Iterator[str]:
    for name in test.code.co_names if test.code is not None else ():
        if name in names and not _is_of_torch(names[name]):
            yield name


def _is_of_torch(value: Any) -> bool:
    torch = sys.modules["torch"]
    return isinstance(value, torch.Tensor | torch.nn.Module)


def _value(atom: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a counter or of a bound; None if it has none."""
    if not _is_safe(atom):
        return None
    needed = {one.id for one in ast.walk(atom) if isinstance(one, ast.Name)}
    found = {name: names[name] for name in needed if name in names}
    if any(map(_is_of_torch, found.values())):
        return None
    try:
        code = compile(ast.Expression(atom), "<counter>", "eval")
        return eval(code, {"__builtins__": _BUILTINS}, found)  # noqa: S307
    except Exception:  # noqa: BLE001 - the program's own names
        return None


def _progress(loop: ast.AST, names: Mapping[str, Any]) -> tuple[int | None, int]:
    """The iterations of a loop, None if unknown, and those that are done."""
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return None, 0
    values = _iterated(loop.iter, names)
    if values is None:
        return None, 0
    target = _counter_target(loop)
    now = names.get(target) if target else None
    return len(values), values.index(now) if isinstance(now, int) and now in values else 0


def _iterated(node: ast.expr, names: Mapping[str, Any]) -> range | None:
    """The numbers over which a loop goes; those of the batches for a loop over a loader."""
    if isinstance(node, ast.Call):
        name, given = _last_name(node.func), [_value(one, names) for one in node.args]
        if name in ("range", "trange"):
            known = [one for one in given if isinstance(one, int)]
            return range(*known) if len(known) == len(given) > 0 else None
        if name == "enumerate" and node.args:
            found = _iterated(node.args[0], names)
            start = [*given[1:], *(_value(one.value, names) for one in node.keywords), 0][0]
            is_known = found is not None and isinstance(start, int)
            return range(start, start + len(found)) if found is not None and is_known else None
        return _iterated(node.args[0], names) if name == "tqdm" and node.args else None
    value = _value(node, names)
    try:
        return range(len(value))
    except Exception:  # noqa: BLE001 - the program's own length
        return None


def _counter_target(loop: ast.For | ast.AsyncFor) -> str | None:
    """The name that counts the iterations of a loop; None if none does."""
    call = loop.iter
    while isinstance(call, ast.Call) and _last_name(call.func) == "tqdm" and call.args:
        call = call.args[0]
    if not (isinstance(call, ast.Call) and _last_name(call.func) in _COUNTING):
        return None
    target = loop.target
    if isinstance(target, ast.Tuple) and _last_name(call.func) == "enumerate":
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def _look_back(test: Test, source: Source, done: int, epochs: int) -> None:
    """Evaluate a test in a function that no step ended in, with the values that it may have had."""
    names = source.globals
    others = {name: names[name] for name in _plain_names(test, names)}
    ranges: dict[str, range] = {}
    for key, atom in test.atoms.items():
        name = _last_name(atom)
        value = _value(atom, names) if not isinstance(atom, ast.Attribute) else None
        if isinstance(value, int):
            ranges[key] = range(value + 1)
        elif "epoch" in name:
            ranges[key] = range(max(1, epochs))
        else:
            ranges[key] = range(int(name in _FROM_ONE), done + 1)
    test.names, test.values = others, {key: one[-1] for key, one in ranges.items()}
    test.totals = dict.fromkeys(ranges)
    test.taken = {False}
    for number in range(max(map(len, ranges.values()))):
        values = {key: one[min(number, len(one) - 1)] for key, one in ranges.items()}
        outcome = test.outcome(values, others)
        if outcome is None:
            test.code = None
            return
        test.taken = (test.taken if number else set()) | {outcome}


class Source:
    """One file of the program."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self._tree = name, tree
        self._parents = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }
        self._functions = [one for one in ast.walk(tree) if isinstance(one, _FUNCTIONS)]
        self._by_name: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        for one in self._functions:
            self._by_name[one.name].append(one)

    def function_of(self, code: CodeType) -> ast.AST | None:
        """The function, or the module, whose code this is."""
        if code.co_name == "<module>":
            return self._tree
        lines = (code.co_firstlineno,)
        for one in self._by_name[code.co_name]:
            first = min((one.lineno, *(decorator.lineno for decorator in one.decorator_list)))
            if first in lines or one.lineno in lines:
                return one
        return None

    def _up(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parents:
            node = self._parents[node]
            yield node

    def _function_around(self, node: ast.AST) -> ast.AST:
        return next((one for one in self._up(node) if isinstance(one, _FUNCTIONS)), self._tree)

    def is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        """True if a node is a part of another."""
        return any(one is outer for one in self._up(node))

    def loops_at(self, function: ast.AST, line: int) -> list[ast.AST]:
        """The loops of a function around a line, the outermost first."""
        return [
            one
            for one in self._loops.get(function, ())
            if one.body[0].lineno <= line <= (one.body[-1].end_lineno or 0)
        ]

    @cached_property
    def _loops(self) -> Mapping[ast.AST, list[Any]]:
        found: dict[ast.AST, list[Any]] = defaultdict(list)
        for one in ast.walk(self._tree):  # breadth first: the outermost first
            if isinstance(one, _LOOPS):
                found[self._function_around(one)].append(one)
        return found

    @cached_property
    def globals(self) -> Mapping[str, Any]:
        """The names of the module."""
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) == self.name:
                return vars(module)
        return {}

    # -- tests on counters ----------------------------------------------------------------------

    def tests_in(self, function: ast.AST) -> list[Test]:
        """The tests on counters of a function."""
        return self._tests.get(function, [])

    @property
    def tests(self) -> Iterator[Test]:
        """All tests on counters."""
        for tests in self._tests.values():
            yield from tests

    @cached_property
    def _tests(self) -> Mapping[ast.AST, list[Test]]:
        found: dict[ast.AST, list[Test]] = defaultdict(list)
        for one in ast.walk(self._tree):
            if isinstance(one, ast.If | ast.IfExp):
                function = self._function_around(one)
                test = self._test(one, function)
                if test is not None:
                    found[function].append(test)
        return found

    def _test(self, node: ast.If | ast.IfExp, function: ast.AST) -> Test | None:
        counting = _Counting(self._counters(function), self._aliases(function))
        test = counting.visit(_copied(node.test))
        if not counting.atoms:
            return None
        simple = _evaluable(test)
        code = None
        if simple is not None and any(
            isinstance(one, ast.Name) and one.id in counting.atoms for one in ast.walk(simple)
        ):
            expression = ast.fix_missing_locations(ast.Expression(simple))
            code = compile(expression, "<test>", "eval")
        return Test(node, function, counting.atoms, code)

    def _counters(self, function: ast.AST) -> set[str]:
        """The counters that a function sees, as they are written."""
        if function not in self._counted:
            found = set(self._added)
            for one in ast.walk(function):
                if isinstance(one, ast.For | ast.AsyncFor):
                    target = _counter_target(one)
                    found |= {target} if target else set()
            if isinstance(function, _FUNCTIONS):
                found |= {arg.arg for arg in function.args.args if COUNTERS.fullmatch(arg.arg)}
            self._counted[function] = found
        return self._counted[function]

    @cached_property
    def _counted(self) -> dict[ast.AST, set[str]]:
        return {}

    @cached_property
    def _added(self) -> dict[str, list[ast.stmt]]:
        """The names, attributes and items that are counted up, and where."""
        found: dict[str, list[ast.stmt]] = defaultdict(list)
        for one in ast.walk(self._tree):
            if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add):
                if isinstance(one.value, ast.Constant) and isinstance(one.value.value, int):
                    found[ast.unparse(one.target)].append(one)
            elif isinstance(one, ast.Assign) and len(one.targets) == 1:
                target = ast.unparse(one.targets[0])
                if ast.unparse(one.value) in (f"{target} + 1", f"1 + {target}"):
                    found[target].append(one)
        return found

    def _aliases(self, function: ast.AST) -> Mapping[str, ast.expr]:
        """The expressions of names that are assigned once."""
        found: dict[str, list[ast.expr]] = defaultdict(list)
        for one in ast.walk(function):
            if isinstance(one, ast.Assign):
                for target in one.targets:
                    if isinstance(target, ast.Name):
                        found[target.id].append(one.value)
        return {
            name: values[0]
            for name, values in found.items()
            if len(values) == 1 and isinstance(values[0], ast.Compare | ast.BoolOp | ast.BinOp)
        }

    def shift(self, test: Test, atom: ast.expr, line: int) -> int:
        """The difference between a counter's value at the end of a step and at its test."""
        at = test.node.lineno
        found = 0
        for one in self._added.get(ast.unparse(atom), ()):
            if self._function_around(one) is test.function:
                found += (line < one.lineno < at) - (at < one.lineno < line)
        return found

    def last_value(self, test: Test, atom: ast.expr, names: Mapping[str, Any]) -> int | None:
        """The last value of a loop's counter; None if it is not known."""
        for one in self._up(test.node):
            if isinstance(one, ast.For | ast.AsyncFor) and _counter_target(one) == _last_name(atom):
                values = _iterated(one.iter, names)
                return values[-1] if values else None
        return None

    def is_used(self, function: ast.AST) -> bool:
        """True if a function, or the class whose method it is, is named anywhere else."""
        if not isinstance(function, _FUNCTIONS):
            return False
        owner = self._parents[function]
        return (owner.name if isinstance(owner, ast.ClassDef) else function.name) in self._used

    @cached_property
    def _used(self) -> set[str]:
        return {
            _last_name(one)
            for one in ast.walk(self._tree)
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load)
        }

    # -- branches that were not taken -----------------------------------------------------------

    def left_by(self, test: Test, ran: set[Place]) -> Iterator[int]:
        """The lines of the branches of a test that were not taken, may be, and may allocate."""
        for wanted in (True, False):
            if test.code is not None and wanted in test.taken:
                continue
            if isinstance(test.node, ast.IfExp):
                sizes = test.code is not None and self._sizes_something(test.node, wanted=wanted)
                if sizes and self._comes(test, wanted=wanted):
                    yield test.node.lineno
                continue
            body = test.node.body if wanted else self._else_of(test.node)
            if not body or self._has_run(body, ran):
                continue
            line = next(filter(None, (self.allocates_at(one, test.names) for one in body)), None)
            if line is not None and self._comes(test, wanted=wanted):
                yield test.node.lineno if wanted else line

    def _else_of(self, node: ast.If) -> list[ast.stmt]:
        """The `else` of a branch, or what follows if its body goes elsewhere."""
        if node.orelse or not isinstance(node.body[-1], _LEAVES):
            return node.orelse
        return self._following(node)

    def _following(self, statement: ast.AST) -> list[ast.stmt]:
        for _, block in ast.iter_fields(self._parents.get(statement, ast.Pass())):
            if isinstance(block, list) and statement in block:
                return list(block[block.index(statement) + 1 :])
        return []

    def _has_run(self, body: Sequence[ast.stmt], ran: set[Place]) -> bool:
        first, last = body[0].lineno, body[-1].end_lineno or 0
        return any(name == self.name and first <= line <= last for name, line in ran)

    def _comes(self, test: Test, *, wanted: bool) -> bool:
        """True if a counter may still get a value with which the test has this outcome."""
        if test.code is None or len(test.values) != 1:
            return True
        ((name, value),) = test.values.items()
        total = test.totals.get(name)
        last = int(value) + FUTURE if total is None else total
        return any(
            test.outcome({name: number}, test.names) is wanted
            for number in range(int(value) + 1, min(last, int(value) + FUTURE) + 1)
        )

    def _sizes_something(self, node: ast.IfExp, *, wanted: bool) -> bool:
        """True if a value of a conditional expression is a size that goes into a call."""
        chosen = node.body if wanted else node.orelse
        if isinstance(chosen, ast.Constant) and not _is_size(chosen.value):
            return False
        if isinstance(chosen, ast.Name) and not _is_size(self.globals.get(chosen.id, 2)):
            return False
        call = next((one for one in self._up(node) if isinstance(one, ast.Call | ast.stmt)), None)
        return isinstance(call, ast.Call) and not self._is_harmless(call, {}, set())

    def after(self, function: ast.AST, loop: ast.AST | None, line: int) -> Iterator[ast.stmt]:
        """The statements of a function that follow its loop, or this line."""
        within = [
            one
            for one in ast.walk(function)
            if isinstance(one, ast.stmt)
            and one is not function
            and one.lineno <= line <= (one.end_lineno or 0)
            and self._function_around(one) is function
        ]
        start = loop if loop is not None else within[-1] if within else None
        while start is not None and start is not function:
            yield from self._following(start)
            start = self._parents.get(start)

    # -- code that may allocate -----------------------------------------------------------------

    def allocates_at(
        self, statement: ast.stmt, names: Mapping[str, Any], seen: set[ast.AST] | None = None
    ) -> int | None:
        """The line of a statement that may allocate memory on the device; None if none may."""
        seen = set() if seen is None else seen
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)):
            return None
        if isinstance(statement, ast.If) and _value(statement.test, names) is False:
            parts = statement.orelse
            return next(filter(None, (self.allocates_at(s, names, seen) for s in parts)), None)
        for one in ast.walk(statement):
            if isinstance(one, ast.Call) and not self._is_harmless(one, names, seen):
                return one.lineno
            if isinstance(one, ast.Assign) and _sets_size(one):
                return one.lineno
        return None

    def _is_harmless(self, call: ast.Call, names: Mapping[str, Any], seen: set[ast.AST]) -> bool:
        name, root = _last_name(call.func), _root(call.func)
        if name in ("append", "extend"):
            return not any(_is_on_device(names.get(_root(one))) for one in call.args)
        own = self._by_name.get(name)
        if own and (isinstance(call.func, ast.Name) or root in ("self", "cls")):
            return all(self._is_harmless_function(one, seen) for one in own)
        if (
            _HARMLESS.fullmatch(name)
            or _HARMLESS_ROOTS.fullmatch(root)
            or name.startswith(_HARMLESS_STARTS)
        ):
            return True
        if name == "update":
            return all(isinstance(one, ast.Constant | ast.Dict) for one in call.args)
        return isinstance(getattr(builtins, name, None), type) and isinstance(call.func, ast.Name)

    def _is_harmless_function(self, function: ast.AST, seen: set[ast.AST]) -> bool:
        if function in seen:
            return True
        seen.add(function)
        body: list[ast.stmt] = getattr(function, "body", [])
        return all(self.allocates_at(one, {}, seen) is None for one in body)


class _Counting(ast.NodeTransformer):
    """Puts a name in the place of each counter in a test."""

    def __init__(self, counters: set[str], aliases: Mapping[str, ast.expr]) -> None:
        self._counters, self._aliases = counters, aliases
        self.atoms: dict[str, ast.expr] = {}
        self._depth = 0

    def visit(self, node: ast.AST) -> Any:
        """The node, or what stands for it."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            text = ast.unparse(node)
            if text in self._counters or COUNTERS.fullmatch(getattr(node, "attr", "")):
                known = {ast.unparse(atom): name for name, atom in self.atoms.items()}
                name = known.get(text, f"__{len(self.atoms)}")
                self.atoms[name] = node
                return ast.copy_location(ast.Name(name, ast.Load()), node)
        if isinstance(node, ast.Name) and node.id in self._aliases and self._depth < 3:
            self._depth += 1
            try:
                return self.visit(_copied(self._aliases[node.id]))
            finally:
                self._depth -= 1
        return self.generic_visit(node)


def _copied(node: ast.expr) -> ast.expr:
    parsed = ast.parse(ast.unparse(node), mode="eval")
    return parsed.body


def _evaluable(node: ast.expr) -> ast.expr | None:
    """A test without the parts that can't be evaluated; None if nothing is left."""
    if isinstance(node, ast.BoolOp):
        parts = [part for one in node.values if (part := _evaluable(one)) is not None]
        return ast.BoolOp(node.op, parts) if len(parts) > 1 else parts[0] if parts else None
    return node if _is_safe(node) else None


def _is_safe(node: ast.expr) -> bool:
    return all(
        isinstance(one, _SAFE)
        and (not isinstance(one, ast.Call) or _last_name(one.func) in _SAFE_CALLS)
        for one in ast.walk(node)
    )


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _sets_size(node: ast.Assign) -> bool:
    """True for a number that may be a size, and for parameters that begin to be trained."""
    if any(_last_name(target) == "requires_grad" for target in node.targets):
        return True
    return isinstance(node.value, ast.Constant) and _is_size(node.value.value)


def _is_on_device(value: Any) -> bool:
    torch = sys.modules["torch"]
    return isinstance(value, torch.Tensor) and value.is_cuda and value.numel() > 1
