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
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from tuner.core.errors import nearest
from tuner.core.files import user_cache
from tuner.program.sources import DATA, SOURCES, Reader
from tuner.program.standins.tables import Tables

FILE = Path(__file__).with_name("releases.json")

Folders = tuple[str, ...]
"""Folders in which an interpreter finds libraries; () for this interpreter's own."""

_EXPORTING = {"trl": "*/*/", "peft": "*/*/", "accelerate": "*/*/", "transformers": ""}
"""Libraries whose package names every class that it has, with the packages of further ones."""

SHIPPED: Folders = (str(FILE),)
"""No folder: the shipped releases."""


class Library(NamedTuple):
    """One library in the release that a program uses, or the shipped one; rows of a `Reader`."""

    name: str
    release: str
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        """The library and its release, for people: "TRL 1.16"."""
        release = self.release.partition("+")[0].removesuffix(".0")
        return f"{DATA['titles'].get(self.name, self.name)} {release}"

    def is_before(self, release: str) -> bool:
        """True if the release is older."""
        return Version(self.release) < Version(release)


@functools.cache
def library(name: str, folders: Folders = ()) -> Library | None:
    """The library in these folders, or as it is shipped; None if nothing is known of it."""
    shipped = _shipped().get(name)
    there, release = installed(name, folders) if name in SOURCES else (None, "")
    if there is not None and (not shipped or release.partition("+")[0] != shipped["release"]):
        torch = library("torch", folders) if name != "torch" else None
        return Library(name, release, _cached(name, there, release, torch))
    return Library(name, shipped["release"], shipped["rows"]) if shipped else None


@functools.cache
def _shipped() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def installed(name: str, folders: Folders = ()) -> tuple[Path | None, str]:
    """The folder of an installed library and its release, without its code."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = PathFinder.find_spec(name, folders) if folders else importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return None, ""
    folder = Path(spec.origin).parent
    for each in _listed(folder.parent):  # a tenth of the time of importlib.metadata
        if each.startswith(f"{name}-") and each.endswith((".dist-info", ".egg-info")):
            return folder, each[len(name) + 1 : -len(".dist-info")].partition("-py")[0]
    from importlib import metadata  # a third of this module's import

    found = next(iter(metadata.distributions(name=name)), None)  # an editable one
    return (folder, found.version) if found is not None else (None, "")


@functools.cache
def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _cached(name: str, folder: Path, release: str, torch: Library | None) -> Mapping[str, Any]:
    """The rows of an installed library, read once for the files that it has."""
    chosen = Version(torch.release).release[:2] if torch else (0,)
    file = (user_cache() or Path(os.devnull)) / "releases" / f"{name}-{release}-{chosen[-1]}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["files"] == _stamps(known["files"]) and known["torch"] == [*chosen]:
            rows: Mapping[str, Any] = known["rows"]
            return rows
    reader = Reader(name, folder, chosen)
    rows = reader.read()
    with contextlib.suppress(OSError):
        files = [str(path) for path, found in reader.sources.items() if found]
        files += [str(FILE.with_name(own)) for own in ("sources.py", "libraries.json")]
        kept = {"torch": chosen, "files": _stamps(files), "rows": rows}
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(file)
    return rows


def _stamps(files: Collection[str]) -> dict[str, list[int]]:
    states = {name: Path(name).stat() for name in files}
    return {name: [state.st_mtime_ns, state.st_size] for name, state in states.items()}


# -- what they take ---------------------------------------------------------------

TOOLS: Mapping[str, list[str]] = DATA["tools"]
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


def exports(folders: Folders = ()) -> dict[str, dict[str, str]]:
    """By installed library and name of a class: the module that it is imported from.

    "bert*" stands for every name of a model of transformers that begins like it.
    """
    found: dict[str, dict[str, str]] = {}
    for name, inside in _EXPORTING.items():
        folder, _ = installed(name, folders)
        files = [*folder.glob(f"{inside}__init__.py"), folder / "__init__.py"] if folder else ()
        for path in files:
            module = ".".join((name, *path.parent.relative_to(folder or "").parts))
            begin = "A-Za-z" if name == "trl" else "A-Z"
            words = re.findall(rf"\b[{begin}]\w+", path.read_text(encoding="utf-8"))
            found.setdefault(name, {}).update(dict.fromkeys(words, module))
        for path in folder.glob("models/*/") if folder and name == "transformers" else ():
            found[name][f"{path.name.replace('_', '')}*"] = name
    return found


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


# -- what a release lacks ---------------------------------------------------------

RENAMED: Mapping[str, str] = DATA["renamed"]
"""Names of older releases and of other libraries, and what stands in their place."""

IGNORING = ("Axolotl", "transformers.BitsAndBytesConfig")
"""A tool and a class that ignore names that they don't know."""


