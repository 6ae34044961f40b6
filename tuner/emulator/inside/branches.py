"""Reads the program's own files: its loops, and the branches in them that depend on a counter."""

from __future__ import annotations

import ast
import builtins
import copy
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from inspect import isroutine
from itertools import chain
from types import CodeType
from typing import Any

from tuner.emulator.inside.flows import (
    FUNCTIONS,
    TAKES,
    Tree,
    asked,
    assigned,
    stored,
    used,
    written,
)
from tuner.emulator.inside.lines import is_file, package_of
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.rounds import MOST_CALLS, called_in, last_name

FUTURE = 100_000
"""Values after the last one at which a branch on a counter of unknown length is looked for."""

COUNTERS = frozenset(
    """batch_idx batch_index completed_steps current_epoch current_step epoch epoch_num global_step
    global_steps it iter_num iteration iterations last_epoch n_iter num_steps num_updates opt_step
    step step_num steps update_step""".split()  # noqa: SIM905
)
"""Names by which trainers and programs count."""

_PLAIN = (int, float, str, type(None), list, tuple, dict, set)
_FIELDS = frozenset(f".{name}" for name in COUNTERS)
_TESTS = (ast.If, ast.IfExp, ast.While)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_SAFE = (
    *(ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Subscript),
    *(ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.expr_context, ast.operator, ast.cmpop),
    *(ast.boolop, ast.unaryop, ast.Call, ast.Dict, ast.JoinedStr, ast.FormattedValue),
)
SAFE_CALLS = ("len", "int", "float", "min", "max", "abs", "bool", "round", "hasattr", "divmod")
PURE_CALLS = (
    *SAFE_CALLS,
    *("bisect", "bisect_left", "bisect_right", "ceil", "clip", "cos", "exp", "floor", "interp"),
    *("log", "log2", "pow", "sqrt", "endswith", "startswith"),
)
"""Calls, also of modules, that only compute."""
_LOGARITHMS = ("math.log", "np.log", "numpy.log")
"""Another `log` is the program's own, and may write."""
_ADDS = ("append", "extend", "appendleft")
_SUMMARIES = ("item", "max", "mean", "min", "std", "sum", "tolist")
_TO_HOST = frozenset({"cpu", "float", "int", "item", "numpy", "tolist"})
_COUNTING = frozenset({"range", "enumerate", "trange", "count"})
_RANK = re.compile(r"(\w+\.)*((get_)?(local_|global_)?rank(\(\))?|process_index)")
_NUMBER = re.compile(r"len|numel|shape|(\w+_)?(batch|examples|rows|samples|size|tokens|ranks)")
_CLOCK = re.compile(
    r"(\w+\.)*(time|monotonic|perf_counter|now)\(\)|(\w+\.)*param_groups\[0\]\['lr'\]"
)
_SCHEDULES = ("LambdaLR", "MultiplicativeLR")
"""Learning rate schedules, whose functions get a counter."""

_HARMLESS = frozenset(
    """abs add_image add_scalar add_scalars all_gather_object append barrier basename bool
    broadcast_object_list close collect cpu critical debug dict dump dumps empty_cache enumerate
    error eval exception exists exit extend filter float flush format gather_object get
    getLogger get_last_lr getattr hasattr info int is_main_process isinstance item items iter
    join keys len list load_state_dict lower makedirs manual_seed manual_seed_all map max
    max_memory_allocated mean memory_allocated min mkdir named_parameters next numpy open
    parameters perf_counter pop print range remove replace report reset reset_peak_memory_stats
    rmtree round rstrip scatter_object_list set set_description set_epoch set_postfix
    set_postfix_str sleep sorted split state_dict step str strip sum super synchronize time
    tolist train tuple unlink unwrap_model values wait_for_everyone warning write writelines
    writerow zero_grad zip""".split()  # noqa: SIM905
)
"""Calls that allocate nothing on the device that stays, by their last name."""

_HARMLESS_STARTS = ("log", "_log", "save", "_save", "print", "plot", "push_to_hub")
_HARMLESS_ROOTS = frozenset(
    """Path bar console csv datetime json log logger logging math mlflow np numpy os pathlib
    pbar plt progress progress_bar random re shutil string sys tb_writer time tqdm wandb
    writer""".split()  # noqa: SIM905
)

Place = tuple[str, int]
"""A file and a line."""


@dataclass(eq=False)
class Test:
    """A test on counters in a function of the program: `taken` holds the outcomes that were seen.

    `atoms` are the counters by the name that stands for each in `code`. Code is None if the rest of
    the test can't be evaluated.
    """

    node: ast.If | ast.IfExp | ast.While | ast.For
    function: ast.AST
    atoms: dict[str, ast.expr]
    code: CodeType | None
    of_rank: bool = False
    """True if it is on the number of a rank: the first one ran for all."""
    taken: set[bool] = field(default_factory=set)
    values: dict[str, int | float] = field(default_factory=dict)
    """The values of its counters until any were left out, and those of its other names."""
    now: dict[str, int | float] = field(default_factory=dict)
    """The last values of its counters in the training loop."""
    names: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int | None] = field(default_factory=dict)
    each: int = 1
    """The most that its counters rose in a step."""
    kept: dict[bool, list[int]] = field(default_factory=dict)
    """By outcome that adds to lists: the first two steps that had it."""

    @cached_property
    def added(self) -> set[str]:
        """The names of values that a branch adds to lists, unless it reads them to the host."""
        calls = (one for one in ast.walk(self.node) if isinstance(one, ast.Call))
        adds = (one for one in calls if last_name(one.func) in _ADDS)
        return {_root(given) for one in adds for given in one.args if not _is_of_host(given)}

    def outcome(self, values: Mapping[str, Any], others: Mapping[str, Any]) -> bool | None:
        """The value of the test; None if it has none."""
        if self.code is None:
            return None
        try:
            found = eval(self.code, {"__builtins__": BUILTINS}, {**others, **values})  # noqa: S307
        except Exception:  # noqa: BLE001 - the program's own names
            return None
        return bool(found) if isinstance(found, _PLAIN) else None

    def is_new(self, value: int) -> bool:
        """True if the one counter's `value` has an outcome that was not seen."""
        outcome = self.outcome(dict.fromkeys(self.values, value), self.names)
        return outcome is not None and outcome not in self.taken


