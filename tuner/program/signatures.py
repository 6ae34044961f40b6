"""The arguments that training libraries take, by version; others end a program with an error.

`python -m benchmarks.signatures` writes `signatures.json` from the source of the libraries.
"""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem, nearest
from tuner.core.expressions import show
from tuner.program.arguments import (
    COMMAND_LINE,
    Argument,
    Arguments,
    Found,
    values_of_files,
    values_of_words,
)
from tuner.program.edit.python_file import last_name, unrolled
from tuner.program.filled import (
    PARSERS,
    class_of,
    fields_of,
    parsed_classes,
    words_behind_script,
)
from tuner.program.keywords import written_in
from tuner.program.names import Script
from tuner.program.program import Program
from tuner.program.setting import NAMES
from tuner.space.models.catalogue import resolve_config

FILE = Path(__file__).with_name("signatures.json")

_TITLES = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}

RENAMED: Mapping[str, tuple[str, ...]] = {
    "evaluation_strategy": ("eval_strategy",),
    "tokenizer": ("processing_class",),
    "warmup_ratio": ("warmup_steps",),  # a share of all steps, where it is below 1
    "no_cuda": ("use_cpu",),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size",),
    "push_to_hub_model_id": ("hub_model_id",),
    "push_to_hub_token": ("hub_token",),
    "use_auth_token": ("token",),
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "alpha": ("lora_alpha",),
    "dropout": ("lora_dropout",),
    "targets": ("target_modules",),
    "lora_target": ("target_modules",),
    "lora_target_modules": ("target_modules",),
    "liger_kernel": ("use_liger_kernel",),
    "use_liger": ("use_liger_kernel",),
    "flash_attention": ("attn_implementation",),
}
"""Names of older versions and of other libraries: what has taken their place."""

_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "from_pretrained": {
        "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
        "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
        "use_flash_attention_2": 'attn_implementation="flash_attention_2"',
    },
    "LLaMA-Factory": dict.fromkeys(NAMES["max_length"], "cutoff_len"),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """The names that a class, function or file takes in one version of its library.

    `is_open` marks one that takes more names without an error.
    """

    name: str
    library: str
    version: str
    names: frozenset[str]
    is_open: bool = False

    @property
    def of(self) -> str:
        """For people: "SFTConfig in TRL 1.16"."""
        title = _TITLES.get(self.library, self.library)
        short = self.version.removesuffix(".0")
        return f"{self.name} in {title} {short}" if self.name != title else f"{title} {short}"

    def takes(self, name: str) -> bool:
        """True if an argument of this name, or its item ("name.item"), is taken."""
        return name.partition(".")[0] in self.names

    def instead(self, name: str, shown: str, beside: Collection[Signature] = ()) -> str:
        """The advice for a name that is not taken, with its value as `shown`.

        `beside` are calls that may take it.
        """
        own = _OTHERWISE.get(self.name.rpartition(".")[2], {})
        if name in own:
            return f"use {own[name]}"
        meant = [name, *_meaning(name)]
        for one in meant:
            if one in self.names:
                return f"use {one}"
        for other in beside:
            for one in meant:
                if one in other.names:
                    return f"use {other.name}({one}={shown})"
        near = nearest(name, self.names)
        return f"did you mean {near}?" if near is not None else "remove it"


def _meaning(name: str) -> Iterator[str]:
    yield from RENAMED.get(name, ())
    for names in NAMES.values():
        if name in names:
            yield from names


@functools.cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def held_versions() -> Mapping[str, str]:
    """The versions of the libraries whose signatures are held, by package."""
    return {name: part["version"] for name, part in _table().items() if name.isidentifier()}


@functools.cache
def signature(name: str) -> Signature | None:
    """The signature of a class, a function or a tool's file; None if unknown."""
    for library, part in _table().items():
        if name in part["takes"]:
            row = part["takes"][name]
            bases = (signature(base) for base in row.get("bases", ()))
            names = frozenset(row["names"].split()).union(*(b.names for b in bases if b))
            return Signature(name, library, part["version"], names, row.get("open", False))
    return None


def beside(name: str, trainer: str = "") -> list[Signature]:
    """The signatures of a trainer for its arguments, and of the arguments for their trainer."""
    other = {"TrainingArguments": "Trainer", "Trainer": "TrainingArguments"}.get(name)
    if other is None:
        swap = ("Trainer", "Config") if name.endswith("Trainer") else ("Config", "Trainer")
        other = name.removesuffix(swap[0]) + swap[1]
    own = trainer.removesuffix("Trainer") + "Config" if name == "TrainingArguments" else ""
    return [found for one in (own, other, trainer) if (found := signature(one)) is not None]


_IGNORING = ("BitsAndBytesConfig", "Axolotl")
"""Calls and files that ignore unknown names."""

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
    if any(imports(script, name) for script in scripts for name in _REPLACING):
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
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if not node.level else []
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return library in (name.partition(".")[0] for name in names)


def imports(script: Script, library: str) -> bool:
    """True for a script that imports a library, or something of it."""
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
    words = words_behind_script(program)
    named = [word for before, word in pairwise(words) if before == "--config"]
    files = [program.files[word] for word in named if word in program.files]
    return {**values_of_files(files), **values_of_words(words)}


def _parsed_names(scripts: Sequence[Script]) -> frozenset[str] | None:
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
