"""The configurations and functions of training libraries: what they take, and their defaults.

They are those of your own releases, read from the installed source, which is not imported. For a
library that isn't installed, `releases.json` has the last release: `python -m benchmarks.releases`
writes it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tuner.core.errors import nearest
from tuner.core.files import user_cache
from tuner.program.sources import SOURCES, Reader
from tuner.program.standins.tables import Tables

FILE = Path(__file__).with_name("releases.json")

_TITLES = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}

_FORMAT = 1
"""The form of the cached files."""

Folders = tuple[str, ...]
"""Where a program's interpreter finds its libraries; () for those of this one."""

SHIPPED: Folders = (str(FILE),)
"""No folder: the shipped releases."""


@dataclass(frozen=True, slots=True)
class Library:
    """One library in the release that a program uses, or the shipped one if it has none.

    `rows` are those of `sources.Reader`.
    """

    name: str
    release: str
    is_installed: bool
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        """The library and its release, for people: "TRL 1.16"."""
        release = self.release.partition("+")[0].removesuffix(".0")
        return f"{_TITLES.get(self.name, self.name)} {release}"

    def is_before(self, release: str) -> bool:
        """True if the release is older."""
        return _version(self.release) < Version(release)


@functools.cache
def library(name: str, folders: Folders = ()) -> Library | None:
    """The library in these folders, or as it is shipped; None if nothing is known of it."""
    shipped = _shipped().get(name)
    there, release = _place(name, folders) if name in SOURCES else (None, "")
    if there is None or (shipped is not None and release.partition("+")[0] == shipped["release"]):
        if shipped is None:
            return None
        return Library(name, shipped["release"], there is not None, shipped["rows"])
    torch = library("torch", folders) if name != "torch" else None
    of_torch = ".".join(map(str, _version(torch.release).release[:2])) if torch else "0"
    return Library(name, release, True, _cached(name, there, release, of_torch))


@functools.cache
def _shipped() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _place(name: str, folders: Folders) -> tuple[Path | None, str]:
    """The folder of an installed library and its release, without its code."""
    folder = next((p for f in folders if (p := Path(f, name)).is_dir()), None)
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name) if not folders else None
        folder = Path(spec.origin).parent if spec and spec.origin else folder
    if folder is None or not (folder / "__init__.py").is_file():
        return None, ""
    for each in _listed(folder.parent):  # a tenth of the time of importlib.metadata
        if each.startswith(f"{name}-") and each.endswith((".dist-info", ".egg-info")):
            return folder, each[len(name) + 1 : -len(".dist-info")].partition("-py")[0]
    for file in (folder / "version.py", folder / "__init__.py"):
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if said := re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE):
            return folder, said[1]
    from importlib import metadata  # a third of this module's import

    with contextlib.suppress(metadata.PackageNotFoundError):
        return folder, metadata.version(name)
    return None, ""


@functools.cache
def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _cached(name: str, folder: Path, release: str, torch: str) -> Mapping[str, Any]:
    """The rows of an installed library, read once for the files that it has."""
    cache = user_cache()
    file = cache / "releases" / f"{name}-{release}-torch{torch}.json" if cache else None
    if file is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["format"] == _FORMAT and known["files"] == _stamps(folder, known["files"]):
                rows: Mapping[str, Any] = known["rows"]
                return rows
    reader = Reader(name, folder, [int(part) for part in torch.split(".")])
    rows = reader.read()
    if file is not None:
        files = [str(path.relative_to(folder)) for path, found in reader.sources.items() if found]
        written = {"format": _FORMAT, "files": _stamps(folder, files), "rows": rows}
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(written), encoding="utf-8")
            draft.replace(file)
    return rows


def _stamps(folder: Path, files: Collection[str]) -> dict[str, list[int]]:
    states = {name: (folder / name).stat() for name in files}
    return {name: [state.st_mtime_ns, state.st_size] for name, state in states.items()}


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


# -- what they take ---------------------------------------------------------------