BUILTINS = {name: getattr(builtins, name) for name in SAFE_CALLS}


class Source(Tree):
    """One file of the program."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        super().__init__(ast.fix_missing_locations(_Cases().visit(tree)))
        self.name = name
        self._functions = [one for one in ast.walk(tree) if isinstance(one, FUNCTIONS)]
        self._by_name: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        for one in self._functions:
            self._by_name[one.name].append(one)
        self._given: dict[ast.AST, set[str]] = defaultdict(set)
        self._handlers = [one for one in ast.walk(tree) if isinstance(one, ast.ExceptHandler)]
        self.states: dict[ast.AST, list[ast.expr]] = {}
        """The parts of each test that are made from counters, whose values to come aren't known."""
        self._ended: dict[ast.AST, range] = {}
        self._exits: dict[ast.AST, list[tuple[ast.expr, bool]]] = {}
        self._resets: dict[tuple[str, ast.AST], bool] = {}
        """`counted_by` asks after each step how loops end; each loop's text is read once."""
        self.falling: set[str] = set()
        """Numbers that fell from one step to the next."""
        self.decided: dict[int, set[bool]] = defaultdict(set)
        """By the line of a branch: the outcomes that it had, which are known at the end."""

    def function_of(self, name: str, line: int) -> ast.AST | None:
        """The function, or the module, whose code has this name and begins in this line."""
        if name == "<module>":
            return self._tree
        for one in self._by_name[name]:
            if line in (one.lineno, *(decorator.lineno for decorator in one.decorator_list)):
                return one
        return None

    def _function_around(self, node: ast.AST) -> ast.AST:
        return self.around(node, FUNCTIONS)

    def is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        """True if a node is a part of another."""
        return any(one is outer for one in self.up(node))

    def loop_of(self, function: ast.AST, line: int) -> Any:
        """The loop of a function whose head is in this line; None if there is none."""
        for one in self._loops.get(function, ()):
            if one.lineno <= line < max(one.body[0].lineno, one.lineno + 1):
                return one
        return None

    def uses_of_lists(self, function: ast.AST, loop: Any) -> Iterator[int]:
        """The lines below a loop with calls that may allocate as much as its lists have items.

        Items that are read to the host count where a call makes them, or their number, a tensor of
        the device.
        """
        lists = self._lists_of(loop)
        parts = [one for one in self.parts(function) if getattr(one, "lineno", 0) > loop.end_lineno]
        for one in parts if lists else ():
            is_length = last_name(getattr(getattr(one, "value", one), "func", one)) == "len"
            if isinstance(one, ast.Assign) and is_length and not written(one).isdisjoint(lists):
                lists |= dict.fromkeys(map(ast.unparse, one.targets), False)
        for one in parts if lists else ():
            after = getattr(self._parents[one], "attr", "")
            if not isinstance(one, ast.Call) or after in _SUMMARIES:
                continue
            is_moved = after in ("cuda", "to") or any(key.arg == "device" for key in one.keywords)
            used = [name for name in written(*one.args) if name in lists]
            is_large = any(is_moved or lists[name] for name in used)
            if is_large and not self._is_harmless(one, {}, set()):
                yield one.lineno

    def _lists_of(self, loop: ast.AST) -> dict[str, bool]:
        """By what a loop adds items to: true if any of them is on the device."""
        found: dict[str, bool] = defaultdict(bool)
        for one in ast.walk(loop):
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.args:
                if one.func.attr in (*_ADDS, "add"):
                    found[ast.unparse(one.func.value)] |= not _is_of_host(one.args[0])
            elif isinstance(one, ast.Assign) and _joins(one):
                found[ast.unparse(one.targets[0])] = True
            elif isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store):
                found[ast.unparse(one.value)] |= False
        return found

    def counts(self, loop: Any, test: Test) -> bool:
        """True if a loop counts the one counter of a test in it."""
        target = counter_target(loop) if isinstance(loop, ast.For) else None
        atoms = [last_name(one) for one in test.atoms.values()]
        return atoms == [target] and self.is_within(test.node, loop)

    def loop_that_counts(self, test: Test) -> Any:
        """The loop that counts the one counter of a test in it; None if none does."""
        return next((one for one in self.up(test.node) if self.counts(one, test)), None)

    def loops_at(self, function: ast.AST, line: int) -> list[Any]:
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
            name = getattr(module, "__file__", None)
            if isinstance(name, str) and package_of(name) is None and is_file(self.name, name):
                return vars(module)
        return {}

    # -- tests on counters ----------------------------------------------------------------------

    def tests_in(self, function: ast.AST) -> list[Test]:
        """The tests on counters of a function."""
        return [test for test in self._tests.get(function, ()) if not test.of_rank]

    @property
    def tests(self) -> Iterator[Test]:
        """All tests on counters."""
        return (test for tests in self._tests.values() for test in tests)

    @cached_property
    def _tests(self) -> dict[ast.AST, list[Test]]:
        return {function: [*self._tests_of(function)] for function in self.bodies}

    def _tests_of(self, function: ast.AST) -> Iterator[Test]:
        for one in self.parts(function):
            test = self._test(one, function) if isinstance(one, (*_TESTS, ast.For)) else None
            if test is not None:
                yield test

    def counted_arguments(self, function: ast.AST) -> Iterator[tuple[ast.Call, list[Any]]]:
        """The calls of a function that get counters, with their places or keywords."""
        counters = self.counters(function)
        for one in self.parts(function):
            if isinstance(one, ast.Call):
                given = [*enumerate(one.args), *((key.arg, key.value) for key in one.keywords)]
                found = [key for key, value in given if _is_counter(value, counters)]
                if found:
                    yield one, found

    def note_counters(self, function: ast.AST, names: set[str]) -> bool:
        """Note what counts in a function, although the file doesn't tell; true if any is new."""
        if names <= self.counters(function):
            return False
        self._given[function] |= names
        for name in ("_passed", "_made"):
            self.__dict__.pop(name, None)
        known = {test.node for test in self.tests}
        for one, tests in self._tests.items():
            tests += [test for test in self._tests_of(one) if test.node not in known]
        return True

    def tested(self, function: ast.AST) -> Iterator[ast.expr]:
        """The tests of a function."""
        return (one.test for one in self.parts(function) if isinstance(one, _TESTS))

    def _test(
        self, node: ast.If | ast.IfExp | ast.While | ast.For, function: ast.AST
    ) -> Test | None:
        asks = node.iter if isinstance(node, ast.For) else node.test
        if isinstance(node, ast.For) and not _COUNTING.isdisjoint(called_in(asks)):
            return None
        given = {one.arg for one in getattr(getattr(function, "args", None), "args", ())}
        fields = asked(asks, self._fields - _FIELDS)
        states = [one for one in fields if _root(one) in given - {"self", "cls"}]
        known = self.counters(function) | self._aliases(function).keys()
        states += [one for one in asked(asks, self._made) if ast.unparse(one) not in known]
        for counters in (self.counters(function) | self._answers, self._ranks):
            counting = Counting(counters, self._aliases(function))
            test = counting.visit(copy.deepcopy(asks))
            if counting.atoms:
                break
        simple, code = _evaluable(test), None
        if simple is not None and any(
            isinstance(one, ast.Name) and one.id in counting.atoms for one in ast.walk(simple)
        ):
            code = _compiled(simple)
        elif isinstance(node, ast.IfExp) and not any(
            self._added.get(ast.unparse(one)) for one in counting.atoms.values()
        ):
            return None  # as for a random number, of which nothing tells the branch that ran
        if not counting.atoms and not states:
            return None
        of_rank = bool(counting.atoms) and counters is self._ranks
        self.states[node] = states
        return Test(node, function, counting.atoms, code, of_rank)

    @cached_property
    def _ranks(self) -> set[str]:
        """The numbers of the process among the ranks, as they are written; the first one runs."""
        names = (ast.Name, ast.Attribute, ast.Call)
        texts = (ast.unparse(one) for one in ast.walk(self._tree) if isinstance(one, names))
        return set(filter(_RANK.fullmatch, texts)) if STANDS_FOR.get("ranks", 1) > 1 else set()

    def counters(self, function: ast.AST) -> set[str]:
        """The counters that a function sees, as they are written."""
        return self._own_counters(function) | self._passed.get(function, set())

    def _own_counters(self, function: ast.AST) -> set[str]:
        if function not in self._counted:
            found = {name for name in self._added if not self._is_other(name, function)}
            for one in ast.walk(function):
                if isinstance(one, ast.For | ast.AsyncFor):
                    target = counter_target(one)
                    found |= {target} if target else set()
            if isinstance(function, FUNCTIONS):
                found |= {arg.arg for arg in function.args.args if arg.arg in COUNTERS}
            self._counted[function] = found
        return self._counted[function]

    @cached_property
    def _counted(self) -> dict[ast.AST, set[str]]:
        return {}

    def _is_other(self, name: str, function: ast.AST) -> bool:
        """True if a name that is counted elsewhere is a function's own, which doesn't count it."""
        if function is self._tree or any(
            self._function_around(one) is function for one in self._added[name]
        ):
            return False
        return any(
            getattr(one, "arg", None) == name
            or (getattr(one, "id", None) == name and isinstance(one.ctx, ast.Store))  # type: ignore[attr-defined]
            for one in ast.walk(function)
        )

    @cached_property
    def _passed(self) -> Mapping[ast.AST, set[str]]:
        """The parameters of functions that get counters."""
        found: dict[ast.AST, set[str]] = defaultdict(set)
        found.update((function, {*names}) for function, names in self._given.items())
        calls = [one for one in ast.walk(self._tree) if isinstance(one, ast.Call)]
        for call in calls:
            if last_name(call.func) in _SCHEDULES:
                for given in (*call.args, *(one.value for one in call.keywords)):
                    for function in (given, *self._by_name.get(last_name(given), ())):
                        if isinstance(function, (*FUNCTIONS, ast.Lambda)):
                            found[function] |= {one.arg for one in function.args.args}
        for _ in range(MOST_CALLS):
            for call in calls:
                around = self._function_around(call)
                lambdas = (one for one in self.up(call) if isinstance(one, ast.Lambda))
                seen = self._own_counters(around).union(*(found[f] for f in (around, *lambdas)))
                for function, name, given in self.passed_to(call):
                    if _is_counter(given, seen):
                        found[function].add(name)
        return found

    def passed_to(self, call: ast.Call) -> Iterator[tuple[ast.AST, str, ast.expr]]:
        """The program's functions that a call may mean, with each parameter and its value."""
        for function in self._by_name.get(last_name(call.func), ()):
            names = [one.arg for one in function.args.args]
            names = names[1:] if names[:1] in (["self"], ["cls"]) else names
            yield from ((function, name, one) for name, one in zip(names, call.args, strict=False))
            yield from ((function, one.arg, one.value) for one in call.keywords if one.arg)

    @cached_property
    def _made(self) -> set[str]:
        """Names of values made from counters, or taken from a heap or a queue."""
        return self.made_from(self.counters, {*TAKES, *self._fields}) - self._fields

    @cached_property
    def _fields(self) -> set[str]:
        """The attributes that count in any object, as `.count`."""
        counted = (name.rpartition(".") for name in self._added)
        return {f".{name}" for root, _, name in counted if root and name.isidentifier()} | _FIELDS

    @cached_property
    def _answers(self) -> set[str]:
        """The questions to objects that loops tell something, such as a `GradScaler`."""
        told, other, asks = set(), {"self", "cls"}, []
        for one in ast.walk(self._tree):
            function = getattr(getattr(one, "value", None), "func", None)
            if isinstance(one, ast.Import | ast.ImportFrom):
                other |= {alias.asname or alias.name.partition(".")[0] for alias in one.names}
            elif isinstance(one, ast.Expr) and isinstance(function, ast.Attribute):
                if self.around(one, (*_LOOPS, *FUNCTIONS)) is not self._tree:
                    told.add(ast.unparse(function.value))
            elif isinstance(one, _LOOPS):  # losses and batches
                other |= stored(one)
            elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and not one.args:
                asks.append((one, ast.unparse(one.func.value)))
        return {ast.unparse(one) for one, of in asks if of in told and _root(one) not in other}

    @cached_property
    def _added(self) -> dict[str, list[ast.stmt | ast.expr]]:
        """The names, attributes and items that are counted up or down, and where.

        The length of a list that is added to counts, and the next number of `itertools.count`.
        """
        found: dict[str, list[Any]] = defaultdict(list)
        for one in ast.walk(self._tree):
            if (
                isinstance(one, ast.AugAssign)
                and isinstance(one.op, ast.Add | ast.Sub)
                and _is_number(one.value)
            ):
                found[ast.unparse(one.target)].append(one)
            for name, value in assigned(one):
                target = ast.unparse(name)
                if ast.unparse(value) in (f"{target} + 1", f"1 + {target}"):
                    found[target].append(one)
                elif last_name(getattr(value, "func", one)) == "count":
                    found[f"next({target})"].append(value)
            if isinstance(one, ast.Expr) and last_name(getattr(one.value, "func", one)) in _ADDS:
                added = one.value.func  # type: ignore[attr-defined]
                if isinstance(added, ast.Attribute):
                    found[f"len({ast.unparse(added.value)})"].append(one)
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
            if len(values) == 1
            and not isinstance(getattr(values[0], "left", None), ast.List)  # its items change
            and (
                isinstance(values[0], ast.Compare | ast.BoolOp | ast.BinOp)
                or (
                    isinstance(values[0], ast.Call | ast.IfExp | ast.JoinedStr)
                    and is_safe(values[0])
                )
                or ast.unparse(values[0]) in self._added
            )
        }

    def shift(self, node: ast.expr | ast.stmt, atom: ast.expr, line: int) -> Any:
        """The difference between a counter's value at the end of a step and where it is used."""
        at, function = node.lineno, self._function_around(node)
        found = 0
        for one in self._added.get(ast.unparse(atom), ()):
            if self._function_around(one) is function:
                found += _added_by(one) * ((line <= one.lineno < at) - (at < one.lineno < line))
        return found

    def begins_at(self, test: Test, atom: ast.expr) -> int:
        """The first value of a counter at its test, in a function that begins anew each time."""
        added = self._added.get(ast.unparse(atom), ())
        for one in added:
            if isinstance(one, ast.Call):  # itertools.count
                return next((value_of(given, {}) or 0 for given in one.args), 0)
        here = [one for one in added if self._function_around(one) is test.function]
        return int(sum(_added_by(one) for one in here if one.lineno < test.node.lineno))

    def falls(self, atom: ast.expr) -> bool:
        """True for a counter that is counted down, or was seen to fall."""
        added = self._added.get(ast.unparse(atom), ())
        is_down = bool(added) and all(_added_by(one) < 0 for one in added)
        return is_down or ast.unparse(atom) in self.falling

    def values(self, node: ast.AST, atom: ast.expr, names: Mapping[str, Any]) -> range | None:
        """The values of a loop's counter; None if they are not known."""
        for one in self.up(node):
            if isinstance(one, ast.For | ast.AsyncFor) and counter_target(one) == last_name(atom):
                return iterated(one.iter, names)
        return None

    def counted_by(
        self, loop: Any, names: Mapping[str, Any]
    ) -> tuple[int | None, range | None, ast.AST]:
        """The counter at which a loop ends, its values, and the loop that counts; None if unknown.

        A `for` loop ends so by leaving the function, or at a number of its own rounds.
        """
        tests = [(loop.test, False)] if isinstance(loop, ast.While) else []
        if loop not in self._exits:
            leaves: Any = (one for one in ast.walk(loop) if self._leaves(one, loop))
            self._exits[loop] = [(one.test, True) for one in leaves]
        tests += self._exits[loop]
        for node, ends in tests:
            counting = Counting(self.counters(self._function_around(loop)), {})
            test = _evaluable(counting.visit(copy.deepcopy(node)))
            atom = counting.atoms.get("__0")
            now = None if atom is None else value_of(atom, names)
            inner = None if atom is None else self._counting_loop(atom, loop)
            if test is None or inner is None or not isinstance(now, int):
                continue
            if node not in self._ended:
                others = {name: one for name, one in names.items() if not is_of_torch(one)}
                ended = Test(loop, loop, counting.atoms, _compiled(test))
                coming = range(now, now + FUTURE)
                found = (one for one in coming if ended.outcome({"__0": one}, others) is ends)
                self._ended[node] = range(now, next(found, now))
            if self._ended[node]:
                return now, self._ended[node], inner
        return None, None, loop

    def _leaves(self, node: ast.AST, loop: ast.AST) -> bool:
        end = node.body[-1] if isinstance(node, ast.If) else None
        if isinstance(end, ast.Return):
            return self._function_around(node) is self._function_around(loop)
        return isinstance(end, ast.Break) and self.around(node, _LOOPS) is loop

    def _counting_loop(self, atom: ast.expr, loop: Any) -> ast.AST | None:
        """The loop in which each round adds one to a counter of `loop`; None if none does."""
        text = ast.unparse(atom)
        if not isinstance(loop, ast.While) and counter_target(loop) == text:
            return loop  # type: ignore[no-any-return]
        added = self._added.get(text, [])
        steps = [getattr(getattr(one, "value", None), "value", 0) for one in added]
        if steps != [1] or self.falls(atom) or not self.is_within(added[0], loop):
            return None
        if (text, loop) not in self._resets:
            parts = (one for one in ast.walk(loop) if one not in added)
            targets = (target for one in parts for target, _ in assigned(one))
            self._resets[text, loop] = any(ast.unparse(one) == text for one in targets)
        return None if self._resets[text, loop] else self.around(added[0], _LOOPS)

    @property
    def bodies(self) -> list[ast.AST]:
        """The module and all functions."""
        return [self._tree, *self._functions]

    def parts(self, function: ast.AST) -> Iterator[ast.AST]:
        """The nodes of a function, or of the module, without those of functions in it."""
        waiting = list(ast.iter_child_nodes(function))
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, FUNCTIONS):
                waiting += ast.iter_child_nodes(node)

    def named(self, name: str) -> Sequence[ast.AST]:
        """The functions with this name."""
        return self._by_name.get(name, ())

    def is_used(self, function: ast.AST) -> bool:
        """True if a function, or the class whose method it is, is named anywhere else."""
        if not isinstance(function, FUNCTIONS) or function in self._given:
            return function in self._given
        owner = self._parents[function]
        return (owner.name if isinstance(owner, ast.ClassDef) else function.name) in self._used

    @cached_property
    def _used(self) -> set[str]:
        is_run = self.globals.get("__name__", "__main__") == "__main__"
        guard = "__name__ == '__main__'"  # what only runs if the file is a program
        body = self._tree.body
        parts = (b for b in body if is_run or ast.unparse(getattr(b, "test", b)) != guard)
        return {
            last_name(one)
            for part in parts
            for one in ast.walk(part)
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load)
        }

    # -- branches that were not taken -----------------------------------------------------------

    def left_by(self, test: Test, ran: Iterable[Place]) -> Iterator[int]:
        """The lines of the branches of a test that were not taken, may be, and may allocate."""
        decided = self.decided.get(test.node.lineno) if isinstance(test.node, ast.If) else None
        # A loop over a table has no other branch.
        for wanted in (True,) if isinstance(test.node, ast.For) else (True, False):
            if wanted in (decided or (test.taken if test.code is not None else ())):
                continue
            body = self._body(test, wanted)
            is_block = not isinstance(test.node, ast.IfExp)
            if is_block and (not body or (not decided and self.has_run(body, ran))):
                continue
            line = next(filter(None, (self.allocates_at(one, test.names) for one in body)), None)
            if line is not None and self._comes(test, wanted=wanted):
                yield test.node.lineno if wanted else line

    def has_run(self, body: Sequence[ast.stmt], ran: Iterable[Place]) -> bool:
        """True if any of these places is in a block of statements."""
        first, last = body[0].lineno, body[-1].end_lineno or 0
        return any(name == self.name and first <= line <= last for name, line in ran)

    def keeps(self, test: Test, ran: Mapping[Place, set[Place]]) -> bool:
        """True if a branch comes again, one of whose lines left memory each time.

        One that an outer loop's counter decides comes with each round of a loop between.
        """
        loops = [one for one in self.up(test.node) if isinstance(one, _LOOPS)]
        is_between = any(self.counts(one, test) for one in loops[1:])
        is_made_before = ON_DEVICE in map(test.names.get, test.added)
        if is_between and True in test.kept and is_made_before:
            return True
        for wanted, steps in test.kept.items():
            body = self._body(test, wanted)
            if any(_joins(part) for one in self._reached(test, wanted) for part in ast.walk(one)):
                steps = steps[-1:]  # noqa: PLW2901 - what it joined is gone
            found = (held for at, held in ran.items() if is_made_before or self.has_run(body, [at]))
            left = set().union(*found) if isinstance(test.node, ast.If) else set()
            lines = {line for line, _ in left}
            each = (all({(line, n - 1), (line, n)} & left for n in steps) for line in lines)
            if any(each) and self._comes(test, wanted=wanted):
                return True
        return False

    def adds(self, test: Test, outcome: bool) -> bool:
        """True if a branch adds values to a list, a dictionary or a tensor."""
        return any(self._lists_of(one) for one in self._reached(test, outcome))

    def _reached(self, test: Test, outcome: bool) -> Sequence[ast.AST]:
        """The statements of a branch, and the functions that they call."""
        waiting: list[ast.AST] = [*self._body(test, outcome)]
        for one in waiting:
            own = (function for name in called_in(one) for function in self.named(name))
            waiting += [function for function in own if function not in waiting]
        return waiting

    def _body(self, test: Test, outcome: bool) -> Sequence[ast.stmt]:
        if isinstance(test.node, ast.IfExp):
            return [ast.Expr(test.node.body if outcome else test.node.orelse)]
        if outcome:
            return test.node.body
        if test.node.orelse or not isinstance(test.node.body[-1], _LEAVES):
            return test.node.orelse
        # Without an `else`, what follows if the body goes elsewhere.
        fields = ast.iter_fields(self._parents[test.node])
        blocks = (one for _, one in fields if isinstance(one, list) and test.node in one)
        return next((one[one.index(test.node) + 1 :] for one in blocks), [])

    def _comes(self, test: Test, *, wanted: bool) -> bool:
        """True if a counter may still get a value with which the test has this outcome."""
        if test.code is None or len(test.values) != 1:
            return True
        ((name, value),) = test.values.items()
        if isinstance(value, float):
            return True
        now, total = int(value), test.totals.get(name)
        coming = [range(now + 1, now + FUTURE if total is None else min(total, now + FUTURE) + 1)]
        if self.falls(test.atoms[name]):
            coming = [range(now - 1, now - FUTURE, -1)]
        elif total is None and test.each > 1:  # samples or tokens
            coming.append(range(now + test.each, now + FUTURE * test.each, test.each))
        return any(test.outcome({name: number}, test.names) is wanted for number in chain(*coming))

    def left_in_tables(self, function: ast.AST, ran: Iterable[Place]) -> Iterator[int]:
        """The lines of functions that did not run, among which a function chooses by a counter."""
        made, chosen = (self._made | self.counters(function)) - {"next", "zip"}, list[Any]()
        for one in self.parts(function):
            callee = one.func if isinstance(one, ast.Call) else ast.Pass()
            if isinstance(callee, ast.Attribute):
                is_chosen = not made.isdisjoint(used(callee.value))
                chosen += self.named(callee.attr) if is_chosen else ()
            elif not made.isdisjoint(used(callee) - self._by_name.keys()):
                chosen += self._tabled
        for one in dict.fromkeys(chosen):
            body = [_statement(one.body)] if isinstance(one, ast.Lambda) else one.body
            if not self.has_run(body, ran) and any(self.allocates_at(part, {}) for part in body):
                yield body[0].lineno

    @cached_property
    def _tabled(self) -> list[ast.AST]:
        """The functions that are items of tables, or whose names are written as texts."""
        every = [*ast.walk(self._tree)]
        tables = (one for one in every if isinstance(one, ast.Tuple | ast.List | ast.Dict))
        items = [part for one in tables for part in ast.walk(one)]
        called = {one.func for one in items if isinstance(one, ast.Call)}
        names = {last_name(one) for one in items if one not in called}
        names |= {str(one.value) for one in every if isinstance(one, ast.Constant)}
        lambdas = (one for one in items if isinstance(one, ast.Lambda))
        return [*(one for one in self._functions if one.name in names), *lambdas]

    # -- code that may allocate -----------------------------------------------------------------

    def allocates_at(
        self, statement: ast.stmt, names: Mapping[str, Any], seen: set[ast.AST] | None = None
    ) -> int | None:
        """The line of a statement that may allocate memory on the device; None if none may."""
        seen = set() if seen is None else seen
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)):
            return None
        if isinstance(statement, ast.If) and value_of(statement.test, names) is False:
            parts = statement.orelse
            return next(filter(None, (self.allocates_at(s, names, seen) for s in parts)), None)
        for one in ast.walk(statement):
            if isinstance(one, ast.Call) and not self._is_harmless(one, names, seen):
                return one.lineno
            if isinstance(one, ast.stmt) and self._sets_size(one, names):
                return one.lineno
            raised = _root(one.exc or one) if isinstance(one, ast.Raise) else None
            for part in self._handlers if raised else ():
                if last_name(part.type or part) == raised:
                    statement = ast.copy_location(ast.Try(part.body, [], [], []), part)
                    return self.allocates_at(statement, names, seen)
        return None

    def _sets_size(self, node: ast.stmt, names: Mapping[str, Any]) -> bool:
        """True for a number that may be a size, and for parameters that begin to be trained."""
        if isinstance(node, ast.AugAssign):
            grows = isinstance(node.op, ast.Mult | ast.Add) and isinstance(node.value, ast.Constant)
            return grows and _is_size(node.value.value)  # type: ignore[attr-defined]
        if not isinstance(node, ast.Assign | ast.Return) or node.value is None:
            return False
        for target in getattr(node, "targets", ()):
            if last_name(target) == "requires_grad":
                return True
        if _is_counter(node.value, self.counters(self._function_around(node))):
            return False
        known = {**self.globals, **names}
        is_plain = isinstance(node.value, ast.Constant | ast.Name | ast.Attribute | ast.BinOp)
        return is_plain and _is_size(value_of(node.value, known))

    def _is_harmless(self, call: ast.Call, names: Mapping[str, Any], seen: set[ast.AST]) -> bool:
        name, root = last_name(call.func), _root(call.func)
        if name in _ADDS:
            return not any(is_on_device(names.get(_root(one))) for one in call.args)
        own = self._by_name.get(name)
        if own and (isinstance(call.func, ast.Name) or root in ("self", "cls")):
            return all(self._is_harmless_function(one, seen) for one in own)
        return is_quiet(call)

    def _is_harmless_function(self, function: ast.AST, seen: set[ast.AST]) -> bool:
        if function in seen:
            return True
        seen.add(function)
        body: list[ast.stmt] = getattr(function, "body", [])
        return all(self.allocates_at(one, {}, seen) is None for one in body)


