"""The values of a Python file: literals that are assigned, passed by name, or put in a dictionary.

`CONFIG = {"batch": 4}` has the value `CONFIG.batch`, `LoraConfig(r=8)` has `LoraConfig.r`, classes
and defaults of functions have `Name.attribute`. The file is parsed, never run.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import io
import math
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tuner.core.errors import InputError
from tuner.core.expressions import syntax
from tuner.program.edit.place import Location, Value, read_number
from tuner.space.apply import Path

_STRING = re.compile(r"""[rRuU]?("([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*')""")
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def read_python(text: str, file: str, where: Callable[[int], str] | None = None) -> list[Location]:
    """All values of the module `text`, in the order of its lines.

    A literal with two names occurs twice. Raises `InputError` with the line of broken Python, which
    `where` names (None: "train.py:12").
    """
    source = text.removeprefix("\ufeff")
    try:
        _require_utf8(source)
        reader = _Reader(text)
    except SyntaxError as error:
        at = file
        if error.lineno:
            at = where(error.lineno) if where else f"{file}:{error.lineno}"
        raise InputError(f"{at}: broken Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: broken Python: {error}") from None
    try:
        places = list(reader.statements(reader.tree.body, ()))
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

    def line_of(self, index: int) -> int:
        """The number of the line that character `index` stands in."""
        return bisect.bisect_right(self._line_starts, index)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The characters from `start` to `end` that a node is written in."""
        start = self._index(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._index(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _index(self, line: int, column: int) -> int:
        """The character of byte `column` of a line."""
        start = self._line_starts[line - 1]
        head = self.text[start : start + column].encode()[:column]
        return start + len(head.decode())


class _Reader(PythonText):
    def statements(self, body: Sequence[ast.AST], prefix: Path) -> Iterator[Location]:
        for statement in body:
            yield from self._statement(statement, prefix)

    def _statement(self, node: ast.AST, prefix: Path) -> Iterator[Location]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*prefix, node.name)
            if not isinstance(node, ast.ClassDef):
                for argument, default in defaults_in(node.args):
                    yield from self._value(default, [(*inner, argument.arg)], inner)
            yield from self.statements(node.body, inner)
        elif isinstance(node, ast.Assign):
            yield from self._assign(node, prefix)
        elif isinstance(node, ast.AnnAssign):
            path = _path_of(node.target, prefix)
            if node.value is not None:
                yield from self._value(node.value, [path] if path else [], prefix)
        elif isinstance(node, ast.AugAssign):
            path = _path_of(node.target, prefix)
            if path:
                yield self._place(node.value, path, problem="is changed by an assignment (+= ...)")
            yield from self._value(node.value, [], prefix)
        else:
            for name, part in ast.iter_fields(node):
                if name in _BODIES and isinstance(part, list):
                    yield from self.statements(part, prefix)
                else:
                    yield from self._calls(part, prefix)

    def _assign(self, node: ast.Assign, prefix: Path) -> Iterator[Location]:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Tuple | ast.List):
            values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else []
            if len(values) == len(target.elts):
                for name, value in zip(target.elts, values, strict=True):
                    path = _path_of(name, prefix)
                    yield from self._value(value, [path] if path else [], prefix)
                return
            for name in target.elts:
                if path := _path_of(name, prefix):
                    yield self._computed(node.value, path)
            return
        paths = [path for t in node.targets if (path := _path_of(t, prefix))]
        if len(paths) > 1:
            for path in paths:
                yield self._place(node.value, path, problem="is assigned together with other names")
            return
        yield from self._value(node.value, paths, prefix)

    def _value(self, node: ast.expr, paths: list[Path], prefix: Path) -> Iterator[Location]:
        """The value `node` under each of `paths`, and what stands inside it."""
        if isinstance(node, ast.Dict):
            yield from (self._place(node, p, problem="is a dictionary") for p in paths)
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and isinstance(key.value, str | int)
                below = [(*p, key.value) for p in paths] if named else []  # type: ignore[union-attr]
                yield from self._value(value, below, prefix)
        elif isinstance(node, ast.Call):
            yield from self._call(node, paths, prefix)
        elif isinstance(node, ast.List | ast.Tuple):
            yield from (self._list(node, p) for p in paths)
            for index, item in enumerate(node.elts):
                yield from self._value(item, [(*p, index) for p in paths], prefix)
        elif is_literal(node):
            yield from (self._literal(node, p) for p in paths)
        else:
            yield from (self._computed(node, p) for p in paths)
            yield from self._calls(list(ast.iter_child_nodes(node)), prefix)

    def _call(self, node: ast.Call, paths: list[Path], prefix: Path) -> Iterator[Location]:
        yield from (self._computed(node, p) for p in paths)
        name = last_name(node.func)
        own = (*prefix, name) if name else None
        updated = _path_of(node.func.value, prefix) if _is_update(node) else None  # type: ignore[attr-defined]
        option = _option(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                yield from self._value(keyword.value, [], prefix)
                continue
            if option is not None:
                below = [(*prefix, option)] if keyword.arg == "default" else []
            elif name == "field" and keyword.arg == "default":
                below = paths  # of a dataclass: the value of the attribute
            elif updated is not None:
                below = [(*updated, keyword.arg)]
            else:
                bases = [*paths, *([own] if own and own not in paths else [])]
                below = [(*base, keyword.arg) for base in bases]
            yield from self._value(keyword.value, below, prefix)
        for argument in node.args:
            yield from self._value(argument, [updated] if updated else [], prefix)
        yield from self._calls(node.func, prefix)

    def _calls(self, part: Any, prefix: Path) -> Iterator[Location]:
        """The values passed by name in the calls inside `part`, a field of a node."""
        for node in part if isinstance(part, list) else [part]:
            if isinstance(node, ast.expr):
                yield from self._value(node, [], prefix)
            elif isinstance(node, ast.AST):
                yield from self._calls(list(ast.iter_child_nodes(node)), prefix)

    def _computed(self, node: ast.expr, path: Path) -> Location:
        raw = " ".join(self.text[slice(*self.span(node))].split())
        problem = f"is computed, {raw[:60]}: map the key that it takes its value from"
        return self._place(node, path, problem=problem, is_reference=True)

    def _literal(self, node: ast.expr, path: Path) -> Location:
        raw = self.text[slice(*self.span(node))]
        value, problem = _literal_value(node, raw)
        quote = "'" if raw.endswith("'") else '"'
        return self._place(node, path, value=value, problem=problem, quote=quote)

    def _list(self, node: ast.List | ast.Tuple, path: Path) -> Location:
        raw = self.text[slice(*self.span(node))]
        items = [i.value for i in node.elts if isinstance(i, ast.Constant)]
        names = tuple(item for item in items if isinstance(item, str))
        if len(names) != len(node.elts):
            return self._place(node, path, problem="is not a list of words")
        on_one_line = raw[:1] in ("[", "(") and "\n" not in raw and "\r" not in raw
        problem = None if on_one_line and len(names) > 1 else "is a list over several lines"
        quote = "'" if "'" in raw and '"' not in raw else '"'
        if isinstance(node, ast.List) and on_one_line:
            problem = None
        return self._place(node, path, value=names, problem=problem, quote=quote)

    def _place(
        self,
        node: ast.expr,
        path: Path,
        *,
        value: Value = None,
        problem: str | None = None,
        quote: str = '"',
        is_reference: bool = False,
    ) -> Location:
        start, end = self.span(node)
        is_list = isinstance(node, ast.List | ast.Tuple)
        return Location(
            path=path,
            line=self.line_of(start),
            start=start,
            end=end,
            raw=self.text[start:end],
            language="python",
            value=value,
            quote=quote,
            problem=problem,
            kind="reference" if is_reference else "list" if is_list else "value",
        )


def defaults_in(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """The parameters of a function that have a default, with that."""
    positional = [*arguments.posonlyargs, *arguments.args]
    count = len(arguments.defaults)
    yield from zip(positional[len(positional) - count :], arguments.defaults, strict=True)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield argument, default


def _is_update(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "update"


def _option(node: ast.Call) -> str | None:
    if last_name(node.func) != "add_argument":
        return None
    texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    named = sorted(texts, key=lambda text: not text.startswith("--"))
    return named[0].lstrip("-").replace("-", "_") if named else None


ANY = None
"""In place of a key that is chosen while the program runs."""

Key = str | int | None
Keys = tuple[Key, ...]


def unrolled(node: ast.expr) -> tuple[ast.expr, Keys]:
    """The first name of `a.b["c"]`, and ("b", "c")."""
    keys: list[Key] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            keys.append(node.attr)
        else:
            value = getattr(node.slice, "value", None)
            keys.append(value if isinstance(value, str | int) else ANY)
        node = node.value
    return node, tuple(reversed(keys))


def last_name(node: ast.expr) -> str | None:
    """`DataLoader` of `torch.utils.data.DataLoader`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _path_of(node: ast.expr, prefix: Path) -> Path | None:
    """The path of what is assigned to; None where it has no fixed name."""
    base, keys = unrolled(node)
    known = tuple(key for key in keys if key is not ANY)
    is_fixed = isinstance(base, ast.Name) and len(known) == len(keys)
    return (*prefix, base.id, *known) if is_fixed else None  # type: ignore[attr-defined]


def is_literal(node: ast.AST) -> bool:
    """True for a constant, or a number with a sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        node = node.operand
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return isinstance(node, ast.Constant)


def _literal_value(node: ast.expr, raw: str) -> tuple[Value, str | None]:
    value = ast.literal_eval(node)
    if value is None or isinstance(value, bool):
        return value, None
    if isinstance(value, str):
        return (value, None) if _STRING.fullmatch(raw) else (None, "is not a plain string")
    if isinstance(value, int | float):
        number = read_number(raw)
        return (math.nan if number is None else number), None
    return None, f"is {raw[:40]}, which is not the value of a parameter"
