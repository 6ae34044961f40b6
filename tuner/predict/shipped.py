"""Timelines that come with the package: predictions without PyTorch.

`python -m benchmarks.shipped_timelines` makes the file. It is a zip archive, compressed with LZMA:
members for the structures of each model, apart from those of search spaces alone, and for the steps
of its optimizers; the memory of configurations whose replay a search of a space that ships asks
for; and the versions of the libraries that were traced. A member holds several that are alike, as
`GROUPS` says, and its name is their keys: apart they take four times as much.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import json
import lzma
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tuner.core.errors import UnavailableError, install_command
from tuner.core.setup.common import OPTIMIZERS
from tuner.cost.as_arrays import from_arrays, to_arrays
from tuner.cost.sized import OptimizerSteps, SizedTimeline

FILE = Path(__file__).with_name("shipped.zip")

RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
"""The ranks of LoRA whose optimizer steps ship. Between two of them numbers follow a line."""

PAGED_ELEMENTS = 100_000
"""Optimizers that page leave the state of smaller parameters in the GPU's memory
(`get_state_buffer` of bitsandbytes/optim/optimizer.py)."""

SHIPPED_OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
    "sgd",
)  # fmt: skip
"""The optimizers whose steps ship."""

_VERSIONS = "versions.json"
_STRUCTURES = "structures.json"
_MEMORY = "memory.json"
_TIMELINES, _SPACES, _OPTIMIZERS = "timelines", "spaces", "optimizers"
_EVENTS = "events"
"""Arrays (E, 2) of block and +1 or -1, which are kept as differences: the events of all layers are
alike then, and compress to a hundredth."""

GROUPS = {_TIMELINES: 8, _SPACES: 8, _OPTIMIZERS: 24}
"""Number of structures or optimizers in a member: it is about 5 MB before compression, which is
read in 10 ms."""
_WITH = "+"
"""Between the keys in the name of a member."""

Steps = Mapping[int, OptimizerSteps]
"""An optimizer's steps at each of `RANKS`; at 0 alone where all weights are trained."""


class Shipped:
    """The timelines in one file, read as they are asked for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened: dict[int, zipfile.ZipFile] = {}
        self._last: tuple[str, Any] = ("", None)
        self._steps: dict[tuple[str, str], Steps] = {}

    @property
    def _archive(self) -> zipfile.ZipFile | None:
        """The archive, opened by this process: forks share the place in a file."""
        here = os.getpid()
        if here not in self._opened and self._file.exists():
            with _whole(self._file):
                self._opened = {here: zipfile.ZipFile(self._file)}
        return self._opened.get(here)

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The libraries that were traced, with their versions; empty where nothing ships."""
        return dict(json.loads(self.read(_VERSIONS) or b"{}"))

    @property
    def remark(self) -> str:
        """The libraries that its timelines are of, for the method of a prediction."""
        return "traced with " + " ".join(f"{name} {was}" for name, was in self.versions.items())

    def are_installed(self) -> bool:
        """True if tracing here would give the same: the libraries have the same versions."""
        return all(installed_version(name) == was for name, was in self.versions.items())

    @cached_property
    def checksum(self) -> str:
        """Digits for the whole content, which a kept prediction depends on."""
        members = [] if self._archive is None else self._archive.infolist()
        return hashlib.sha256(repr([(m.filename, m.CRC) for m in members]).encode()).hexdigest()

    @cached_property
    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """`Structure.said` of each structure, by its key."""
        return dict(json.loads(self.read(_STRUCTURES) or b"{}"))

    @cached_property
    def memory(self) -> Mapping[str, Mapping[str, Any]]:
        """`Memory` without a context, as a dictionary, by `memory_key`."""
        return dict(json.loads(self.read(_MEMORY) or b"{}"))

    def models(self, *, of_spaces: bool = False) -> Iterator[str]:
        """The digests of the models that it has, or of those that it has for search spaces."""
        yield from dict.fromkeys(model for model, _ in self._member_of[_folder(of_spaces)])

    def structures(self, model: str, *, of_spaces: bool = False) -> Iterator[str]:
        """The keys of the structures of the model with this digest."""
        yield from (key for of, key in self._member_of[_folder(of_spaces)] if of == model)

    def timeline(self, model: str, structure: str) -> SizedTimeline | None:
        """The structure with this key of the model with this digest; None if it is not there."""
        for folder in (_TIMELINES, _SPACES):
            if arrays := self.packed(folder, model, structure):
                return from_arrays(SizedTimeline, _unpacked(arrays))
        return None

    def optimizer(
        self, model: str, name: str, sized: SizedTimeline, rank: int, *, clip: bool, scaled: bool
    ) -> OptimizerSteps | None:
        """The steps of an optimizer at a rank of LoRA; None if they are not there."""
        key = optimizer_key(name, sized, clip=clip, scaled=scaled)
        return _at_rank(self.steps(model, key), rank)

    def optimizers(self, model: str) -> Iterator[str]:
        """The keys of the optimizer steps of the model with this digest."""
        yield from (key for of, key in self._member_of[_OPTIMIZERS] if of == model)

    def steps(self, model: str, key: str) -> Steps:
        """The optimizer steps with this `optimizer_key`; empty if they are not there."""
        if (model, key) not in self._steps:
            arrays = _unpacked(self.packed(_OPTIMIZERS, model, key))
            ranks = dict.fromkeys(int(name.partition(".")[0]) for name in arrays)
            self._steps[model, key] = {
                rank: from_arrays(OptimizerSteps, arrays, str(rank)) for rank in ranks
            }
        return self._steps[model, key]

    def members(self) -> Sequence[str]:
        """The names of all members."""
        return [] if self._archive is None else self._archive.namelist()

    @cached_property
    def _member_of(self) -> Mapping[str, Mapping[tuple[str, str], str]]:
        """By folder: the member that holds what a model has by a key."""
        found: dict[str, dict[tuple[str, str], str]] = {folder: {} for folder in GROUPS}
        for name in self.members():
            if "/" in name:
                folder, model, keys = name.split("/")
                found[folder] |= {(model, key): name for key in keys.split(_WITH)}
        return found

    def packed(self, folder: str, model: str, key: str) -> dict[str, Any]:
        """Arrays as they are in the file; empty if they are not there."""
        member = self._member_of[folder].get((model, key))
        if member is None:
            return {}
        of, arrays = self._last
        if of != member:
            content = self.read(member) or b""
            arrays = np.load(io.BytesIO(content), allow_pickle=False)
            self._last = member, arrays
        start = f"{key}."
        return {n.removeprefix(start): arrays[n] for n in arrays.files if n.startswith(start)}

    def read(self, name: str) -> bytes | None:
        """The content of a member; None if it is not there."""
        archive = self._archive
        with _whole(self._file), contextlib.suppress(KeyError):
            return None if archive is None else archive.read(name)
        return None


