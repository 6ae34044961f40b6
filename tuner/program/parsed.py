"""A Python file or notebook as it is parsed: its scopes, its calls, and where each node stands."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.program.edit.place import Location
from tuner.program.edit.python_file import ANY, Key, Keys, PythonText, last_name, unrolled
from tuner.program.edit.source import SourceFile

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Option:
    """One `add_argument` of argparse, or one `option` of click."""

    names: tuple[str, ...]
    dest: str
    action: str
    call: ast.Call
    default: ast.expr | None

    @property
    def is_positional(self) -> bool:
        """True if it has no name on the command line."""
        return not self.names[0].startswith("-")


@dataclass(slots=True)
class Scope:
    """The meaning of names in a module, a class or a function."""

    node: ast.AST
    parent: Scope | None
    names: dict[str, list[ast.AST]] = field(default_factory=dict)
    is_global: set[str] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        """True for the body of a class."""
        return isinstance(self.node, ast.ClassDef)

    def find(self, name: str) -> tuple[Scope, list[ast.AST]] | None:
        """The bindings that `name` has here."""
        scope: Scope | None = self
        while scope is not None:
            hidden = scope.is_class and scope is not self
            if not hidden and name in scope.names:
                return scope, scope.names[name]
            scope = scope.parent
        return None


class ParsedScript:
    """The syntax tree of a script, with what each name is bound to in its scope."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self._code = source.python
        self._starts = self._code.starts
        self._python = PythonText(self._code.text)
        self.tree = self._python.tree
        self.scopes: dict[ast.AST, Scope] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.options: list[Option] = []
        self.assigned: list[tuple[str, Scope, Keys, ast.AST]] = []
        self.bodies: dict[ast.AST, Scope] = {}
        self.top = Scope(self.tree, None)
        self._walk(self.tree, self.top)
        self._by_span: dict[tuple[int, int], list[ast.expr]] = {}
        for node in self.scopes:
            if isinstance(node, ast.expr):
                self._by_span.setdefault(self.span(node), []).append(node)
        self._places = {(p.start, p.end): p for p in source.places}

    # -- places ------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The characters of the file where `node` stands."""
        start, end = self._python.span(node)
        return self._starts[start], self._starts[end]

    def node_at(self, place: Location) -> ast.expr | None:
        """The expression at a place."""
        return next(iter(self._by_span.get((place.start, place.end), ())), None)

    def place_of(self, node: ast.AST) -> Location:
        """The place of an expression, also of one that the readers of files leave out."""
        start, end = self.span(node)
        found = self._places.get((start, end))
        if found is not None:
            return found
        text = self.source.data.decode("utf-8")
        raw = text[start:end]
        cell, line = self._code.place(self._python.line_of(self._python.span(node)[0]))
        value = node.value if isinstance(node, ast.Constant) else None
        # A number that is passed without a name; text may be written in many ways.
        known = isinstance(value, int | float) and repr(value) == raw
        return Location(
            path=(),
            line=line,
            start=start,
            end=end,
            raw=raw,
            language="python",
            value=value if known and isinstance(value, int | float) else None,
            problem=None if known else "is no plain value",
            in_json=cell > 0,
            cell=cell,
        )

    def shown(self, node: ast.AST) -> str:
        """An expression as it is written, on one line."""
        return " ".join(ast.unparse(node).split())[:60]

    # -- reading -----------------------------------------------------------------------------

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = scope
        inner = scope
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            inner = self.bodies[node] = Scope(node, scope)
            if isinstance(node, Function | ast.Lambda):
                for argument in arguments_of(node.args):
                    inner.names.setdefault(argument.arg, []).append(argument)
            if not isinstance(node, ast.Lambda):
                scope.names.setdefault(node.name, []).append(node)
        self._bind(node, scope)
        if isinstance(node, ast.Call):
            self.calls.append(node)
            self._update(node, scope)
            if (option := _option(node)) is not None:
                self.options.append(option)
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            self._walk(child, inner)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._target(node.target, node.value, scope)
        elif isinstance(node, ast.NamedExpr):
            self._target(node.target, node.value, scope)
        elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
            self._target(node.target, node, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, node.context_expr, scope, opaque=True)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                scope.names.setdefault(name, []).append(node)
        elif isinstance(node, ast.Global):
            scope.is_global.update(node.names)

    def _update(self, call: ast.Call, scope: Scope) -> None:
        """Note what `CONFIG.update(batch=4)` and `setattr(config, "batch", 4)` assign."""
        if last_name(call.func) == "setattr" and len(call.args) == 3:
            owner, key, value = call.args
            given: list[tuple[Key, ast.expr]] = [(getattr(key, "value", ANY), value)]
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            owner = call.func.value
            given = [(keyword.arg, keyword.value) for keyword in call.keywords]
            for argument in call.args:
                if isinstance(argument, ast.Dict):
                    pairs = zip(argument.keys, argument.values, strict=True)
                    given += [(getattr(key, "value", ANY), value) for key, value in pairs]
                else:
                    given.append((ANY, call))
        else:
            return
        base, keys = unrolled(owner)
        if isinstance(base, ast.Name):
            self.assigned += [(base.id, scope, (*keys, key), value) for key, value in given]

    def _target(self, target: ast.expr, value: ast.AST, scope: Scope, opaque: bool = False) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values: Sequence[ast.AST] = [target] * len(target.elts)
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            if same and not any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts)):  # type: ignore[attr-defined]
                values = value.elts  # type: ignore[attr-defined]
            for one, its in zip(target.elts, values, strict=True):
                self._target(one, its, scope)
        elif isinstance(target, ast.Starred):
            self._target(target.value, target, scope)
        elif isinstance(target, ast.Name):
            home = scope
            if target.id in scope.is_global:
                while home.parent is not None:
                    home = home.parent
            home.names.setdefault(target.id, []).append(target if opaque else value)
        else:
            base, keys = unrolled(target)
            if isinstance(base, ast.Name):
                self.assigned.append((base.id, scope, keys, value))

    # -- surroundings ------------------------------------------------------------------------

    def keyword_of(self, node: ast.AST) -> ast.Call | None:
        """The call that gets this expression by name."""
        keyword = self.parents.get(node)
        call = self.parents.get(keyword) if isinstance(keyword, ast.keyword) else None
        return call if isinstance(call, ast.Call) else None

    def is_conditional(self, node: ast.AST) -> bool:
        """True if an expression stands below an `if` or the like, and may never run."""
        return self.conditions(node) != []

    def conditions(self, node: ast.AST) -> list[tuple[ast.expr, bool]] | None:
        """The tests that `node` runs under, each with the outcome it needs; None if unknown."""
        found: list[tuple[ast.expr, bool]] = []
        below, own = node, self.parents.get(node)
        while own is not None:
            if isinstance(own, ast.ExceptHandler | ast.Match):
                return None
            main = isinstance(own, ast.If) and "__main__" in ast.unparse(own.test)
            if isinstance(own, ast.If | ast.IfExp) and not main and below is not own.test:
                body = own.body if isinstance(own.body, list) else [own.body]
                found.append((own.test, below in body))
            below, own = own, self.parents.get(own)
        return found

    def is_parsed(self, node: ast.Name) -> bool:
        """True for a name that an argument parser's answer is assigned to."""
        found = self.scopes[node].find(node.id) if node in self.scopes else None
        bindings = found[1] if found is not None else ()
        for binding in bindings:
            made = binding if isinstance(binding, ast.Call) else None
            own = self.parents.get(binding)
            if made is None and isinstance(own, ast.Assign) and isinstance(own.value, ast.Call):
                made = own.value
            if made is not None and (last_name(made.func) or "").startswith("parse_"):
                return True
        return False

    def around(self, node: ast.AST) -> list[str]:
        """The names of the functions, classes and variables around an expression."""
        names = []
        current = self.parents.get(node)
        while current is not None:
            if isinstance(current, Function | ast.ClassDef):
                names.append(current.name)
            elif isinstance(current, ast.Assign):
                names += [self.shown(target) for target in current.targets]
            elif isinstance(current, ast.AnnAssign):
                names.append(self.shown(current.target))
            elif isinstance(current, ast.Dict):
                for key, value in zip(current.keys, current.values, strict=True):
                    if isinstance(key, ast.Constant) and value in (node, *self._above(node)):
                        names.append(str(key.value))
            current = self.parents.get(current)
        return names

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        current = self.parents.get(node)
        while current is not None:
            yield current
            current = self.parents.get(current)


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters of a function, `*args` and `**kwargs` last."""
    own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return own + [a for a in (arguments.vararg, arguments.kwarg) if a is not None]


def _option(call: ast.Call) -> Option | None:
    if last_name(call.func) not in ("add_argument", "option"):
        return None  # of argparse and click
    names = [a.value for a in call.args if isinstance(a, ast.Constant)]
    texts = [name for name in names if isinstance(name, str) and name]
    if not texts:
        return None
    keywords = {k.arg: k.value for k in call.keywords if k.arg is not None}
    dest = getattr(keywords.get("dest"), "value", None)
    if last_name(call.func) == "option":
        dest = next((name for name in texts if not name.startswith("-")), None)
        texts = [name for name in texts if name.startswith("-")] or texts
    long = next((name for name in texts if name.startswith("--")), texts[0])
    action = keywords.get("action")
    kind = str(action.value) if isinstance(action, ast.Constant) else ""
    if "is_flag" in keywords or (long.startswith("--") and "/" in long):
        default = getattr(keywords.get("default"), "value", False)
        kind = "store_true" if not default and "/" not in long else "a flag of click"
    if action is not None and not kind:
        kind = last_name(action) or "?"
    return Option(
        tuple(texts),
        dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_"),
        kind,
        call,
        keywords.get("default"),
    )


_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def holds_for_words(test: ast.expr, words: int | None) -> bool | None:
    """The truth of `len(sys.argv) > 1` for a number of words; None for other tests."""
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Name("len"), args=[ast.Name() | ast.Attribute() as counted]),
            ops=[comparison],
            comparators=[ast.Constant(int(number))],
        ) if words is not None and last_name(counted) == "argv":
            compare = _COMPARISONS.get(type(comparison))
            return None if compare is None else compare(words, number)
    return None
