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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tuner.core.files import user_cache
from tuner.program.sources import SOURCES, Reader

FILE = Path(__file__).with_name("releases.json")

_TITLES = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}

_FORMAT = 1
"""The form of the cached files."""

Folders = tuple[str, ...]
"""Where a program's interpreter finds its libraries; () for those of this one."""


@dataclass(frozen=True, slots=True)
class Library:
    """One library in the release that a program uses, or the shipped one if it has none.

    `rows` are those of `sources.Reader.classes`.
    """

    name: str
    release: str
    is_installed: bool
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        """The library and its release, for people: "TRL 1.16"."""
        return f"{_TITLES.get(self.name, self.name)} {self.release.removesuffix('.0')}"

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
            return folder, each[len(name) + 1 : -len(".dist-info")]
    for file in (folder / "version.py", folder / "__init__.py"):
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if said := re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE):
            return folder, said[1]
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
    rows = reader.read(SOURCES[name])
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


@functools.cache
def _class(name: str, folders: Folders) -> Mapping[str, Any] | None:
    """One class or function with what it has of its bases; None if it is unknown."""
    root, _, own = name.partition(".")
    found = library(root, folders)
    row = found.rows.get(own) if found else None
    if row is None:
        return None
    whole: dict[str, Any] = {"fields": {}, "bases": [], "open": False, "also": "", "contrary": {}}
    inner = [(base, _class(base, folders)) for base in row.get("bases", ())]
    for base, its in reversed(inner):
        whole["bases"] = [base, *(its["bases"] if its else ()), *whole["bases"]]
        if its and "call" not in row:
            whole["fields"] |= its["fields"]
            whole["contrary"] |= its["contrary"]
            whole |= {key: its[key] for key in ("open", "also", "parameters") if key in its}
    own_fields = {key: _field(value) for key, value in row.get("fields", {}).items()}
    whole["fields"] |= own_fields
    whole["contrary"] |= row.get("contrary", {})
    if "call" in row:
        whole["parameters"] = list(own_fields)[: len(own_fields) - row["call"]]
    whole["bases"] = list(dict.fromkeys(whole["bases"]))
    return whole | {key: row[key] for key in ("open", "also") if key in row}


def _field(value: str | Sequence[Any]) -> dict[str, Any]:
    """A field of a row: a type alone has None as its default."""
    if isinstance(value, str):
        return {"default": None, "type": value}
    return {"type": value[0]} if len(value) == 1 else {"default": value[1], "type": value[0]}


def classes(libraries: Collection[str], folders: Folders = ()) -> dict[str, Mapping[str, Any]]:
    """Everything that is known of these libraries, by "trl.SFTConfig".

    "fields" have a "default", unless they have to be given, and a "type"; "parameters" are the
    positional ones of what is no dataclass; "bases" are all of them; "open" ones take more names;
    "contrary" names switches that, where None, are the contrary of another (bf16 of fp16).
    """
    found = {name: known.rows for name in libraries if (known := library(name, folders))}
    names = [f"{name}.{one}" for name, rows in found.items() for one in rows]
    return {name: row for name in names if (row := _class(name, folders)) is not None}


def releases(libraries: Collection[str] = (*SOURCES,), folders: Folders = ()) -> dict[str, str]:
    """The releases of these libraries: installed ones, else the shipped."""
    return {n: known.release for n in libraries if (known := library(n, folders)) is not None}


def names_of(name: str, folders: Folders = ()) -> frozenset[str] | None:
    """Every name that a class or function takes; None if it is unknown."""
    found = _class(name, folders)
    return frozenset((*found["fields"], *found["also"].split())) if found else None


def takes(name: str, argument: str, folders: Folders = ()) -> bool | None:
    """True if an argument, or its item ("name.item"), is one of a class; None if it is unknown."""
    names = names_of(name, folders)
    return None if names is None else argument.partition(".")[0] in names


def default(name: str, argument: str, folders: Folders = ()) -> Any:
    """The default of an argument; {"$unknown": ...} if it has none, or none that is known."""
    found = _class(name, folders)
    field = found["fields"].get(argument, {}) if found else {}
    return field.get("default", {"$unknown": f"{name} {argument}"})


def describe(name: str, folders: Folders = ()) -> str:
    """The library and the release that its defaults are of, for people: "TRL 1.16"."""
    found = library(name, folders)
    return found.title if found else name
