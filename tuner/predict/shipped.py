"""Compiled timelines that come with the package: predictions without PyTorch.

`python -m benchmarks.shipped_timelines` makes the file. It is a zip archive, compressed with LZMA:
for each model a member with all its structures, which are much alike, one with those of search
spaces alone, and one with its optimizer steps; and the versions of the libraries that were traced.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import importlib.util
import io
import json
import lzma
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tuner.core.errors import UnavailableError, install_command
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.cost.compiled import CompiledPasses
from tuner.predict.compiler.optimizer_step import CompiledOptimizer, Trained

FILE = Path(__file__).with_name("shipped.zip")

RANKS = (4, 8, 16, 32, 64, 128, 256)
"""The ranks of LoRA whose optimizer steps ship. Between two of them its numbers follow a line, up
to the rounding of blocks to 512 bytes, but for optimizers that page: they leave parameters of up to
100,000 elements in the GPU's memory (`get_state_buffer` of bitsandbytes/optim/optimizer.py)."""

SHIPPED_OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "sgd",
)
"""The optimizers whose steps ship."""

_VERSIONS = "versions.json"
_PASSES = "passes/"
_SPACES = "spaces/"
_OPTIMIZERS = "optimizers/"
_EVENTS = ".events"
"""Suffix of arrays (E, 2) of block and +1 or -1, which are kept as differences: the events of all
layers are alike then, and compress to a third."""
_COUNTS = "counts"
"""Name of the array (K, C, U) of live blocks at each moment, kept as differences too."""

Steps = tuple[CompiledOptimizer, ...]
"""An optimizer step at each of `RANKS`; one alone where all weights are trained."""