def is_quiet(call: ast.Call) -> bool:
    """True for a call that allocates nothing on the device that stays, by its name."""
    name, root = last_name(call.func), _root(call.func)
    if (
        name in _HARMLESS
        or (name.endswith("_") and not name.startswith("_"))  # in place
        or root in _HARMLESS_ROOTS
        or name.startswith(_HARMLESS_STARTS)
    ):
        return True
    if name == "update":
        return all(isinstance(one, ast.Constant | ast.Dict) for one in call.args)
    return isinstance(getattr(builtins, name, None), type) and isinstance(call.func, ast.Name)


class _Cases(ast.NodeTransformer):
    """Puts branches in the place of `match` statements, and of expressions that choose."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A branch for what comes last of several conditions."""
        self.generic_visit(node)
        if isinstance(node.value, ast.IfExp):
            parts = ([_statement(one)] for one in (node.value.body, node.value.orelse))
            return ast.copy_location(ast.If(node.value.test, *parts), node)
        if not isinstance(node.value, ast.BoolOp):
            return node
        *first, last = node.value.values
        test = ast.BoolOp(node.value.op, [ast.Constant(isinstance(node.value.op, ast.And)), *first])
        is_or = isinstance(node.value.op, ast.Or)
        asked = ast.UnaryOp(ast.Not(), test) if is_or else test
        return ast.copy_location(ast.If(asked, [_statement(last)], []), node)

    def visit_Match(self, node: ast.Match) -> Any:
        """The cases as branches, each with a test of its own."""
        self.generic_visit(node)
        return [
            ast.copy_location(ast.If(_matches(node.subject, one), one.body, []), one.pattern)
            for one in node.cases
        ]


