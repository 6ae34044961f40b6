"""Follows names, attributes and keys of a Python program to the literals behind them.

The program is parsed, never run. A value that is uncertain ends as `Unclear`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path as FilePath

from tuner.program.edit.python_file import ANY, Key, Keys, is_literal, last_name
from tuner.program.edit.source import SourceFile
from tuner.program.linked import (
    End,
    Environment,
    LinkedScript,
    Literal,
    OptionValue,
    OutsideKeys,
    Unclear,
    default_of,
    first_argument,
    given_in,
    mentions,
    reads_environment,
    with_option,
)
from tuner.program.parsed import (
    Function,
    Option,
    Scope,
    arguments_of,
    holds_for_words,
)

CONVERSIONS = ("int", "float", "str", "bool")
"""Calls that change the kind of a value, and not the value."""

_FIELDS = ("field", "Field", "Option")
_MOST_STEPS = 24
"""From one name to the next; more is a circle."""

_MOST_LOOKS = 500
"""At expressions for one value; each may come from several places, and these again."""


class Script(LinkedScript):
    """A Python file or notebook, and the meaning of its names."""

    def __init__(self, source: SourceFile, roots: Sequence[FilePath] = ()) -> None:
        super().__init__(source, roots)
        self._budget = _MOST_LOOKS
        self.given: dict[str, str | int] = {}
        """By name: what the command line says of an option, in place of its default."""
        self.words: int | None = None
        """The length of `sys.argv`, if it is known."""

    # -- following ---------------------------------------------------------------------------

    def ends(self, node: ast.expr) -> list[End]:
        """The possible origins of an expression's value; a default is followed to the calls."""
        self._budget = _MOST_LOOKS
        arguments = self.parents.get(node)
        if isinstance(arguments, ast.arguments):
            function = self.parents[arguments]
            for argument in arguments_of(arguments):
                if default_of(arguments, argument) is node:
                    return self._parameter(argument, self.bodies[function], node, (), _MOST_STEPS)
        return self._follow(node, (), _MOST_STEPS)

    def ends_at(self, node: ast.expr, key: str) -> list[End]:
        """The possible origins of an item of the dictionary `node`."""
        self._budget = _MOST_LOOKS
        return self._follow(node, (key,), _MOST_STEPS)

    def _follow(self, node: ast.AST, keys: Keys, left: int) -> list[End]:  # noqa: PLR0911
        self._budget -= 1
        if left == 0 or self._budget < 0:
            return [Unclear(node, "goes through too many names")]
        left -= 1
        if isinstance(node, ast.Attribute):
            return self._follow(node.value, (node.attr, *keys), left)
        if isinstance(node, ast.Subscript):
            return self._follow(node.value, (self._key(node.slice, left), *keys), left)
        if isinstance(node, ast.Name):
            return self._name(node, keys, left)
        if isinstance(node, ast.Call):
            return self._call(node, keys, left)
        if isinstance(node, ast.Dict):
            return self._dict(node, keys, left)
        if isinstance(node, ast.IfExp):
            holds = holds_for_words(node.test, self.words)
            if holds is not None:
                return self._follow(node.body if holds else node.orelse, keys, left)
        if isinstance(node, ast.List | ast.Tuple) and keys:
            items = [e for n, e in enumerate(node.elts) if keys[0] in (n, ANY)]
            found = [end for item in items for end in self._follow(item, keys[1:], left)]
            return found or [Unclear(node, f"has no item {keys[0]}")]
        if keys or not isinstance(node, ast.expr):
            return [Unclear(node, "cannot be followed")]
        if is_literal(node) or isinstance(node, ast.List | ast.Tuple):
            return [Literal(node)]
        return [Unclear(node, "is computed")]

    def _key(self, node: ast.expr, left: int) -> Key:
        ends = [Literal(node)] if is_literal(node) else self._follow(node, (), left)
        if len(ends) != 1 or not isinstance(ends[0], Literal | OptionValue):
            return ANY
        if isinstance(ends[0], Literal):
            value = getattr(ends[0].node, "value", None)
        else:
            option = ends[0].option
            default = getattr(option.default, "value", None)
            value = default if option.is_positional else self.given.get(option.dest, default)
        return value if isinstance(value, str | int) else ANY

    def _dict(self, node: ast.Dict, keys: Keys, left: int) -> list[End]:
        if not keys:
            return [Unclear(node, "is a dictionary")]
        found: list[End] = []
        for key, value in zip(node.keys, node.values, strict=True):
            named = getattr(key, "value", None) if isinstance(key, ast.Constant) else None
            if key is not None and (keys[0] is ANY or named == keys[0]):
                found += self._follow(value, keys[1:], left)
        if not found:
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    found += self._follow(value, keys, left)
        return found or [Unclear(node, f"has no {keys[0]!r}")]

    def _call(self, node: ast.Call, keys: Keys, left: int) -> list[End]:  # noqa: PLR0911, PLR0912
        name = last_name(node.func)
        if reads_environment(node) and not keys:
            named = self._key(node.args[0], left)
            others = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "default")]
            return [Environment(str(named), next(iter(others), None), node)]
        if name == "get" and node.args and isinstance(node.func, ast.Attribute):
            return self._follow(node.func.value, (self._key(node.args[0], left), *keys), left)
        if name in ("getenv", "getattr"):
            return [Unclear(node, "is computed")]
        if not keys:
            if name in CONVERSIONS and len(node.args) == 1:
                return self._follow(node.args[0], (), left)
            if name in _FIELDS:
                default = next((k.value for k in node.keywords if k.arg == "default"), None)
                if default is None and name != "field" and node.args:
                    default = node.args[0]  # pydantic's and typer's stand first
                if default is not None:
                    return self._follow(default, (), left)
            return [Unclear(node, "is computed")]
        if name is not None and name.startswith("parse_") and name.endswith("args"):
            options = [o for o in self.options if o.dest == keys[0]]
            if options and len(keys) == 1:
                return [OptionValue(option) for option in options]
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg == keys[0]:
                return self._follow(keyword.value, keys[1:], left)
        spread = [k.value for k in node.keywords if k.arg is None]
        for value in spread:
            found = self._follow(value, keys, left)
            if not any(isinstance(end, Unclear) for end in found):
                return found
        if name == "dict" and not node.args and not spread:
            return [Unclear(node, f"has no {keys[0]!r}")]
        home, definition = self.definition_of(node)
        if isinstance(definition, ast.ClassDef):
            if node.args and home._method(definition, "__init__") is None:
                return [Unclear(node, "is made with values that have no names")]
            return self._from(home, node, home._attribute(definition, keys, left))
        if isinstance(definition, Function):
            returned = [
                n.value
                for n in ast.walk(definition)
                if isinstance(n, ast.Return) and n.value is not None
            ]
            ends = [end for value in returned for end in home._follow(value, keys, left)]
            return self._from(home, node, ends) or [Unclear(node, "cannot be followed")]
        if len(node.args) == 1 and isinstance(node.args[0], ast.Dict | ast.Name | ast.Call):
            found = self._follow(node.args[0], keys, left)
            if not any(isinstance(end, Unclear | OutsideKeys) for end in found):
                return found  # Namespace(**x), vars(args), OmegaConf.create({...})
        return self._outside(node, keys)

    def _outside(self, node: ast.expr, keys: Keys) -> list[End]:
        if any(key is ANY for key in keys):
            return [Unclear(node, "is chosen while the program runs")]
        if "environ" in keys:
            return [Environment(str(keys[-1]), None, node)]
        return [OutsideKeys(tuple(key for key in keys if key is not None), node)]

    def _of_import(
        self, binding: ast.Import | ast.ImportFrom, node: ast.Name, keys: Keys, left: int
    ) -> list[End] | None:
        other, name, rest = self._imported(binding, node.id, keys)
        if other is None or name not in other.top.names:
            return None
        inside = ast.copy_location(ast.Name(name, ast.Load()), node)
        other._budget = self._budget
        found = (other.top, other.top.names[name])
        return self._from(other, node, other._named(inside, found, rest, left - 1))

    def _from(self, other: Script, node: ast.AST, ends: Sequence[End]) -> list[End]:
        """The ends of another script; what is unclear there is said of the `node` here."""
        if other is self:
            return list(ends)
        return [Unclear(node, end.why) if isinstance(end, Unclear) else end for end in ends]

    def _name(self, node: ast.Name, keys: Keys, left: int) -> list[End]:
        found = self.scopes[node].find(node.id)
        if found is None:
            return [Unclear(node, "is set nowhere here")]
        return self._named(node, found, keys, left)

    def _named(
        self, node: ast.Name, found: tuple[Scope, list[ast.AST]], keys: Keys, left: int
    ) -> list[End]:
        scope, bindings = found
        # What is assigned to the attribute or the item afterwards counts too.
        ends: list[End] = [
            end
            for base, where, path, value in self.assigned
            if base == node.id and _is_set_by(path, keys) and where.find(base) == found
            for end in self._follow_own(value, node, left)
        ]
        had = bool(ends)
        for binding in bindings:
            ends += self._binding(binding, scope, node, keys, left, had=had)
        return ends

    def _follow_own(self, value: ast.AST, node: ast.expr, left: int) -> list[End]:
        if isinstance(value, ast.expr) and not mentions(value, node):
            return self._follow(value, (), left)
        return [Unclear(value, "is computed")]

    def _binding(
        self, binding: ast.AST, scope: Scope, node: ast.Name, keys: Keys, left: int, *, had: bool
    ) -> list[End]:
        if isinstance(binding, ast.arg):
            return self._parameter(binding, scope, node, keys, left)
        if isinstance(binding, ast.ClassDef):
            return self._attribute(binding, keys, left) if keys else [Unclear(node, "is a class")]
        if isinstance(binding, ast.Import | ast.ImportFrom):
            found = self._of_import(binding, node, keys, left)
            if found is not None:
                return found
        is_value = isinstance(binding, ast.expr) and not (
            isinstance(getattr(binding, "ctx", None), ast.Store)
        )
        if is_value:
            ends = self._follow(binding, keys, left)
            absent = had and all(isinstance(end, Unclear) for end in ends)
            return [] if absent else ends  # `CONFIG = {}`, then `CONFIG["batch"] = 4`
        if keys and not isinstance(binding, ast.AugAssign):
            return self._outside(node, keys)
        return [Unclear(binding, "is set while the program runs")]

    def _parameter(
        self, argument: ast.arg, scope: Scope, node: ast.expr, keys: Keys, left: int
    ) -> list[End]:
        function = scope.node
        if not isinstance(function, Function):
            return [Unclear(node, "is set while the program runs")]
        owner = self.scopes[function]
        arguments = arguments_of(function.args)
        if owner.is_class and argument is arguments[0]:
            assert isinstance(owner.node, ast.ClassDef)
            return self._attribute(owner.node, keys, left) if keys else [Unclear(node, "is self")]
        calls, skipped = self._calls_of(function, owner)
        default = default_of(function.args, argument)
        ends: list[End] = []
        given = [given_in(call, argument, arguments, skipped) for _, call in calls]
        for (home, _), value in zip(calls, given, strict=True):
            if isinstance(value, ast.expr):
                ends += self._from(home, node, home._follow(value, keys, left))
            elif value is not None:
                ends.append(Unclear(node, "is passed in a way that cannot be followed"))
        if not calls or any(value is None for value in given):
            options = [o for o in self.options if o.dest == argument.arg and not o.is_positional]
            if options and not keys and function.decorator_list:
                return [*ends, *map(OptionValue, options)]
            if self._is_passed_with_others(function):
                return [*ends, Unclear(node, "is passed in a way that cannot be followed")]
            if default is None:
                return ends + (self._outside(node, keys) if keys else [Unclear(node, "is passed")])
            for end in self._follow(default, keys, left):
                ends.append(with_option(end, "" if calls or keys else argument.arg))
        return ends

    def _attribute(self, definition: ast.ClassDef, keys: Keys, left: int) -> list[End]:
        if left == 0:
            return [Unclear(definition, "goes round in a circle")]
        ends: list[End] = []
        for base, where, path, value in self.assigned:
            function = where.node
            own = isinstance(function, Function) and self.scopes[function].node is definition
            if own and path == keys[:1] and base == first_argument(function):  # type: ignore[arg-type]
                ends += self._follow(value, keys[1:], left - 1)
        for value in self.bodies[definition].names.get(str(keys[0]), ()):
            for end in self._follow(value, keys[1:], left - 1):
                ends.append(with_option(end, str(keys[0])))
        if ends:
            return ends
        for parent in definition.bases:
            found = (
                self.scopes[definition].find(parent.id) if isinstance(parent, ast.Name) else None
            )
            if found and isinstance(found[1][0], ast.ClassDef):
                return self._attribute(found[1][0], keys, left - 1)
        return [Unclear(definition, f"has no {keys[0]!r} here")]

    def class_values(self, name: str) -> list[Literal]:
        """The values of attribute `name` of the classes that some library makes objects of."""
        self._budget = _MOST_LOOKS
        classes = self._passed_classes
        ends = [end for c in classes for end in self._attribute(c, (name,), _MOST_STEPS)]
        return [end for end in ends if isinstance(end, Literal)]

    def defaults_of(self, option: Option) -> list[ast.expr]:
        """The value of an option that is not given; `set_defaults` wins over its own default."""
        later = [
            keyword.value
            for call in self.calls
            for keyword in call.keywords
            if last_name(call.func) == "set_defaults" and keyword.arg == option.dest
        ]
        return later or ([] if option.default is None else [option.default])


def _is_set_by(path: Keys, keys: Keys) -> bool:
    if path[-1:] == (ANY,):
        return len(keys) >= len(path) and keys[: len(path) - 1] == path[:-1]
    return bool(keys) and path == keys