class Shipped:
    """The timelines in one file, read as they are asked for."""

    def __init__(self, file: Path) -> None:
        with _whole(file):
            self._archive = zipfile.ZipFile(file) if file.exists() else None
        self._members: dict[str, Any] = {}
        self._steps: dict[str, dict[str, Steps]] = {}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The libraries that were traced, with their versions; empty where nothing ships."""
        return dict(json.loads(self._read(_VERSIONS) or b"{}"))

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

    def models(self, *, of_spaces: bool = False) -> Iterator[str]:
        """The digests of the models that it has, or of those that it has for search spaces."""
        names = [] if self._archive is None else self._archive.namelist()
        prefix = _SPACES if of_spaces else _PASSES
        yield from (name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def structures(self, model: str, *, of_spaces: bool = False) -> Iterator[str]:
        """The keys of the structures of the model with this digest."""
        arrays = self._arrays((_SPACES if of_spaces else _PASSES) + model)
        yield from dict.fromkeys(name.partition("/")[0] for name in arrays)

    def passes(self, model: str, structure: str) -> CompiledPasses | None:
        """The structure with this key of the model with this digest; None if it is not there."""
        for member in (_PASSES, _SPACES):
            arrays, prefix = self._arrays(member + model), f"{structure}/"
            keys = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
            if keys:
                return CompiledPasses.from_arrays(
                    {key: _unpacked(key, arrays[prefix + key]) for key in keys}
                )
        return None

    def optimizer(
        self, model: str, name: str, trained: Trained, rank: int, *, clip: bool, scaled: bool
    ) -> CompiledOptimizer | None:
        """The step of an optimizer at a rank of LoRA; None if it is not there."""
        key = optimizer_key(name, trained, clip=clip, scaled=scaled)
        found = self.optimizers(model).get(key)
        return None if found is None else _at_rank(found, rank)

    def optimizers(self, model: str) -> dict[str, Steps]:
        """The optimizer steps of the model with this digest, by `optimizer_key`."""
        if model not in self._steps:
            stored = json.loads(self._read(_OPTIMIZERS + model) or b"{}")
            self._steps[model] = {
                key: tuple(CompiledOptimizer.from_dict(step) for step in steps)
                for key, steps in stored.items()
            }
        return self._steps[model]

    def _arrays(self, member: str) -> Any:
        """The arrays of all structures of a member, named `STRUCTURE/ARRAY`."""
        if member not in self._members:
            content = self._read(member)
            self._members[member] = (
                {} if content is None else np.load(io.BytesIO(content), allow_pickle=False)
            )
        return self._members[member]

    def _read(self, name: str) -> bytes | None:
        if self._archive is None:
            return None
        with _whole(Path(str(self._archive.filename))), contextlib.suppress(KeyError):
            return self._archive.read(name)
        return None


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


def optimizer_key(name: str, trained: Trained, *, clip: bool, scaled: bool) -> str:
    """12 hexadecimal digits for a step of an optimizer over parameters at each of `RANKS`."""
    text = json.dumps([repr(OPTIMIZERS[name]), [trained(rank) for rank in RANKS], clip, scaled])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _at_rank(steps: Steps, rank: int) -> CompiledOptimizer | None:
    """The step at a rank, or on the line through its neighbours where there is one."""
    if len(steps) == 1 or rank in RANKS:
        return steps[0 if len(steps) == 1 else RANKS.index(rank)]
    place = bisect.bisect(RANKS, rank)
    if not 0 < place < len(RANKS):
        return None
    low, high = steps[place - 1 : place + 1]
    if len(low.kernels) != len(high.kernels) or high.paged_bytes:
        return None
    share = (rank - RANKS[place - 1]) / (RANKS[place] - RANKS[place - 1])

    def between(first: int, second: int) -> int:
        return max(0, round(first + share * (second - first)))

    return CompiledOptimizer(
        between(low.state_bytes, high.state_bytes),
        between(low.peak_bytes, high.peak_bytes),
        between(low.paged_bytes, high.paged_bytes),
        tuple(
            (one[0], between(one[1], two[1]), between(one[2], two[2]))
            for one, two in zip(low.kernels, high.kernels, strict=True)
        ),
    )


def write(
    file: Path,
    versions: Mapping[str, str],
    passes: Mapping[str, Mapping[str, CompiledPasses]],
    optimizers: Mapping[str, Mapping[str, Steps]],
    spaces: Mapping[str, Mapping[str, CompiledPasses]] = MappingProxyType({}),
) -> None:
    """Write a file of structures and optimizers, by the model's digest and their keys.

    `spaces` are further structures, of search spaces.

    The same content makes the same bytes.
    """
    new = file.with_suffix(".new")  # whoever reads meanwhile has the whole file of before
    with zipfile.ZipFile(new, "w", zipfile.ZIP_LZMA) as archive:
        _add(archive, _VERSIONS, json.dumps(versions, sort_keys=True).encode())
        members = {
            prefix + model: structures
            for prefix, found in ((_PASSES, passes), (_SPACES, spaces))
            for model, structures in sorted(found.items())
        }
        for member, structures in members.items():
            buffer = io.BytesIO()
            arrays = {
                (name, key): _packed(name, array)
                for key, found in structures.items()
                for name, array in found.to_arrays().items()
            }
            # Like arrays stand together: that makes half of the file.
            named = {f"{key}/{name}": arrays[name, key] for name, key in sorted(arrays)}
            np.savez(buffer, **named)
            _add(archive, member, buffer.getvalue())
        for model, steps in sorted(optimizers.items()):
            content = {key: [step.to_dict() for step in each] for key, each in steps.items()}
            _add(archive, _OPTIMIZERS + model, json.dumps(content, sort_keys=True).encode())
    new.replace(file)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name)  # with a date of its own, 1980
    info.compress_type = zipfile.ZIP_LZMA
    archive.writestr(info, content)


def _packed(name: str, array: Any) -> Any:
    if name == _COUNTS:
        return np.diff(array, axis=0, prepend=0).astype(np.int16)
    if name.endswith(_EVENTS):
        return np.diff(2 * array[:, 0] + (array[:, 1] > 0), prepend=0).astype(np.int32)
    if array.dtype.kind == "U":
        return np.frombuffer("\n".join(array).encode(), dtype=np.uint8)
    if array.dtype == np.int64 and np.abs(array).max(initial=0) < 2**31:
        return array.astype(np.int32)
    return array


def _unpacked(name: str, array: Any) -> Any:
    if name == _COUNTS:
        return np.cumsum(array, axis=0, dtype=np.int32)
    if name.endswith(_EVENTS):
        codes = np.cumsum(array, dtype=np.int64)
        return np.stack([codes // 2, 2 * (codes % 2) - 1], axis=1)
    if array.dtype == np.uint8:
        text = array.tobytes().decode()
        return np.array(text.split("\n") if text else [], dtype=np.str_)
    return array.astype(np.int64) if array.dtype == np.int32 and array.ndim else array
