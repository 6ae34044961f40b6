"""The arguments of a call in a program, each with the one value that it has."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.program.arguments import (
    COMMAND_LINE,
    Argument,
    Found,
    file_in,
    values_of_files,
    values_of_words,
)
from tuner.program.edit.python_file import ANY, Key, last_name, unrolled
from tuner.program.edit.source import PYTHON
from tuner.program.linked import End, Environment, Literal, OptionValue, OutsideKeys, Unclear
from tuner.program.names import CONVERSIONS, Script
from tuner.program.program import Program
from tuner.program.setting import typed

DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
"""By the names that PyTorch has for them: tuner's."""


def place_in(script: Script, node: ast.AST) -> str:
    """For people: "train.py:12"."""
    return f"{script.source.path}:{script.place_of(node).line}"


def items_of(script: Script, node: ast.expr, left: int = 8) -> dict[str, ast.AST] | None:
    """The values of a dictionary that the program writes out; None if one is unknown.

    After `left` nested dictionaries they are taken for a circle.
    """
    ends = script.ends(node) if left > 0 else []
    made = ends[0].node if len(ends) == 1 and isinstance(ends[0], Unclear) else None
    is_dict = isinstance(made, ast.Call) and last_name(made.func) == "dict"
    if made is None or not (is_dict or isinstance(made, ast.Dict)):
        return None
    found: dict[str, ast.AST] = {}
    for key, value in (*_parts_of(made), *_assigned_to(script, node)):
        inner = {key: value} if isinstance(key, str) and key else None
        if key == "" and isinstance(value, ast.expr):
            inner = items_of(script, value, left - 1)
        if inner is None or (key and script.is_conditional(value)):
            return None
        found |= inner
    return found


def _parts_of(made: ast.AST) -> Iterator[tuple[Key, ast.AST]]:
    """The items of `{...}` and `dict(...)`: "" for a dictionary whose items are spread into it."""
    if isinstance(made, ast.Dict):
        for key, value in zip(made.keys, made.values, strict=True):
            text = getattr(key, "value", None)
            yield "" if key is None else text if isinstance(text, str) else ANY, value
    elif isinstance(made, ast.Call):
        yield from (("", argument) for argument in made.args)
        yield from ((keyword.arg or "", keyword.value) for keyword in made.keywords)


def _assigned_to(script: Script, node: ast.expr) -> Iterator[tuple[Key, ast.AST]]:
    base, path = unrolled(node)
    if not isinstance(base, ast.Name):
        return
    home = script.scopes[base].find(base.id)
    for name, where, keys, value in script.assigned:
        if name == base.id and keys[:-1] == path and where.find(base.id) == home:
            yield keys[-1] if isinstance(keys[-1], str) else ANY, value


