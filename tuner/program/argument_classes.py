"""Dataclasses whose objects are made from a command line: transformers' HfArgumentParser, TRL's."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from tuner.program.arguments import Argument, file_in, values_of_files, values_of_words
from tuner.program.edit.source import PYTHON
from tuner.program.names import Script
from tuner.program.parsed import last_name
from tuner.program.program import Program

PARSERS = ("HfArgumentParser", "TrlParser")
"""What makes objects of dataclasses from a command line, or from a file that it names."""


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
    """Which of `names` a class is, or is derived from; None for none of them."""
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


def said_values(program: Program) -> dict[str, Argument]:
    """What files and words behind the script say; words count more."""
    command = program.command
    start = command.index(program.main) + 1 if program.main in command else len(command)
    words = command[start:]
    named = [program.files[w] for w in map(file_in, words) if w in program.files]
    files = [source for source in named if source.path.suffix not in PYTHON]
    return {**values_of_files(files), **values_of_words(words)}
