"""Arguments and keys that the library does not take: a program with one of them cannot start."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tuner.core.errors import Problem
from tuner.core.expressions import show
from tuner.program.argument_classes import (
    PARSERS,
    class_of,
    fields_of,
    parsed_classes,
)
from tuner.program.arguments import (
    COMMAND_LINE,
    Argument,
    Arguments,
    Found,
    values_of_files,
    values_of_words,
)
from tuner.program.keywords import written_in
from tuner.program.names import Script
from tuner.program.parsed import last_name, unrolled
from tuner.program.program import Program
from tuner.program.signatures import Signature, beside, signature
from tuner.space.models.catalogue import resolve_config

_IGNORING = ("BitsAndBytesConfig", "Axolotl")
"""What takes any name, and does nothing with those that it does not know."""

_METHODS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
_LOADING = "from_pretrained"

_LENIENT = ("return_remaining_strings", "allow_extra_keys", "fail_with_unknown_args")
"""Arguments with which a parser is told what to do about words that it does not know."""

_REPLACING = ("unsloth",)
"""Libraries that put their own classes in the place of others', which take more."""


class CannotStart(Problem):
    """A problem with which the program itself ends, whatever is predicted."""


def hold_calls(scripts: Sequence[Script], trainer: str, found: Found) -> None:
    """Note the arguments that are not in the signature of what is called."""
    if any(_imports(script, name) for script in scripts for name in _REPLACING):
        return
    for script in scripts:
        for call in script.calls:
            held = _signature_of(script, call)
            if held is None or (held.is_open and held.name not in _IGNORING):
                continue
            for name, where, shown in written_in(script, call):
                if not held.takes(name):
                    others = beside(held.name, trainer)
                    what = f"{name}={shown} is not an argument of {held.of}"
                    _note(found, held, what, where, held.instead(name, shown, others))


def _note(found: Found, held: Signature, what: str, where: str, instead: str) -> None:
    if held.name in _IGNORING:
        found.left_out.append(f"{where}: {what}, which ignores it: {instead}")
    else:
        found.problems.append(CannotStart(f"{what} (TypeError): {instead}", where))


def _signature_of(script: Script, call: ast.Call) -> Signature | None:
    """What a call takes; None where that is not known, or is not the library's."""
    name = last_name(call.func) or ""
    held = signature(name) if name != _LOADING else None
    if held is None or name in _METHODS:
        return held
    base, _ = unrolled(call.func)
    binding = script.scopes[call].find(base.id) if isinstance(base, ast.Name) else None
    # What is bound nowhere comes from `import *`, if there is one.
    nodes = script.top.names.get("*", ()) if binding is None else binding[1]
    return held if all(_is_of(node, held.library) for node in nodes) else None


def _is_of(node: ast.AST, library: str) -> bool:
    """Whether an import is one of this library."""
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if not node.level else []
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return library in (name.partition(".")[0] for name in names)


def _imports(script: Script, library: str) -> bool:
    return any(_is_of(node, library) for node in ast.walk(script.tree))


def hold_file(tool: str, values: Mapping[str, Argument], found: Found) -> Mapping[str, Argument]:
    """The values of a file without those that its tool does not have, which are noted."""
    held = _of_tool(tool)
    lenient = os.environ.get("ALLOW_EXTRA_ARGS", "").lower() in ("true", "y", "1")
    if held is None or (held.name == "LLaMA-Factory" and lenient) or "plugins" in values:
        return values  # plugins have keys of their own
    for name, argument in values.items():
        is_option = argument.where == COMMAND_LINE and held.name == "Axolotl"
        if "." in name or held.takes(name) or is_option:
            continue  # its own options, such as --launcher, are no keys
        what = f"{name} is not a key of {held.of}"
        instead = held.instead(name, show(argument.value))
        if held.name in _IGNORING:
            _note(found, held, what, argument.where, instead)
        else:
            found.problems.append(
                CannotStart(f"{what}, which ends with an error: {instead}", argument.where)
            )
    return {name: argument for name, argument in values.items() if held.takes(name)}


def _of_tool(tool: str) -> Signature | None:
    if tool != "TRL":
        return signature(tool)
    parts = ("SFTConfig", "ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
    found = [one for part in (*parts, "accelerate launch") if (one := signature(part))]
    own = ("env", "accelerate_config")  # TrlParser's, and those of trl/cli
    names = frozenset(own).union(*(one.names for one in found))
    return Signature("`trl sft`", "trl", found[0].version, names)


def hold_words(program: Program, scripts: Sequence[Script], found: Found) -> None:
    """Note the options behind the script, and the keys of its file, that its parser ends with."""
    names = _parsed_names(scripts)
    if names is None:
        return
    classes = ", ".join(parsed_classes(scripts))
    for name, argument in _options_of(program).items():
        top = name.partition(".")[0]
        if {top, top.removeprefix("no_")} & names or any(n.startswith(top) for n in names):
            continue  # argparse takes the beginning of a name too
        near = Signature(classes, "", "", names).instead(top, show(argument.value))
        text = f"--{top} is not an option of {classes} (ValueError): {near}"
        found.problems.append(CannotStart(text, argument.where))


def _options_of(program: Program) -> dict[str, Argument]:
    """What the words behind the script, and the file behind --config, set."""
    command = program.command
    words = command[command.index(program.main) + 1 :] if program.main in command else ()
    named = [word for before, word in pairwise(words) if before == "--config"]
    files = [program.files[word] for word in named if word in program.files]
    return {**values_of_files(files), **values_of_words(words)}


def _parsed_names(scripts: Sequence[Script]) -> frozenset[str] | None:
    """All options of the one parser of dataclasses; None where they are not known."""
    calls = [(script, call) for script in scripts for call in script.calls]
    parsers = [call for _, call in calls if last_name(call.func) in PARSERS]
    lenient = [k for _, call in calls for k in call.keywords if k.arg in _LENIENT]
    if len(parsers) != 1 or lenient or any(script.options for script in scripts):
        return None
    found = {"config", "env", "local_rank"}
    for name in parsed_classes(scripts):
        fields = _fields(scripts, name)
        if fields is None:
            return None
        found |= fields
    return frozenset(found)


def _fields(scripts: Sequence[Script], name: str) -> set[str] | None:
    """The fields of a dataclass with those of its bases."""
    own = class_of(scripts, name)
    if own is None:
        held = signature(name)
        return None if held is None or held.is_open else set(held.names)
    found = {field for field, _ in fields_of(own[1])}
    for base in own[1].bases:
        inner = _fields(scripts, last_name(base) or "") if last_name(base) != name else None
        if inner is None:
            return None
        found |= inner
    return found


def hold_loading(arguments: Arguments, prefix: str, model: str) -> Iterator[CannotStart]:
    """The arguments of loading that neither `from_pretrained` takes nor the model has."""
    held = signature(_LOADING)
    names = [n.removeprefix(prefix) for n in arguments.values if n.startswith(prefix)]
    names = [n for n in names if "." not in n and n.isidentifier()]
    if held is None or "trust_remote_code" in names:
        return  # the model's own code may take more
    config = None
    for name in names:
        if held.takes(name):
            continue
        config = resolve_config(model) if config is None else config
        if not hasattr(config, name):
            argument = arguments.values[f"{prefix}{name}"]
            loader = arguments.title if not prefix else _LOADING
            of = Signature(loader, held.library, held.version, held.names)
            shown = f"{name}={show(argument.value)}"
            text = f"{shown} is not an argument of {of.of}, nor a setting of the model (TypeError)"
            yield CannotStart(f"{text}: {of.instead(name, '')}", argument.where)
