"""The literals of a Python file, with the names beside and around each.

`CONFIG = {"batch": 4}` has the value `CONFIG.batch`, `LoraConfig(r=8)` has `LoraConfig.r`, classes
and defaults of functions have `Name.attribute`. The file is parsed, never run.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tuner.core.errors import InputError
from tuner.core.expressions import syntax
from tuner.program.edit.place import NO_VALUE, Location, Value, in_words
from tuner.space.apply import Path

_PLAIN = re.compile(r"""[rRuU]?(?:"([^"\\\n]*)"|'([^'\\\n]*)')""")
_STRING = re.compile(r"""[rRuU]?("([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*')""")


@dataclass(frozen=True, slots=True)
class _Around:
    """The surroundings of a node: `scope` is the function or class that it stands in.

    `names` are beside and around it, the nearest first; `paths` lead to its value.
    """

    scope: Path = ()
    names: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()

    def inside(self) -> _Around:
        """For a part of the value: the names stay."""
        return replace(self, paths=())

    def under(self, key: str | int | None) -> _Around:
        """For the value of a key; None is a key that is computed."""
        paths = () if key is None else tuple((*path, key) for path in self.paths)
        names = (key, *self.names) if isinstance(key, str) else self.names
        return replace(self, names=names, paths=paths)


def read_python(text: str, file: str, where: Callable[[int], str] | None = None) -> list[Location]:
    """All literals of the module `text` and all values with a name, in the order of its lines.

    A value with two names occurs twice. Raises `InputError` with the line of broken Python, which
    `where` names (None: "train.py:12").
    """
    source = text.removeprefix("\ufeff")
    try:
        _require_utf8(source)
        reader = _Walk(text)
    except SyntaxError as error:
        at = file
        if error.lineno:
            at = where(error.lineno) if where else f"{file}:{error.lineno}"
        hint = "correct it: it would not start"
        raise InputError(f"{at}: broken Python: {error.msg}", hint=hint) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: broken Python: {error}") from None
    try:
        places = list(reader.walk(reader.tree, _Around()))
    except RecursionError:
        raise InputError(f"{file}: nested too deeply") from None
    return sorted(places, key=lambda place: (place.start, place.end))


def _require_utf8(source: str) -> None:
    """Raise SyntaxError where the file says that its bytes are other text than UTF-8 makes them."""
    data = source.encode()
    encoding, lines = tokenize.detect_encoding(io.BytesIO(data).readline)
    with contextlib.suppress(LookupError):  # rot13 is no encoding of text
        if data.decode(encoding, errors="replace") == source:
            return
    raise SyntaxError(f"it says that it is {encoding}", (None, len(lines) or 1, None, None))