class Meant(NamedTuple):
    """The argument, with its value, that one of another release or of another class stands for."""

    name: str
    argument: str
    value: Any


def meant(name: str, argument: str, value: Any = None, folders: Folders = ()) -> Meant | None:
    """The argument of the newest release that a given one counts as; None if it is none.

    Of a trainer it may be one of its configuration: SFTTrainer(max_seq_length=512).
    """
    switch = DATA["switches"].get(argument)
    if switch and switch[0] in (names_of(name, SHIPPED) or ()):
        return Meant(name, *switch) if value else None
    is_own = takes(name, argument, folders)
    if name in IGNORING and not is_own:
        return None
    words = argument, _renamed(name, argument)
    for each in (name, *_beside(name)):
        # transformers takes dtype and torch_dtype.
        for word in reversed(words) if argument == "torch_dtype" else words:
            if takes(each, word, SHIPPED):
                return Meant(each, word, value)
    loads = name.endswith("from_pretrained") and argument in DATA["loading"]
    return Meant(name, argument, value) if loads or is_own else None


def _renamed(name: str, argument: str) -> str:
    newest = RENAMED.get(argument, argument)
    return str(DATA["length"].get(name, newest)) if newest == "max_length" else newest


def lacks(name: str, argument: str, shown: str = "...", folders: Folders = ()) -> str | None:
    """A note on an argument that the program's release doesn't take; None if it does.

    "SFTConfig in TRL 1.16 has no max_seq_length (until 0.19): use max_length"
    """
    names = names_of(name, folders)
    if names is None or argument.partition(".")[0] in names:
        return None
    parts = TOOLS.get(name, [name])
    root = parts[0].partition(".")[0]
    of = "" if name in TOOLS else f"{name.rpartition('.')[2]} in "
    when = next((f" ({text})" for each in parts if (text := _history(each, argument))), "")
    update = f"remove it, or update {DATA['titles'].get(root, root)}"
    instead = _instead(name, argument, names, shown, folders)
    near = nearest(argument, names) if not instead and not when else None
    instead = instead or (f"did you mean {near}?" if near else None)
    instead = instead or (update if "since" in when else "remove it")
    ignores = ", and ignores it" if name in IGNORING else ""
    found = library(root, folders)
    return f"{of}{found.title if found else root} has no {argument}{when}{ignores}: {instead}"


def _instead(
    name: str, argument: str, names: Collection[str], shown: str, folders: Folders
) -> str | None:
    if name.endswith("from_pretrained") and argument in DATA["loading"]:
        return f"use {DATA['loading'][argument]}"
    switch, value = DATA["switches"].get(argument, ("", ""))
    if switch in names:
        return f"use {switch}={value!r}"
    older = [old for old, new in RENAMED.items() if new == argument]
    for each in (name, *_beside(name)):
        for word in (_renamed(name, argument), argument, *older):
            if takes(each, word, folders):
                kind = each.rpartition(".")[2]
                return f"use {word}" if each == name else f"use {kind}({word}={shown})"
    return None


def _beside(name: str) -> list[str]:
    """The configuration of a trainer, and the trainer of a configuration."""
    kinds = {"TrainingArguments": ["Trainer"], "Config": ["Trainer"]}
    kinds["Trainer"] = ["Config", "TrainingArguments"]
    pairs = [name.removesuffix(k) + new for k in kinds if name.endswith(k) for new in kinds[k]]
    return [each for each in pairs if known(each)]


def _history(name: str, argument: str) -> str | None:
    """Releases in which a class took an argument: "until 0.19", "until transformers 4.50"."""
    for each in (name, *(its["bases"] if (its := known(name, SHIPPED)) else ())):
        root, _, own = each.partition(".")
        for word in ("until", "since"):
            rows = _shipped().get(root, {}).get(word, {})
            if release := rows.get(own, {}).get(argument):
                title = "" if name.startswith(f"{root}.") else f"{DATA['titles'].get(root, root)} "
                return f"{word} {title}{release}"
    return None