TOOLS: Mapping[str, tuple[str, ...]] = {
    "TRL": (
        "trl.SFTConfig", "trl.ScriptArguments", "trl.ModelConfig", "trl.DatasetMixtureConfig",
        "accelerate.launch_command_parser",
    ),
    "Axolotl": ("axolotl.AxolotlInputConfig",),
    "LLaMA-Factory": tuple(
        f"llamafactory.{name}Arguments"
        for name in ("Model", "Data", "Training", "Finetuning", "Generating")
    ),
}  # fmt: skip
"""By tool: the classes that its file of settings fills."""


@functools.cache
def _tables(folders: Folders) -> Tables:
    def row(name: str) -> Mapping[str, Any] | None:
        root, _, own = name.partition(".")
        return found.rows.get(own) if (found := library(root, folders)) else None

    return Tables(row)


def known(name: str, folders: Folders = ()) -> Mapping[str, Any] | None:
    """A class or function as `Tables` describes it; None if it is unknown."""
    return _tables(folders).get(name)


def classes(libraries: Collection[str], folders: Folders = ()) -> dict[str, Mapping[str, Any]]:
    """The rows of these libraries, by "trl.SFTConfig", for the `Tables` of another process."""
    found = {name: its.rows for name in libraries if (its := library(name, folders)) is not None}
    return {f"{name}.{one}": row for name, rows in found.items() for one, row in rows.items()}


def releases(libraries: Collection[str] = (*SOURCES,), folders: Folders = ()) -> dict[str, str]:
    """The releases of these libraries: installed ones, else the shipped."""
    return {n: its.release for n in libraries if (its := library(n, folders)) is not None}


def names_of(name: str, folders: Folders = ()) -> frozenset[str] | None:
    """Every name that a class, a function or a tool's file takes; None if it is unknown."""
    if name in TOOLS:
        parts = [names_of(each, folders) or () for each in TOOLS[name]]
        own = ("env", "accelerate_config", "config") if name == "TRL" else ()
        return frozenset(own).union(*parts)
    row = known(name, folders)
    return frozenset((*row["fields"], *row["also"].split())) if row else None


def takes(name: str, argument: str, folders: Folders = ()) -> bool | None:
    """True if an argument, or its item ("name.item"), is taken; None for an unknown class."""
    names = names_of(name, folders)
    return None if names is None else argument.partition(".")[0] in names


def default(name: str, argument: str, folders: Folders = ()) -> Any:
    """The default of an argument; {"$unknown": ...} if it has none, or none that is known."""
    row = known(name, folders)
    its = row["fields"].get(argument, {}) if row else {}
    return its.get("default", {"$unknown": f"{name} {argument}"})


def describe(name: str, folders: Folders = ()) -> str:
    """A library with the release that its defaults are of, for people: "TRL 1.16"."""
    found = library(name, folders)
    return found.title if found else name


# -- what a release lacks ---------------------------------------------------------

_RENAMED = """
evaluation_strategy eval_strategy, tokenizer processing_class, max_seq_length max_length,
use_liger use_liger_kernel, liger_kernel use_liger_kernel, torch_dtype dtype, no_cuda use_cpu,
per_gpu_train_batch_size per_device_train_batch_size, use_auth_token token,
per_gpu_eval_batch_size per_device_eval_batch_size, warmup_ratio warmup_steps,
use_num_logits_to_keep use_logits_to_keep, push_to_hub_model_id hub_model_id,
push_to_hub_token hub_token, torchdynamo torch_compile_backend, padding_value pad_token,
lr learning_rate, epochs num_train_epochs, num_epochs num_train_epochs, rank r, alpha lora_alpha,
dropout lora_dropout, targets target_modules, lora_target target_modules,
lora_target_modules target_modules, flash_attention attn_implementation
"""
RENAMED: Mapping[str, str] = dict(pair.split() for pair in _RENAMED.split(","))
"""Names of older releases and of other libraries, and what stands in their place."""

