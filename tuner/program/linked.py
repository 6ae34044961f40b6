"""Names that one script of a program takes from another, and the calls of its functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Self

from tuner.program.edit.python_file import Keys, defaults_in, last_name, unrolled
from tuner.program.edit.source import SourceFile
from tuner.program.parsed import (
    Function,
    Option,
    ParsedScript,
    Scope,
    arguments_of,
)
from tuner.program.reads import module_path
from tuner.space.apply import Path


@dataclass(frozen=True, slots=True)
class Literal:
    """A value in the program.

    `option` names the attribute or parameter with this default, if a library may set it.
    """

    node: ast.expr
    option: str = ""


@dataclass(frozen=True, slots=True)
class OutsideKeys:
    """The value behind these keys in a file, or in an object of another module."""

    keys: Path
    node: ast.expr


@dataclass(frozen=True, slots=True)
class OptionValue:
    """The value of a command-line option."""

    option: Option


@dataclass(frozen=True, slots=True)
class Environment:
    """The value of an environment variable; `default` is the value where it is not set."""

    name: str
    default: ast.expr | None
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Unclear:
    """Nothing that can be followed. `why` is the end of a sentence: "is computed"."""

    node: ast.AST
    why: str


End = Literal | OutsideKeys | OptionValue | Environment | Unclear


class LinkedScript(ParsedScript):
    """A script whose imported names are found in `others`, by absolute path below `roots`."""

    def __init__(self, source: SourceFile, roots: Sequence[FilePath] = ()) -> None:
        super().__init__(source)
        self.others: Mapping[FilePath, Self] = {}
        self._roots = roots

    def home_of(self, node: ast.AST) -> Self:
        """The script of the program that has `node`."""
        if node in self.scopes:
            return self
        return next((other for other in self.others.values() if node in other.scopes), self)

    def definition_of(self, call: ast.Call) -> tuple[Self, ast.AST | None]:
        """The function or class that a call names, and the script with it; None if unknown."""
        base, keys = unrolled(call.func)
        found = self.scopes[call].find(base.id) if isinstance(base, ast.Name) else None
        if found is None or len(found[1]) != 1:
            return self, None
        binding = found[1][0]
        if isinstance(binding, ast.Import | ast.ImportFrom):
            assert isinstance(base, ast.Name)
            other, name, rest = self._imported(binding, base.id, keys)
            values = other.top.names.get(name, ()) if other is not None and not rest else ()
            return (other or self), (values[0] if len(values) == 1 else None)
        return self, binding if not keys else None

    def _imported(
        self, node: ast.Import | ast.ImportFrom, name: str, keys: Keys
    ) -> tuple[Self | None, str, Keys]:
        """The script, the name in it and the keys of that, for an imported name with `keys`."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                if (alias.asname or alias.name) != name:
                    continue
                module = node.module or ""
                inner = f"{module}.{alias.name}" if module else alias.name
                if (script := self._module(inner, node.level)) and keys:
                    return script, str(keys[0]), keys[1:]
                return self._module(module, node.level), alias.name, keys
            parts = [] if alias.asname else alias.name.split(".")[1:]
            bound = alias.asname or alias.name.partition(".")[0]
            if bound == name and list(keys[: len(parts)]) == parts and len(keys) > len(parts):
                script = self._module(alias.name, 0)
                return script, str(keys[len(parts)]), keys[len(parts) + 1 :]
        return None, name, keys

    def _module(self, name: str, level: int) -> Self | None:
        path = module_path(name, level, self.source.path, self._roots) if self.others else None
        return None if path is None else self.others.get(path)

    def _calls_of(
        self, function: Function, owner: Scope
    ) -> tuple[list[tuple[Self, ast.Call]], int]:
        if not isinstance(owner.node, ast.ClassDef):
            calls = [(self, c) for c in self.calls if isinstance(c.func, ast.Name)]
            calls = [(s, c) for s, c in calls if last_name(c.func) == function.name]
            return calls + self._calls_elsewhere(function.name, function), 0
        static = any(last_name(d) == "staticmethod" for d in function.decorator_list)
        name = owner.node.name if function.name == "__init__" else function.name
        calls = [(self, c) for c in self.calls if last_name(c.func) == name]
        if function.name == "__init__":
            calls += self._calls_elsewhere(name, owner.node)
        return calls, 0 if static else 1

    def _calls_elsewhere(self, name: str, definition: ast.AST) -> list[tuple[Self, ast.Call]]:
        return [
            (other, call)
            for other in self.others.values()
            if other is not self
            for call in other.calls
            if last_name(call.func) == name and other.definition_of(call)[1] is definition
        ]

    def _is_passed_with_others(self, function: Function) -> bool:
        """True for calls such as `partial(train, batch=4)` and `spawn(train, 4)`."""
        return any(
            isinstance(argument, ast.Name) and argument.id == function.name
            for call in self.calls
            for argument in (*call.args, *(k.value for k in call.keywords))
            if len(call.args) + len(call.keywords) > 1
        )

    def _method(self, definition: ast.ClassDef, name: str) -> ast.AST | None:
        return next(
            (n for n in definition.body if isinstance(n, Function) and n.name == name), None
        )

    @functools.cached_property
    def _passed_classes(self) -> list[ast.ClassDef]:
        passed = {
            name.id
            for call in self.calls
            for argument in (*call.args, *(k.value for k in call.keywords))
            for name in (argument, *getattr(argument, "elts", ()))
            if isinstance(name, ast.Name)
        }
        return [n for n in self.bodies if isinstance(n, ast.ClassDef) and n.name in passed]


def with_option(end: End, option: str) -> End:
    """A literal as the default of an option; other ends as they are."""
    if not isinstance(end, Literal) or end.option:
        return end
    return Literal(end.node, option)


def reads_environment(call: ast.Call) -> bool:
    """True for `os.getenv(...)` and `os.environ.get(...)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = last_name(call.func)
    is_get = name == "get" and owner is not None and last_name(owner) == "environ"
    return bool(call.args) and (name == "getenv" or is_get)


def mentions(node: ast.AST, name: ast.expr) -> bool:
    """True if the name occurs in an expression."""
    return any(
        isinstance(n, ast.Name) and isinstance(name, ast.Name) and n.id == name.id
        for n in ast.walk(node)
    )


def first_argument(function: Function) -> str | None:
    """The name of the first parameter: `self`."""
    arguments = arguments_of(function.args)
    return arguments[0].arg if arguments else None


def default_of(arguments: ast.arguments, argument: ast.arg) -> ast.expr | None:
    """The default of a parameter."""
    return next((default for one, default in defaults_in(arguments) if one is argument), None)


def given_in(
    call: ast.Call, argument: ast.arg, arguments: Sequence[ast.arg], skipped: int
) -> ast.expr | bool | None:
    """The value that a call passes for an argument: None for none, True if it is unclear."""
    for keyword in call.keywords:
        if keyword.arg == argument.arg:
            return keyword.value
    if any(k.arg is None for k in call.keywords) or any(
        isinstance(a, ast.Starred) for a in call.args
    ):
        return True
    index = next(n for n, one in enumerate(arguments) if one is argument) - skipped
    return call.args[index] if index < len(call.args) else None