def written_in(script: Script, call: ast.Call) -> Iterator[tuple[str, str, str]]:
    """The arguments that a call names: the name, where that stands, and its value as written."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, place_in(script, keyword.value), script.shown(keyword.value)
            continue
        for name, value in (items_of(script, keyword.value) or {}).items():
            home = script.home_of(value)
            yield name, place_in(home, value), home.shown(value)


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads calls of one program; defaults of the environment that count are noted in `found`."""

    program: Program
    found: Found

    def keywords(
        self, script: Script, call: ast.Call, only: Sequence[str] = ()
    ) -> Iterator[tuple[str, Argument]]:
        """The arguments of a call by name; those in a dictionary as "its name.its key"."""
        for number, value in enumerate(call.args if not only else ()):
            yield str(number), self.argument(script, value)
        for keyword in call.keywords:
            if keyword.arg is not None:
                if not only or keyword.arg in only:
                    yield from self._named(script, keyword.arg, keyword.value)
                continue
            items = items_of(script, keyword.value)
            if items is None and not only:
                text = f"has **{script.shown(keyword.value)}, whose keys are not known"
                yield "**", Argument(None, place_in(script, keyword.value), text)
            for key in items or ():
                if not only or key in only:
                    yield from self._item(script, keyword.value, key)

    def argument(self, script: Script, node: ast.expr) -> Argument:
        """The one value that an expression has."""
        if _makes(node):
            # What an object is made with is read where it is made.
            return Argument(script.shown(node), place_in(script, node), is_made=True)
        return self._one(script, node, script.ends(node))

    def _named(self, script: Script, name: str, node: ast.expr) -> Iterator[tuple[str, Argument]]:
        for key in items_of(script, node) or ():
            yield f"{name}.{key}", self._one(script, node, script.ends_at(node, key))
        yield name, self.argument(script, node)

    def _item(self, script: Script, node: ast.expr, key: str) -> Iterator[tuple[str, Argument]]:
        ends = script.ends_at(node, key)
        made = ends[0].node if len(ends) == 1 and isinstance(ends[0], Unclear) else None
        if isinstance(made, ast.expr):
            yield from self._named(script.home_of(made), key, made)
        else:
            yield key, self._one(script, node, ends)

    def _one(self, script: Script, node: ast.expr, ends: Sequence[End]) -> Argument:
        values = [self._end(script, end) for end in ends]
        distinct = {repr(value.value): value for value in values}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        shown = script.shown(node)
        text = f"is {shown}, which is set in several places"
        return Argument(None, place_in(script, node), text)

    def _end(self, script: Script, end: Any) -> Argument:  # noqa: PLR0911 - one for each kind
        node = end.option.call if isinstance(end, OptionValue) else end.node
        script = script.home_of(node)  # which another one may import
        where = place_in(script, node)
        if isinstance(end, Literal):
            try:
                return Argument(ast.literal_eval(end.node), where)
            except ValueError:
                return Argument(None, where, f"is {script.shown(end.node)}, which is computed")
        if isinstance(end, OptionValue):
            return self._option(script, end, where)
        if isinstance(end, Environment):
            return self._variable(script, end, where)
        keys = end.keys if isinstance(end, OutsideKeys) else ("",)
        if keys[0] == "argv" and isinstance(keys[-1], int):
            return self._word(script, keys[-1], where)
        said = self._parsed(script, str(keys[0])) if len(keys) == 1 else None
        if said is not None:
            return said
        if str(keys[-1]) in DTYPES:
            return Argument(str(keys[-1]), where)
        if isinstance(end.node, ast.Call | ast.Dict):
            return Argument(str(keys[-1]) or script.shown(end.node), where, is_made=True)
        return Argument(None, where, f"is {script.shown(end.node)}, which cannot be read")

    def _variable(self, script: Script, end: Environment, where: str) -> Argument:
        text = os.environ.get(end.name)
        if text is not None:
            return Argument(typed(text, ""), f"the environment variable {end.name}")
        if end.default is None:
            return Argument(None, where, f"is the environment variable {end.name}, which is unset")
        default = self.argument(script, end.default)
        value = default.value
        value = typed(value, "") if isinstance(value, str) and not default.is_made else value
        if default.problem is None:
            self.found.assumed.append(f"{end.name}={value}, as this variable is not set")
        return Argument(value, where, default.problem)

    def _parsed(self, script: Script, name: str) -> Argument | None:
        """The value of a field of a dataclass that a parser fills; None for no such field."""
        scripts = [script, *script.others.values()]
        if next(parsed_classes(scripts), None) is None:
            return None
        said = said_values(self.program).get(name)
        if said is not None:
            return said
        defaults = [(one, literal) for one in scripts for literal in one.class_values(name)]
        found = {
            (one.source.path, literal.node): self._end(one, literal) for one, literal in defaults
        }
        return next(iter(found.values())) if len(found) == 1 else None

    def _word(self, script: Script, number: int, where: str) -> Argument:
        program = self.program
        names = [word for word, source in program.files.items() if source is script.source]
        at = program.command.index(names[0]) + number if names else len(program.command)
        if at < len(program.command):
            return Argument(typed(program.command[at], ""), COMMAND_LINE)
        return Argument(None, where, f"is word {number} behind the script, and there is none")

    def _option(self, script: Script, end: OptionValue, where: str) -> Argument:
        command, option = self.program.command, end.option
        for number, word in enumerate(command):
            head, equals, text = word.partition("=")
            if head in option.names:
                following = command[number + 1] if number + 1 < len(command) else ""
                return Argument(typed(text if equals else following, option.dest), COMMAND_LINE)
        if option.default is None or option.is_positional:
            return Argument(None, where, f"is the option {option.names[0]}, which has no default")
        return self.argument(script, option.default)


def _makes(node: ast.expr) -> bool:
    if isinstance(node, ast.Dict):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func)
    is_looked_up = name in ("get", "getenv") and bool(node.args)
    return name not in CONVERSIONS and not is_looked_up


PARSERS = ("HfArgumentParser", "TrlParser")
"""Parsers that make objects of dataclasses from a command line or a file."""


def parsed_classes(scripts: Sequence[Script]) -> Iterator[str]:
    """The names of the classes that parsers get."""
    for call in (call for script in scripts for call in script.calls):
        if last_name(call.func) not in PARSERS:
            continue
        for node in (*call.args, *(k.value for k in call.keywords)):
            for one in getattr(node, "elts", (node,)):
                name = last_name(one) if isinstance(one, ast.expr) else None
                if name:
                    yield name


def class_of(scripts: Sequence[Script], name: str) -> tuple[Script, ast.ClassDef] | None:
    """The class of the program that has this name, and the script that it is in."""
    found = ((s, node) for s in scripts for node in s.top.names.get(name, ()))
    return next(((s, node) for s, node in found if isinstance(node, ast.ClassDef)), None)


def base_in(names: Collection[str], scripts: Sequence[Script], name: str) -> str | None:
    """The one of `names` that a class is or is derived from; None if there is none."""
    if name in names:
        return name
    definition = class_of(scripts, name)
    bases = () if definition is None else definition[1].bases
    parents = [last_name(base) or "" for base in bases]
    found = (base_in(names, scripts, parent) for parent in parents if parent != name)
    return next((base for base in found if base), None)


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """The fields of a dataclass by name, with their defaults."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            value = line.value
            if isinstance(value, ast.Call) and last_name(value.func) == "field":
                value = next((k.value for k in value.keywords if k.arg == "default"), None)
            yield line.target.id, value


def words_behind_script(program: Program) -> Sequence[str]:
    """The words of the command that its script gets."""
    command = program.command
    return command[command.index(program.main) + 1 :] if program.main in command else ()


def said_values(program: Program) -> dict[str, Argument]:
    """The values of files and words behind the script; words win."""
    words = words_behind_script(program)
    named = [program.files[w] for w in map(file_in, words) if w in program.files]
    files = [source for source in named if source.path.suffix not in PYTHON]
    return {**values_of_files(files), **values_of_words(words)}
