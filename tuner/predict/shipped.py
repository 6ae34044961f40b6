"""Compiled timelines that come with the package: predictions without PyTorch.

`python -m benchmarks.shipped_timelines` makes the file. It is a zip archive, compressed with LZMA:
a member for each structure, one for the optimizers of each model, and one with the versions of
the libraries that were traced.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tuner.cost.compiled import CompiledPasses
from tuner.predict.compiler.optimizer_step import CompiledOptimizer

FILE = Path(__file__).with_name("shipped.zip")

_VERSIONS = "versions.json"
_PASSES = "passes/"
_EVENTS = ".events"
"""Suffix of arrays (E, 2) of block and +1 or -1, which are kept as differences: the events of all
layers are alike then, and compress to a third."""


class Shipped:
    """The timelines in one file, read as they are asked for."""

    def __init__(self, file: Path) -> None:
        self._archive = zipfile.ZipFile(file) if file.exists() else None
        self._steps: dict[str, dict[str, CompiledOptimizer]] = {}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The libraries that were traced, with their versions; empty where nothing ships."""
        return dict(json.loads(self._read(_VERSIONS) or b"{}"))

    @property
    def remark(self) -> str:
        """The libraries that its timelines are of, for the method of a prediction."""
        return "traced with " + " ".join(f"{name} {was}" for name, was in self.versions.items())

    def everything(
        self,
    ) -> tuple[dict[tuple[str, str], CompiledPasses], dict[str, dict[str, CompiledOptimizer]]]:
        """All structures by digest of the model and key, and all optimizers by digest and key."""
        names = [] if self._archive is None else self._archive.namelist()
        keys = [tuple(name.split("/")[1:]) for name in names if name.startswith(_PASSES)]
        passes = {
            (model, structure): found
            for model, structure in keys
            if (found := self.passes(model, structure)) is not None
        }
        return passes, {model: self._optimizers(model) for model, _ in keys}

    def passes(self, model: str, structure: str) -> CompiledPasses | None:
        """The structure with this key of the model with this digest; None if it is not there."""
        content = self._read(_passes_name(model, structure))
        if content is None:
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return CompiledPasses.from_arrays({k: _unpacked(k, arrays[k]) for k in arrays.files})

    def optimizer(self, model: str, key: str) -> CompiledOptimizer | None:
        """The optimizer step of a model with this `optimizer_key`; None if it is not there."""
        return self._optimizers(model).get(key)

    def _optimizers(self, model: str) -> dict[str, CompiledOptimizer]:
        if model not in self._steps:
            stored = json.loads(self._read(_optimizers_name(model)) or b"{}")
            self._steps[model] = {
                key: CompiledOptimizer.from_dict(step) for key, step in stored.items()
            }
        return self._steps[model]

    def _read(self, name: str) -> bytes | None:
        if self._archive is None:
            return None
        try:
            return self._archive.read(name)
        except KeyError:
            return None


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


def optimizer_key(
    name: str, sizes: Sequence[tuple[int, int, str]], *, clip: bool, scaled: bool
) -> str:
    """12 hexadecimal digits for an optimizer step over parameters of (numel, count, kind)."""
    text = json.dumps([name, [list(size) for size in sizes], clip, scaled])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write(
    file: Path,
    versions: Mapping[str, str],
    passes: Mapping[tuple[str, str], CompiledPasses],
    optimizers: Mapping[str, Mapping[str, CompiledOptimizer]],
) -> None:
    """Write a file of structures by digest of the model and key, and optimizers by digest and key.

    The same content makes the same bytes.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        _add(archive, _VERSIONS, json.dumps(versions, sort_keys=True).encode())
        for (model, structure), found in sorted(passes.items(), key=lambda item: item[0]):
            buffer = io.BytesIO()
            arrays = {key: _packed(key, array) for key, array in found.to_arrays().items()}
            np.savez(buffer, **arrays)
            _add(archive, _passes_name(model, structure), buffer.getvalue())
        for model, steps in sorted(optimizers.items()):
            content = {key: step.to_dict() for key, step in sorted(steps.items())}
            _add(archive, _optimizers_name(model), json.dumps(content).encode())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name)  # with a date of its own, 1980
    info.compress_type = zipfile.ZIP_LZMA
    archive.writestr(info, content)


def _passes_name(model: str, structure: str) -> str:
    return f"{_PASSES}{model}/{structure}"


def _optimizers_name(model: str) -> str:
    return f"optimizers/{model}"


def _packed(name: str, array: Any) -> Any:
    if name.endswith(_EVENTS):
        return np.diff(2 * array[:, 0] + (array[:, 1] > 0), prepend=0).astype(np.int32)
    if array.dtype == np.int64 and np.abs(array).max(initial=0) < 2**31:
        return array.astype(np.int32)
    return array


def _unpacked(name: str, array: Any) -> Any:
    if name.endswith(_EVENTS):
        codes = np.cumsum(array, dtype=np.int64)
        return np.stack([codes // 2, 2 * (codes % 2) - 1], axis=1)
    return array.astype(np.int64) if array.dtype == np.int32 and array.ndim else array
