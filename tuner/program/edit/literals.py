"""Every literal of a program that may hold a setting, with the names beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal as Either

from tuner.program.edit.place import Location, Value, read_number
from tuner.program.edit.python_file import PythonText, is_literal, last_name
from tuner.program.edit.source import PYTHON, READERS, SourceFile

_TOKEN = re.compile(r"(?<![\w./])--?[A-Za-z][\w-]*|[\w./][\w./+-]*")
_PLAIN = re.compile(r"""[rRuU]?("([^"\\\n]*)"|'([^'\\\n]*)')""")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_OTHER_DATA = frozenset(("eval", "evaluation", "val", "valid", "validation", "dev", "test"))

Item = tuple[Either["keyword", "entry"], int]
"""A keyword or an entry, which can get another beside it, and the character where it begins."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal at `location`; `names` are beside and around it, the nearest first."""

    location: Location
    names: tuple[str, ...] = ()
    item: Item | None = None


def literals_of(source: SourceFile) -> list[Literal]:
    """The literals of a script, a notebook, a settings file, or a text of words (TOML, shell)."""
    suffix = source.path.suffix.lower()
    if suffix in PYTHON:
        return list(_in_python(source))
    if suffix in READERS:
        places = [p for p in source.places if p.problem is None and p.kind != "alias"]
        return [
            Literal(p, tuple(str(s) for s in reversed(p.path) if isinstance(s, str)))
            for p in places
        ]
    return list(in_words(source.data.decode("utf-8")))


def in_words(text: str, start: int = 0, end: int | None = None) -> Iterator[Literal]:
    """The words of a shell script, TOML, a command or a string, each named by the one before."""
    names: tuple[str, ...] = ()
    line = text.count("\n", 0, start) + 1
    at = start
    for found in _TOKEN.finditer(text, start, len(text) if end is None else end):
        line, at = line + text.count("\n", at, found.start()), found.start()
        raw = found[0]
        place = Location(names[:1], line, at, found.end(), raw, "yaml", typed_word(raw))
        yield Literal(place, names)
        names = tuple(reversed(raw.lstrip("-").split(".")))


def typed_word(text: str) -> Value:
    """The value that a bare word stands for."""
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    number = read_number(text)
    return text if number is None else number


def plain(name: str) -> str:
    """`max_length` of `--max-length`."""
    return name.lstrip("-+").replace("-", "_").lower()


def rank(names: Sequence[str], wanted: Sequence[str]) -> int:
    """The distance of a literal with `names` from a setting that is called one of `wanted`."""
    own = [plain(name) for name in names[:4]]
    if own[:1] and own[0] in wanted:
        return 0
    if any(name in wanted for name in own):
        return 1
    words = {word for name in wanted for word in name.split("_") if len(word) > 1} - {"max", "use"}
    near = [{w.lower() for w in _WORDS.findall(name)} for name in names[:4]]
    if any(part & _OTHER_DATA and "train" not in part for part in near[:2]):
        return 4
    return 2 if any(part & words for part in near) else 3


def _in_python(source: SourceFile) -> Iterator[Literal]:
    code = source.python
    reader = _Reader(code.text)
    for found in reader.literals():
        place = found.location
        cell, line = code.place(place.line)
        start, end = code.starts[place.start], code.starts[place.end]
        place = replace(place, cell=cell, line=line, start=start, end=end, in_json=cell > 0)
        item = found.item and (found.item[0], code.starts[found.item[1]])
        yield replace(found, location=place, item=item)