def _matches(subject: ast.expr, case: ast.match_case) -> ast.expr:
    """The test of a case; true for patterns other than values."""
    pattern, tests = case.pattern, [case.guard] if case.guard else []
    values = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    known = [one.value for one in values if isinstance(one, ast.MatchValue)]
    if len(known) == len(values):
        among = ast.Tuple(known, ast.Load())
        tests.insert(0, ast.Compare(copy.deepcopy(subject), [ast.In()], [among]))
    return ast.BoolOp(ast.And(), [ast.Constant(value=True), *tests])


class Counting(ast.NodeTransformer):
    """Puts a name in the place of each counter in a test."""

    def __init__(self, counters: set[str], aliases: Mapping[str, ast.expr]) -> None:
        self._counters, self._aliases = counters, aliases
        self.atoms: dict[str, ast.expr] = {}
        self._depth = 0

    def visit(self, node: ast.AST) -> Any:
        """The node, or what stands for it."""
        if isinstance(node, ast.NamedExpr):
            return self.visit(node.value)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            text = ast.unparse(node)
            item = getattr(node, "attr", None) or getattr(getattr(node, "slice", 0), "value", 0)
            if text in self._counters or item in COUNTERS or _CLOCK.fullmatch(text):
                known = {ast.unparse(atom): name for name, atom in self.atoms.items()}
                name = known.get(text, f"__{len(self.atoms)}")
                self.atoms[name] = node
                return ast.copy_location(ast.Name(name, ast.Load()), node)
        if isinstance(node, ast.Name) and node.id in self._aliases and self._depth < 3:
            self._depth += 1
            try:
                return self.visit(copy.deepcopy(self._aliases[node.id]))
            finally:
                self._depth -= 1
        return self.generic_visit(node)


