"""Reads the program's own files: its loops, and the branches in them that depend on a counter."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

from tuner.emulator.inside.lines import is_file, package_of

FUTURE = 100_000
"""Values after the last one at which a branch on a counter of unknown length is looked for."""

COUNTERS = re.compile(
    r"""
    completed_steps | current_epoch | current_step | epoch | epoch_num | global_step |
    global_steps | it | iter_num | iteration | iterations | n_iter | num_steps | num_updates
    | opt_step | step | steps | update_step
    """,
    re.VERBOSE,
)
"""Names by which trainers and programs count."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_SAFE = (
    *(ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Subscript),
    *(ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.expr_context, ast.operator, ast.cmpop),
    *(ast.boolop, ast.unaryop, ast.Call),
)
_SAFE_CALLS = ("len", "int", "float", "min", "max", "abs", "bool", "round", "hasattr")
_ADDS = ("append", "extend", "appendleft")
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

    @cached_property
    def kept(self) -> set[str]:
        """The names of values that a branch adds to lists."""
        calls = (one for one in ast.walk(self.node) if isinstance(one, ast.Call))
        adds = (one for one in calls if last_name(one.func) in _ADDS)
        return {_root(given) for one in adds for given in one.args}

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
                    target = counter_target(one)
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
            if isinstance(one, ast.For | ast.AsyncFor) and counter_target(one) == last_name(atom):
                values = iterated(one.iter, names)
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
            last_name(one)
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

    def has_any(self, loop: Any, places: set[Place]) -> bool:
        """True if any of these places is in the loop."""
        return self._has_run(loop.body, places)

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
        if isinstance(statement, ast.If) and value_of(statement.test, names) is False:
            parts = statement.orelse
            return next(filter(None, (self.allocates_at(s, names, seen) for s in parts)), None)
        for one in ast.walk(statement):
            if isinstance(one, ast.Call) and not self._is_harmless(one, names, seen):
                return one.lineno
            if isinstance(one, ast.Assign) and _sets_size(one):
                return one.lineno
        return None

    def _is_harmless(self, call: ast.Call, names: Mapping[str, Any], seen: set[ast.AST]) -> bool:
        name, root = last_name(call.func), _root(call.func)
        if name in _ADDS:
            return not any(is_on_device(names.get(_root(one))) for one in call.args)
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
        and (not isinstance(one, ast.Call) or last_name(one.func) in _SAFE_CALLS)
        for one in ast.walk(node)
    )


def last_name(node: ast.AST) -> str:
    """The last part of a name with dots: "step" of `optimizer.step`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _sets_size(node: ast.Assign) -> bool:
    """True for a number that may be a size, and for parameters that begin to be trained."""
    if any(last_name(target) == "requires_grad" for target in node.targets):
        return True
    return isinstance(node.value, ast.Constant) and _is_size(node.value.value)


ON_DEVICE = object()
"""Stands for a tensor, which would be kept alive."""


def is_on_device(value: Any) -> bool:
    """True for a tensor on the device, and for what stands for one."""
    torch = sys.modules["torch"]
    return value is ON_DEVICE or (
        isinstance(value, torch.Tensor) and value.is_cuda and value.numel() > 1
    )


def value_of(atom: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a counter or of a bound; None if it has none."""
    if not _is_safe(atom):
        return None
    needed = {one.id for one in ast.walk(atom) if isinstance(one, ast.Name)}
    found = {name: names[name] for name in needed if name in names}
    if any(map(is_of_torch, found.values())):
        return None
    try:
        code = compile(ast.Expression(atom), "<counter>", "eval")
        return eval(code, {"__builtins__": _BUILTINS}, found)  # noqa: S307
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
            is_known = found is not None and isinstance(start, int)
            return range(start, start + len(found)) if found is not None and is_known else None
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