class PythonText:
    """A text that is Python, and the characters at which its nodes stand."""

    def __init__(self, text: str) -> None:
        self.text = text
        source = text.removeprefix("\ufeff")
        self.tree: ast.Module = syntax(source)
        # The parser ends lines at these three, and at nothing else.
        breaks = [match.end() for match in re.finditer(r"\r\n|\r|\n", text)]
        self._line_starts = [len(text) - len(source), *breaks]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The characters from `start` to `end` that a node is written in."""
        start = self._index(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._index(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _index(self, line: int, column: int) -> int:
        """The character of byte `column` of a line."""
        start = self._line_starts[line - 1]
        head = self.text[start : start + column].encode()[:column]
        return start + len(head.decode())


class _Walk(PythonText):
    def walk(  # noqa: PLR0912 - one for each kind of node
        self, node: ast.AST, at: _Around
    ) -> Iterator[Location]:
        """The values in `node`, a value at each of `at.paths`."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope = (*at.scope, node.name)
                within = _Around(scope, tuple(map(str, reversed(scope))), (scope,))
                if not isinstance(node, ast.ClassDef):
                    for argument, default in _defaults_in(node.args):
                        yield from self.walk(default, within.under(argument.arg))
                for part in (*node.decorator_list, *node.body):
                    yield from self.walk(part, within.inside())
            case ast.Assign():
                yield from self._assigned(node.targets, node.value, at)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                yield from self._assigned([node.target], node.value, at)
            case ast.AugAssign():  # one more value of that name
                yield from self._assigned([node.target], node.value, at, NO_VALUE)
            case ast.Expr(value=ast.Constant()) | ast.arguments():
                return  # a docstring
            case ast.Dict():
                yield from (self._place(node, at, path, NO_VALUE) for path in at.paths)
                for key, value in zip(node.keys, node.values, strict=True):
                    name = key.value if isinstance(key, ast.Constant) else None
                    name = name if isinstance(name, str | int) else None
                    yield from self.walk(value, at.under(name))
            case ast.List() | ast.Tuple():
                yield from (self._list(node, at, path) for path in at.paths)
                for index, one in enumerate(node.elts):
                    yield from self.walk(one, at.under(index))
            case ast.Call():
                yield from self._computed(node, at)
                yield from self._call(node, at)
            case ast.expr() if is_literal(node):
                yield from (self._literal(node, at, path) for path in at.paths or [()])
                yield from self._words(node, at)
            case ast.JoinedStr():
                yield from self._computed(node, at)
            case ast.expr():
                yield from self._computed(node, at)
                parts = [node.value] if isinstance(node, ast.Subscript) else _children(node)
                for part in parts:
                    yield from self.walk(part, at.inside())
            case _:
                for part in _children(node):
                    yield from self.walk(part, at.inside())

    def _assigned(
        self, targets: list[ast.expr], value: ast.expr, at: _Around, problem: str | None = None
    ) -> Iterator[Location]:
        target, many = targets[0], (ast.Tuple, ast.List)
        if len(targets) == 1 and isinstance(target, many):
            values = value.elts if isinstance(value, many) else []
            if len(values) == len(target.elts):
                for name, part in zip(target.elts, values, strict=True):
                    yield from self._assigned([name], part, at)
                return
            targets = target.elts
        paths = tuple(path for one in targets if (path := _path_of(one, at.scope)))
        if problem is not None:
            yield from (self._place(value, at, path, problem) for path in paths)
            paths = ()
        names = tuple(name for one in targets[:1] for name in _names(one))
        yield from self.walk(value, _Around(at.scope, (*names, *at.names), paths))

    def _call(self, node: ast.Call, at: _Around) -> Iterator[Location]:
        """The arguments; texts beside them name them too: `add_argument("--batch", default=4)`."""
        called = last_name(node.func)
        outer = (*([called] if called else []), *at.names)
        own = (*at.scope, called) if called else None
        bases = [*at.paths, *([own] if own and own not in at.paths else [])]
        if isinstance(node.func, ast.Attribute) and called == "update":
            updated = _path_of(node.func.value, at.scope)
            bases = [updated] if updated else []
        texts = [
            (part, part.value)
            for part in node.args
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        option = None
        if called == "add_argument" and texts:
            word = max((text for _, text in texts), key=lambda text: text.startswith("--"))
            option = word.lstrip("-").replace("-", "_")
        for argument in node.args:
            near = tuple(text for part, text in texts if part is not argument)
            paths = tuple(bases) if called == "update" else ()
            yield from self.walk(argument, _Around(at.scope, (*near, *outer), paths))
        said = tuple(text for _, text in texts)
        for keyword in node.keywords:
            name = keyword.arg
            paths = tuple((*base, name) for base in bases) if name else ()
            if option is not None:
                paths = ((*at.scope, option),) if name == "default" else ()
            elif called == "field" and name == "default":
                paths = at.paths  # of a dataclass: the value of the attribute
            # A keyword of an option (default=4) says less than the option's name.
            names = (*said, *([name] if name else []), *outer)
            yield from self.walk(keyword.value, _Around(at.scope, names, paths))
        yield from self.walk(node.func, at.inside())

    def _computed(self, node: ast.expr, at: _Around) -> Iterator[Location]:
        for path in at.paths:
            yield replace(self._place(node, at, path, "is computed"), kind="computed")

    def _literal(self, node: ast.expr, at: _Around, path: Path) -> Location:
        raw = self.text[slice(*self.span(node))]
        value = ast.literal_eval(node)
        is_plain = isinstance(value, bool | int | float | None) or (
            isinstance(value, str) and _STRING.fullmatch(raw)
        )
        place = self._place(node, at, path, None if is_plain else NO_VALUE)
        return replace(place, value=value if is_plain else None)

    def _words(self, node: ast.expr, at: _Around) -> Iterator[Location]:
        """The words of a plain text of several: `shlex.split("--batch 4")`."""
        inside = _PLAIN.fullmatch(self.text, *self.span(node))
        words = list(in_words(self.text, *inside.span(inside.lastindex))) if inside else []  # type: ignore[arg-type]
        for word in words if len(words) > 1 else []:
            yield replace(word, path=(), names=(*word.names, *at.names))

    def _list(self, node: ast.List | ast.Tuple, at: _Around, path: Path) -> Location:
        place = self._place(node, at, path, None)
        items = tuple(i.value for i in node.elts if isinstance(i, ast.Constant))
        is_plain = len(items) == len(node.elts) and all(isinstance(i, str) for i in items)
        can_be = place.raw[:1] in ("[", "(") and not re.search(r"[\r\n]", place.raw)
        can_be &= isinstance(node, ast.List) or len(items) > 1
        quote = "'" if "'" in place.raw and '"' not in place.raw else '"'
        problem = None if is_plain and can_be else NO_VALUE
        value: Value = items if is_plain else None  # type: ignore[assignment]
        return replace(place, kind="list", value=value, problem=problem, quote=quote)

    def _place(self, node: ast.expr, at: _Around, path: Path, problem: str | None) -> Location:
        start, end = self.span(node)
        raw = self.text[start:end]
        return Location(
            path, bisect.bisect_right(self._line_starts, start), start, end, raw, "python",
            quote="'" if raw.endswith("'") else '"', problem=problem, names=at.names,
        )  # fmt: skip


def _children(node: ast.AST) -> list[ast.AST]:
    return list(ast.iter_child_nodes(node))


def _defaults_in(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(
        [*positional, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True
    ):
        if default is not None:
            yield argument, default


def last_name(node: ast.expr) -> str | None:
    """`DataLoader` of `torch.utils.data.DataLoader`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _path_of(node: ast.expr, scope: Path) -> Path | None:
    """The path of what is assigned to; None where it has no fixed name."""
    if isinstance(node, ast.Name):
        return (*scope, node.id)
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return None
    key = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
    base = _path_of(node.value, scope)
    return (*base, key) if base and isinstance(key, str | int) else None


def _names(target: ast.AST) -> tuple[str, ...]:
    """The names that are assigned to, the nearest first: ("batch", "args") of `args.batch`."""
    if isinstance(target, ast.Attribute):
        return (target.attr, *_names(target.value))
    if isinstance(target, ast.Subscript):
        key = getattr(target.slice, "value", None)
        return (*([key] if isinstance(key, str) else []), *_names(target.value))
    return (target.id,) if isinstance(target, ast.Name) else ()


def is_literal(node: ast.AST) -> bool:
    """True for a constant, or a number with a sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        node = node.operand
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return isinstance(node, ast.Constant)