_SWITCHES = {
    "adafactor": ("optim", "adafactor"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
}
"""Switches of older releases that are a value now."""

_LENGTH = {"Axolotl": "sequence_len", "LLaMA-Factory": "cutoff_len"}
_IGNORING = ("Axolotl", "transformers.BitsAndBytesConfig")
"""What ignores names that it doesn't know."""

_LOADING = {
    "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2"',
}


@dataclass(frozen=True, slots=True)
class Meant:
    """The argument, with its value, that one of another release or of another class stands for."""

    name: str
    argument: str
    value: Any


def meant(name: str, argument: str, value: Any = None, folders: Folders = ()) -> Meant | None:
    """The argument of the newest release that a given one counts as; None if it is none.

    Of a trainer it may be one of its configuration: SFTTrainer(max_seq_length=512).
    """
    if argument in _SWITCHES and _SWITCHES[argument][0] in (names_of(name, SHIPPED) or ()):
        return Meant(name, *_SWITCHES[argument]) if value else None
    if name in _IGNORING and not takes(name, argument, folders):
        return None
    words = argument, _renamed(name, argument)
    for each in (name, *_beside(name)):
        # transformers takes dtype and torch_dtype.
        for word in reversed(words) if argument == "torch_dtype" else words:
            if takes(each, word, SHIPPED):
                return Meant(each, word, value)
    loads = name.endswith("from_pretrained") and argument in _LOADING
    return Meant(name, argument, value) if loads or takes(name, argument, folders) else None


def _renamed(name: str, argument: str) -> str:
    newest = RENAMED.get(argument, argument)
    return _LENGTH.get(name, newest) if newest == "max_length" else newest


def lacks(name: str, argument: str, shown: str = "...", folders: Folders = ()) -> str | None:
    """A note on an argument that the program's release doesn't take; None if it does.

    "SFTConfig in TRL 1.16 has no max_seq_length (until 0.19): use max_length"
    """
    names = names_of(name, folders)
    if names is None or argument.partition(".")[0] in names:
        return None
    root = (TOOLS[name][0] if name in TOOLS else name).partition(".")[0]
    of = "" if name in TOOLS else f"{name.rpartition('.')[2]} in "
    past = (_history(each, argument) for each in TOOLS.get(name, (name,)))
    when = next((f" ({text})" for text in past if text), "")
    ignores = ", and ignores it" if name in _IGNORING else ""
    instead = _instead(name, argument, names, shown, folders)
    if instead is None:
        update = f", or update {_TITLES.get(root, root)}" if "since" in when else ""
        instead = f"remove it{update}"
    return f"{of}{describe(root, folders)} has no {argument}{when}{ignores}: {instead}"


def _instead(
    name: str, argument: str, names: Collection[str], shown: str, folders: Folders
) -> str | None:
    if name.endswith("from_pretrained") and argument in _LOADING:
        return f"use {_LOADING[argument]}"
    switch, word = _SWITCHES.get(argument, ("", ""))
    if switch in names:
        return f"use {switch}={word!r}"
    older = [old for old, new in RENAMED.items() if new == argument]
    for each in (name, *_beside(name)):
        for other in (_renamed(name, argument), argument, *older):
            if takes(each, other, folders):
                kind = each.rpartition(".")[2]
                return f"use {other}" if each == name else f"use {kind}({other}={shown})"
    near = nearest(argument, names)
    return f"did you mean {near}?" if near is not None else None


def _beside(name: str) -> list[str]:
    """The configuration of a trainer, and the trainer of a configuration."""
    kinds = {"TrainingArguments": ["Trainer"], "Config": ["Trainer"]}
    kinds["Trainer"] = ["Config", "TrainingArguments"]
    pairs = [name.removesuffix(k) + new for k in kinds if name.endswith(k) for new in kinds[k]]
    return [each for each in pairs if known(each)]


def _history(name: str, argument: str) -> str | None:
    """When a class took an argument: "until 0.19", "until transformers 4.50"; None if unknown."""
    for each in (name, *(its["bases"] if (its := known(name, SHIPPED)) else ())):
        root, _, own = each.partition(".")
        for word in ("until", "since"):
            rows = _shipped().get(root, {}).get(word, {})
            if release := rows.get(own, {}).get(argument):
                title = "" if name.startswith(f"{root}.") else f"{_TITLES.get(root, root)} "
                return f"{word} {title}{release}"
    return None