def _folder(of_spaces: bool) -> str:
    return _SPACES if of_spaces else _TIMELINES


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[None]:
    """Inside, a file that is cut off or damaged is an `UnavailableError`."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, lzma.LZMAError) as error:
        raise UnavailableError(
            f"{file} is damaged: {error}", hint=f"{install_command('all')} --force-reinstall"
        ) from error


@cache
def shipped() -> Shipped:
    """The file of this installation."""
    return Shipped(FILE)


def installed_version(library: str) -> str | None:
    """The version of a library that is installed, without a build's suffix; None if it is not."""
    try:
        return metadata.version(library).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


@cache
def can_trace() -> bool:
    """True where the libraries that are traced are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def optimizer_key(name: str, sized: SizedTimeline, *, clip: bool, scaled: bool) -> str:
    """12 hexadecimal digits for an optimizer over the parameters of a timeline at `RANKS`."""
    optimizer, *how = map(json.dumps, (repr(OPTIMIZERS[name]), clip, scaled))
    text = ", ".join((optimizer, _trained_text(sized), *how))
    return hashlib.sha256(f"[{text}]".encode()).hexdigest()[:12]


@lru_cache(maxsize=1)  # all optimizers of a timeline are asked for together
def _trained_text(sized: SizedTimeline) -> str:
    return json.dumps([sized.parameters((1, 1, rank, 1)) for rank in RANKS])


def memory_key(*of: Any) -> str:
    """16 hexadecimal digits for a replay: of what training, with which settings."""
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def _at_rank(steps: Steps, rank: int) -> OptimizerSteps | None:
    """The steps at a rank, or on the line through its neighbours where there is one."""
    if 0 in steps or rank in steps or not steps:
        return steps.get(0 if 0 in steps else rank)
    place = bisect.bisect(RANKS, rank)
    if not 0 < place < len(RANKS):
        return None
    low, high = (steps[each] for each in RANKS[place - 1 : place + 1])
    alike = ("events", "times", "names", "kinds", "dtypes")
    if not all(np.array_equal(getattr(low, name), getattr(high, name)) for name in alike):
        return None
    share = (rank - RANKS[place - 1]) / (RANKS[place] - RANKS[place - 1])

    def between(name: str) -> Any:
        first, second = getattr(low, name), getattr(high, name)
        return (first + share * (second - first)).round().astype(np.int64)

    numbers = {name: between(name) for name in ("sizes_bytes", "flops", "moved_bytes")}
    # Ranks double: one power of two is the bytes of an element that is paged at the higher alone.
    item_bytes = 2 ** np.floor(np.log2(np.maximum(high.sizes_bytes / PAGED_ELEMENTS, 1)))
    is_high = numbers["sizes_bytes"] >= item_bytes * PAGED_ELEMENTS
    labels = np.where(is_high[:, None], high.blocks.labels, low.blocks.labels)
    blocks = dataclasses.replace(low.blocks, labels=labels)
    return dataclasses.replace(low, blocks=blocks, **numbers)


def write(  # noqa: PLR0913 - one argument for each kind of member
    file: Path,
    versions: Mapping[str, str],
    timelines: Mapping[str, Mapping[str, SizedTimeline]],
    optimizers: Mapping[str, Mapping[str, Steps]],
    spaces: Mapping[str, Mapping[str, SizedTimeline]] = MappingProxyType({}),
    said: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    memory: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    *,
    keep: bool = False,
) -> None:
    """Write a file of structures and optimizers, by the model's digest and their keys.

    `spaces` are further structures, of search spaces; `said` and `memory` as in `Shipped`. To
    `keep` leaves what the file has beside them.

    The same content makes the same bytes.
    """
    before = Shipped(file)
    new = file.with_suffix(".new")  # whoever reads meanwhile has the whole file of before
    added: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for folder, found in ((_TIMELINES, timelines), (_SPACES, spaces)):
        for model, structures in found.items():
            each = added.setdefault((folder, model), {})
            each |= {key: _packed(to_arrays(sized)) for key, sized in structures.items()}
    for model, by_key in optimizers.items():
        each = added.setdefault((_OPTIMIZERS, model), {})
        for key, steps in by_key.items():
            arrays = {rank: _packed(to_arrays(one)) for rank, one in steps.items()}
            each[key] = {f"{rank}.{n}": a for rank, one in arrays.items() for n, a in one.items()}
    told = {**(before.said if keep else {}), **said}
    kept: list[str] = []
    for name in before.members() if keep else ():
        folder, _, rest = name.partition("/")
        model, _, keys = rest.partition("/")
        if (folder, model) not in added:
            kept += [name] if rest else []
            continue
        for key in keys.split(_WITH):  # they are grouped again with what is added
            added[folder, model].setdefault(key, before.packed(folder, model, key))
    with zipfile.ZipFile(new, "w", zipfile.ZIP_LZMA) as archive:
        _add(archive, _VERSIONS, json.dumps(versions, sort_keys=True).encode())
        _add(archive, _STRUCTURES, json.dumps(told, sort_keys=True).encode())
        replays = {**(before.memory if keep else {}), **memory}
        _add(archive, _MEMORY, json.dumps(dict(sorted(replays.items()))).encode())
        groups = {
            f"{folder}/{model}/{_WITH.join(keys)}": {key: members[key] for key in keys}
            for (folder, model), members in added.items()
            for keys in _groups(members, told, GROUPS[folder])
        }
        for name in sorted({*groups, *kept}):
            if name in groups:
                every = {
                    f"{key}.{n}": a for key, one in groups[name].items() for n, a in one.items()
                }
                buffer = io.BytesIO()
                np.savez(buffer, **{array: every[array] for array in sorted(every, key=_alike)})
                _add(archive, name, buffer.getvalue())
            else:
                _add(archive, name, before.read(name) or b"")
    new.replace(file)


def _groups(
    members: Mapping[str, Mapping[str, Any]], said: Mapping[str, Any], size: int
) -> Iterator[Sequence[str]]:
    """The keys of members that are alike: by what is said of a structure, an optimizer by size."""

    def order(key: str) -> tuple[str, int, str]:
        told = json.dumps(said.get(key, {}), sort_keys=True)
        return told, sum(array.nbytes for array in members[key].values()), key

    keys = sorted(members, key=order)
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _alike(name: str) -> tuple[str, str]:
    """Orders arrays so that those stand together that compress to one: all keys' and ranks'."""
    return name.partition(".")[2].lstrip("0123456789."), name


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name)  # with a date of its own, 1980
    info.compress_type = zipfile.ZIP_LZMA
    archive.writestr(info, content)


def _packed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _pack(name, array) for name, array in arrays.items()}


def _unpacked(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _unpack(name, array) for name, array in arrays.items()}


def _pack(name: str, array: Any) -> Any:
    if name.endswith(_EVENTS):
        return np.diff(2 * array[:, 0] + (array[:, 1] > 0), prepend=0).astype(np.int32)
    if array.dtype.kind == "U":
        return np.frombuffer("\n".join(array).encode(), dtype=np.uint8)
    if array.dtype.kind == "i" and array.ndim:
        most = int(np.abs(array).max(initial=0))
        kinds = (kind for kind in (np.int16, np.int32, np.int64) if most <= np.iinfo(kind).max)
        return array.astype(next(kinds))
    return array


def _unpack(name: str, array: Any) -> Any:
    if name.endswith(_EVENTS):
        codes = np.cumsum(array, dtype=np.int64)
        return np.stack([codes // 2, 2 * (codes % 2) - 1], axis=1)
    if array.dtype == np.uint8:
        text = array.tobytes().decode()
        return np.array(text.split("\n") if text else [], dtype=np.str_)
    return array.astype(np.int64) if array.dtype.kind == "i" and array.ndim else array