def _is_counter(node: ast.expr, counters: set[str]) -> bool:
    """True for a counter, and for sums and products of one."""
    if ast.unparse(node) in counters or last_name(node) in COUNTERS:
        return True
    parts = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(_is_counter(one, counters) for one in parts)


def _is_number(node: ast.expr) -> bool:
    """True for a whole number that is added, as of samples: `len(batch) * ranks`."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    name = last_name(node.func if isinstance(node, ast.Call) else node)
    return _NUMBER.fullmatch(name) is not None


def _added_by(added: ast.AST) -> Any:
    """The number that is added, as far as it is known; negative for a counter that falls."""
    value = getattr(added, "value", None)
    number = None if value is None else value_of(value, {})
    number = number if isinstance(number, int | float) else 1
    return -number if isinstance(getattr(added, "op", None), ast.Sub) else number


def _compiled(test: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(test)), "<test>", "eval")


def _evaluable(node: ast.expr) -> ast.expr | None:
    """A test without the parts that can't be evaluated; None if nothing is left."""
    if isinstance(node, ast.BoolOp):
        parts = [part for one in node.values if (part := _evaluable(one)) is not None]
        return ast.BoolOp(node.op, parts) if len(parts) > 1 else parts[0] if parts else None
    return node if is_safe(node) else None