class _Reader(PythonText):
    def literals(self) -> Iterator[Literal]:
        yield from self._walk(self.tree, (), None)

    def _walk(  # noqa: PLR0912 - one for each kind of node
        self, node: ast.AST, names: tuple[str, ...], item: Item | None
    ) -> Iterator[Literal]:
        if isinstance(node, ast.expr) and is_literal(node):
            yield from self._literal(node, names, item)
        elif isinstance(node, ast.Call):
            yield from self._call(node, names)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and isinstance(key.value, str)
                own = (key.value, *names) if named else names  # type: ignore[union-attr]
                begins: Item | None = ("entry", self.span(key)[0]) if named else None  # type: ignore[arg-type]
                yield from self._walk(value, own, begins)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield from self._assigned(node.targets[0], node.value, names)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            if node.value is not None:
                yield from self._walk(node.value, (*_names(node.target), *names), None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._defaults(node.args, (node.name,))
            for part in (*node.decorator_list, *node.body):
                yield from self._walk(part, (node.name,), None)
        elif isinstance(node, ast.Subscript):
            yield from self._walk(node.value, names, None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        elif not isinstance(node, ast.JoinedStr):
            inner = (node.name, *names) if isinstance(node, ast.ClassDef) else names
            for child in ast.iter_child_nodes(node):
                yield from self._walk(child, inner, None)

    def _assigned(
        self, target: ast.expr, value: ast.expr, names: tuple[str, ...]
    ) -> Iterator[Literal]:
        many = (ast.Tuple, ast.List)
        if isinstance(target, many) and isinstance(value, many):
            for one, part in zip(target.elts, value.elts, strict=False):
                yield from self._assigned(one, part, names)
        else:
            yield from self._walk(value, (*_names(target), *names), None)

    def _defaults(self, arguments: ast.arguments, names: tuple[str, ...]) -> Iterator[Literal]:
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(reversed(positional), reversed(arguments.defaults), strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if default is not None:
                yield from self._walk(default, (argument.arg, *names), None)

    def _call(self, node: ast.Call, names: tuple[str, ...]) -> Iterator[Literal]:
        """Texts beside a literal name it: `add_argument("--batch", default=4)`."""
        called = last_name(node.func)
        outer = (*([called] if called else []), *names)
        texts = {a: a.value for a in node.args if isinstance(a, ast.Constant)}
        said = tuple(text for text in texts.values() if isinstance(text, str))
        for argument in node.args:
            near = tuple(text for text in said if text is not texts.get(argument))  # type: ignore[call-overload]
            yield from self._walk(argument, (*near, *outer), None)
        for keyword in node.keywords:
            # A keyword of an option (default=4) says less than the option's name.
            own = (keyword.arg,) if keyword.arg else ()
            inner = (*said, *own) if said else own
            begins: Item | None = ("keyword", self.span(keyword)[0]) if keyword.arg else None
            yield from self._walk(keyword.value, (*inner, *outer), begins)
        yield from self._walk(node.func, names, None)

    def _literal(
        self, node: ast.expr, names: tuple[str, ...], item: Item | None
    ) -> Iterator[Literal]:
        start, end = self.span(node)
        raw = self.text[start:end]
        value = ast.literal_eval(node)
        if not isinstance(value, bool | int | float | str | None):
            return
        quote = "'" if raw.endswith("'") else '"'
        place = Location(
            tuple(reversed(names[:2])), self.line_of(start), start, end, raw, "python", value, quote
        )
        inside = _PLAIN.fullmatch(raw) if isinstance(value, str) else None
        if not isinstance(value, str) or inside:
            yield Literal(place, names, item)
        if inside:
            group = 2 if inside[2] is not None else 3
            words = list(
                in_words(self.text, start + inside.start(group), start + inside.end(group))
            )
            for word in words if len(words) > 1 else []:
                yield replace(word, names=(*word.names, *names))


def _names(target: ast.AST) -> tuple[str, ...]:
    """The names that are assigned to, the nearest first: ("batch", "args") of `args.batch`."""
    if isinstance(target, ast.Attribute):
        return (target.attr, *_names(target.value))
    if isinstance(target, ast.Subscript):
        key = getattr(target.slice, "value", None)
        return (*([key] if isinstance(key, str) else []), *_names(target.value))
    return (target.id,) if isinstance(target, ast.Name) else ()


def call_at(source: SourceFile, line: int, column: int) -> tuple[int, int, int, bool] | None:
    """The last argument (start, end) of the call at a place, its end, and whether it has any.

    `line` and `column` are those of the text that Python compiles, for a notebook of all cells.
    """
    code = source.python
    reader = PythonText(code.text)
    for node in ast.walk(reader.tree):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (line, column):
            parts = [reader.span(part) for part in (*node.args, *node.keywords)]
            closing = reader.span(node)[1] - 1
            start, end = max(parts) if parts else (closing, closing)
            starts = code.starts
            return starts[start], starts[end], starts[closing], bool(parts)
    return None
