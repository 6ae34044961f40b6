"""The dataclasses whose objects a parser fills from a command line or a file."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tuner.program.arguments import Argument, file_in, values_of_files, values_of_words
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import PYTHON
from tuner.program.linked import Literal
from tuner.program.names import Script
from tuner.program.program import Program

RELEASED: Mapping[str, Any] = {
    "dtype": "float32",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "bnb_4bit_quant_type": "nf4",
    "eval_strategy": "no",
    "gradient_checkpointing": True,
}
"""Defaults of TRL's ModelConfig and configurations (1.16) that are neither None nor false."""

PARSERS = ("HfArgumentParser", "TrlParser")
"""Parsers that make objects of dataclasses from a command line or a file."""


def parsed_classes(scripts: Sequence[Script]) -> Iterator[str]:
    """The names of the classes that parsers get."""
    for script, call in ((one, call) for one in scripts for call in one.calls):
        if last_name(call.func) not in PARSERS:
            continue
        given = [k.value for k in call.keywords if k.arg in ("dataclass_types", None)]
        for node in (*call.args, *given):
            ends = script.ends(node) if isinstance(node, ast.Name) else []
            listed = ends[0].node if len(ends) == 1 and isinstance(ends[0], Literal) else node
            for one in getattr(listed, "elts", (node,)):
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