def _statement(node: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(node), node)


def is_safe(node: ast.expr, calls: Sequence[str] = PURE_CALLS) -> bool:
    """True for an expression that may be evaluated: it changes nothing."""
    return all(
        isinstance(one, (*_SAFE, ast.Slice, ast.IfExp))
        and (not isinstance(one, ast.Call) or _only_computes(one.func, calls))
        for one in ast.walk(node)
    )


def _only_computes(function: ast.expr, calls: Sequence[str]) -> bool:
    name = last_name(function)
    return name in calls and (name != "log" or ast.unparse(function) in _LOGARITHMS)


def _joins(node: Any) -> bool:
    """True if a tensor takes others in, as `bank = torch.cat([bank, new])`."""
    called = last_name(getattr(getattr(node, "value", node), "func", node))
    is_join = isinstance(node, ast.Assign) and called in ("cat", "concat", "hstack", "vstack")
    return is_join and not written(node.value).isdisjoint(map(ast.unparse, node.targets))


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _is_of_host(value: ast.expr) -> bool:
    """True for a value that is read from the device, and for a number."""
    calls = (last_name(one.func) for one in ast.walk(value) if isinstance(one, ast.Call))
    return isinstance(value, ast.Constant) or not _TO_HOST.isdisjoint(calls)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


