"""Reads what classes and functions of a library take from its source, without importing it."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tuner.core.expressions import syntax

DATA: Mapping[str, Any] = json.loads(Path(__file__).with_name("libraries.json").read_text("utf-8"))
SOURCES: Mapping[str, Sequence[str]] = DATA["sources"]
"""By library: the files that define what programs call, the most certain first, and the names."""

_LOADERS = re.compile("from_pretrained|from_dict|_?get_config_dict|_from_config")
_CONTRARY = re.compile(r"self\.(\w+) = not self\.(\w+) if self\.\1 is None else self\.\1")
_TORCH = re.compile(r"is_torch_greater_or_equal_than_(\d+)_(\d+)")


class Source(NamedTuple):
    """One module of a library, with its classes, functions and imports by name."""

    path: Path
    body: Sequence[ast.stmt]
    names: Mapping[str, ast.stmt]


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            for part in ("body", "orelse", "handlers"):
                yield from _flat(getattr(node, part, ()))


class Reader:
    """Reads a library in its `folder`; `torch` is the release by which it chooses some defaults.

    A row of `rows` has the `fields` of its own: a type alone for a default of None, else a list of
    the type and the default, if any. One with `call` is no dataclass: its last `call` are keywords.
    """

    def __init__(self, library: str, folder: Path, torch: Sequence[int]) -> None:
        self.library, self.folder, self.torch = library, folder, tuple(torch)
        self.rows: dict[str, dict[str, Any]] = {}
        self.sources: dict[Path, Source | None] = {}

    def read(self) -> dict[str, dict[str, Any]]:
        """The rows of everything that `SOURCES` names."""
        files, wanted = SOURCES[self.library]
        paths = [path for each in files.split() for path in sorted(self.folder.glob(each))]
        for source in filter(None, map(self.source, paths)):
            for name, node in source.names.items():
                if isinstance(node, ast.ClassDef) and re.fullmatch(wanted, name):
                    self._class(node, source)
                for one in [node, *(node.body if isinstance(node, ast.ClassDef) else ())]:
                    full = name if one is node else f"{name}.{getattr(one, 'name', '')}"
                    if isinstance(one, ast.FunctionDef) and re.fullmatch(wanted, full):
                        self._function(full, one, source)
        return self.rows

    def source(self, path: Path) -> Source | None:
        """The module in a file; None if there is none, or none that this Python can parse."""
        if path not in self.sources:
            self.sources[path] = None
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                body, names = syntax(path.read_bytes()).body, dict[str, ast.stmt]()
                for node in _flat(body):
                    if isinstance(node, ast.ClassDef | ast.FunctionDef):
                        names[node.name] = node  # the last of its overloads
                    elif isinstance(node, ast.ImportFrom):  # not that of `except ImportError`
                        names = {a.asname or a.name: node for a in node.names} | names
                self.sources[path] = Source(path, body, names)
        return self.sources[path]

    def _class(self, node: ast.ClassDef, source: Source) -> None:
        bases = [self.find(ast.unparse(each).rpartition(".")[2], source) for each in node.bases]
        for _, found, home in bases:  # TRL has classes of the same name at two places
            if found is not None and (found.name == node.name) and found is not node:
                return self._class(found, home)
        if node.name in self.rows:
            return None
        row = self.rows[node.name] = dict[str, Any](fields={}, bases=[])
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        marks = " ".join(map(ast.unparse, node.decorator_list))
        if (made := methods.get("__init__")) is not None:
            own = self._takes(made, source, node)
            hands_on = made.args.vararg and made.args.kwarg
            row |= {"fields": own["fields"]} if hands_on else own
        elif "dataclass" in marks or self.library == "axolotl":
            row["fields"] = dict(self._fields(node, source))
        for path, found, home in bases:
            if found is not None:
                self._class(found, home)
            row["bases"] += [path] if path.partition(".")[0] in SOURCES else []
        after = methods["__post_init__"].body if "__post_init__" in methods else []
        settled = [_CONTRARY.fullmatch(ast.unparse(each)) for each in after]
        if any(settled):
            row["contrary"] = {each[1]: each[2] for each in settled if each}
        return None

    def find(
        self, name: str, source: Source, depth: int = 8
    ) -> tuple[str, ast.ClassDef | None, Source]:
        """The path of a name, its class if it is one of this library, and the module it is of."""
        node = source.names.get(name)
        if isinstance(node, ast.ImportFrom) and depth:
            own = next(a.name for a in node.names if (a.asname or a.name) == name)
            parts = node.module.split(".") if node.module else []
            if not node.level and parts[0] != self.folder.name:
                return f"{parts[0]}.{own}", None, source
            folder = source.path.parents[node.level - 1] if node.level else self.folder.parent
            there = folder.joinpath(*parts)
            for path in (there.with_suffix(".py"), there / "__init__.py"):
                if (other := self.source(path)) is not None:
                    return self.find(own, other, depth - 1)
        if node is None and depth:  # another name for it
            flat = [each for each in _flat(source.body) if isinstance(each, ast.Assign)]
            other_name = self._assigned(flat, name)
            if isinstance(other_name, ast.Name):
                return self.find(other_name.id, source, depth - 1)
        if isinstance(node, ast.ClassDef):
            return f"{self.library}.{name}", node, source
        return f".{name}", None, source

    def _fields(self, node: ast.ClassDef, source: Source) -> Iterator[tuple[str, Any]]:
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            kind, value, given = ast.unparse(line.annotation), line.value, dict[Any, Any]()
            if isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field"):
                given = {each.arg: each.value for each in value.keywords}
                value = given.get("default", value.args[0] if value.args else None)
                if made := given.get("default_factory"):
                    value = made.body if isinstance(made, ast.Lambda) else ast.Call(made, [], [])
            is_made = "init" in given and ast.unparse(given["init"]) == "False"
            if not is_made and "ClassVar" not in kind and "KW_ONLY" not in kind:
                yield line.target.id, self._row(kind, value, source, node)
            if isinstance(alias := given.get("alias"), ast.Constant):
                yield str(alias.value), kind

    def _row(self, kind: str, value: ast.expr | None, *scope: Any) -> Any:
        default = None if value is None else self.value(value, *scope)
        return [kind] if value is None else kind if default is None else [kind, default]

    def _takes(self, node: ast.FunctionDef, *scope: Any) -> dict[str, Any]:
        its = node.args
        plain = [*its.posonlyargs, *its.args]
        blank: list[ast.expr | None] = [None] * (len(plain) - len(its.defaults))
        values = [*blank, *its.defaults, *its.kw_defaults]
        pairs = zip([*plain, *its.kwonlyargs], values, strict=True)
        own = [(each.arg, value) for each, value in pairs if each.arg not in ("self", "cls")]
        fields = {name: self._row("", value, *scope) for name, value in own}
        row: dict[str, Any] = {"fields": fields, "call": len(its.kwonlyargs)}
        # @deprecate_kwarg("tokenizer", new_name="processing_class") takes another name.
        old = [m for m in node.decorator_list if "_kwarg(" in ast.unparse(m)]
        words = {n.value for m in old for n in ast.walk(m) if isinstance(n, ast.Constant)}
        names = " ".join(sorted(w for w in map(str, words) if w.isidentifier() and w != "True"))
        return row | ({"open": True} if its.kwarg else {}) | ({"also": names} if names else {})

    def _function(self, name: str, node: ast.FunctionDef, source: Source) -> None:
        """Keep what a function takes; in transformers all that loads a model is one row."""
        row = self._takes(node, source, None)
        asked = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
        if name == "launch_command_parser":  # its options
            row["also"] = " ".join(sorted(w[2:].replace("-", "_") for w in asked if w[:2] == "--"))
        elif self.library == "transformers" and _LOADERS.fullmatch(node.name):
            names = {*row["fields"], *(one for one in asked if one.isidentifier())}
            row = self.rows.setdefault("from_pretrained", row)
            names |= {*row.get("also", "").split()}
            row["also"] = " ".join(sorted(names - {"None", "True", "False", *row["fields"]}))
            return
        if not (node.args.vararg and node.args.kwarg):  # else it hands on what it gets
            self.rows.setdefault(name, row)

    def value(  # noqa: PLR0911 - a case for each form
        self, node: ast.expr, source: Source, within: ast.ClassDef | None = None, depth: int = 8
    ) -> Any:
        """The value of an expression in plain JSON; {"$unknown": its text} if it has none."""
        with contextlib.suppress(ValueError, TypeError, MemoryError, RecursionError):
            return json.loads(json.dumps(ast.literal_eval(node)))
        match node if depth else None:
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.value(each, source, within, depth - 1) for each in parts]
            case ast.Call(func=ast.Name(id=("list" | "tuple" | "dict") as name), args=[]):
                return {} if name == "dict" else []
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                path, found, _ = self.find(name, source)
                if found is not None:
                    return {"$object": {"class": path}}
            case ast.Attribute(value=ast.Attribute() as member, attr="value"):
                return self.value(member, source, within, depth - 1)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return {"$name": f"torch.{name}"}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                _, found, home = self.find(name, source)
                if found is not None and (value := self._assigned(found.body, attribute)):
                    return self.value(value, home, found, depth - 1)
            case ast.Name(id=name):
                if within is not None and (value := self._assigned(within.body, name)):
                    return self.value(value, source, within, depth - 1)
                path, _, home = self.find(name, source)
                if value := self._assigned(home.body, path.partition(".")[2]):
                    return self.value(value, home, None, depth - 1)
        return {"$unknown": ast.unparse(node)[:60]}

    def _assigned(self, body: Sequence[ast.stmt], name: str) -> ast.expr | None:
        """The last value that a name gets; None if a condition decides it that is not known."""
        found: ast.expr | None = None
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                found = getattr(node, "value", None)
            elif isinstance(node, ast.If):
                parts = [self._assigned(part, name) for part in (node.body, node.orelse)]
                test = ast.unparse(node.test)
                least = _TORCH.fullmatch(test)
                if parts != [None, None] and least is None and test != "is_torch_available()":
                    return None
                if parts != [None, None]:
                    holds = least is None or self.torch >= tuple(map(int, least.groups()))
                    found = parts[not holds] or found
        return found