ON_DEVICE = object()
"""Stands for a tensor, which would be kept alive."""


def is_on_device(value: Any) -> bool:
    """True for a tensor on the device, and for what stands for one."""
    torch = sys.modules["torch"]
    return value is ON_DEVICE or (
        isinstance(value, torch.Tensor) and value.is_cuda and value.numel() > 1
    )


def is_state(part: ast.expr, names: Mapping[str, Any]) -> bool:
    """True for a part of a test that is a word, a sign, a number or a call, and no tensor."""
    root = _root(part)
    if is_of_torch(names.get(root)):
        return False
    if isinstance(part, ast.Call) or root not in names:
        return not isinstance(part, ast.Name)
    value = names[root] if isinstance(part, ast.Name) else value_of(part, names)
    return isinstance(value, str | int | float | Enum | None) or isroutine(value)


def value_of(atom: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a counter or of a bound; None if it has none."""
    if not is_safe(atom):
        return None
    needed = {one.id for one in ast.walk(atom) if isinstance(one, ast.Name)}
    found = {name: names[name] for name in needed if name in names}
    if any(map(is_of_torch, found.values())):
        return None
    try:
        code = compile(ast.Expression(atom), "<counter>", "eval")
        return eval(code, {"__builtins__": BUILTINS}, found)  # noqa: S307
    except Exception:  # noqa: BLE001 - the program's own names
        return None


def iterated(node: ast.expr, names: Mapping[str, Any]) -> range | None:
    """The numbers over which a loop goes; those of the batches for a loop over a loader."""
    if isinstance(node, ast.Call):
        name, given = last_name(node.func), [value_of(one, names) for one in node.args]
        if name in ("range", "trange"):
            known = [one for one in given if isinstance(one, int)]
            return range(*known) if len(known) == len(given) > 0 else None
        if name == "enumerate" and node.args:
            found = iterated(node.args[0], names)
            start = [*given[1:], *(value_of(one.value, names) for one in node.keywords), 0][0]
            return range(start, start + len(found)) if found and isinstance(start, int) else None
        return iterated(node.args[0], names) if name == "tqdm" and node.args else None
    value = value_of(node, names)
    try:
        return range(len(value))
    except Exception:  # noqa: BLE001 - the program's own length
        return None


def counter_target(loop: ast.For | ast.AsyncFor) -> str | None:
    """The name that counts the iterations of a loop; None if none does."""
    call = loop.iter
    while isinstance(call, ast.Call) and last_name(call.func) == "tqdm" and call.args:
        call = call.args[0]
    if not (isinstance(call, ast.Call) and last_name(call.func) in _COUNTING):
        return None
    target = loop.target
    if isinstance(target, ast.Tuple) and last_name(call.func) == "enumerate":
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def is_of_torch(value: Any) -> bool:
    """True for values whose attributes and items may run operators."""
    torch = sys.modules["torch"]
    return isinstance(value, torch.Tensor | torch.nn.Module)
