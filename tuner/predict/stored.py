"""What compiling leaves on disk, read back where it is sound; what is not is deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tuner.core.records import Prediction
from tuner.cost.compiled import CompiledPasses, Replayed, Replays
from tuner.predict import cache
from tuner.predict.compiler.optimizer_step import CompiledOptimizer, compile_optimizer
from tuner.predict.compiler.overhead import Point


def read_passes(entry: str) -> CompiledPasses | None:
    """The compiled structure in this entry; None where there is none that is whole."""
    arrays = cache.read_arrays(entry)
    if arrays is None:
        return None
    try:
        return CompiledPasses.from_arrays(arrays)
    except (KeyError, TypeError, ValueError, IndexError):
        cache.delete(entry)
        return None


def read_replays(entry: str) -> dict[Point, Replays]:
    """The replays in this entry, by point."""
    return _read(entry, _replays) or {}


def _replays(stored: Any) -> dict[Point, Replays]:
    return {
        tuple(map(int, point)): (Replayed(*map(int, once)), Replayed(*map(int, more)))
        for *point, once, more in stored
    }


def read_optimizer(entry: str) -> CompiledOptimizer | None:
    """The compiled optimizer step in this entry; None where there is none that is whole."""
    return _read(entry, CompiledOptimizer.from_dict)


def read_prediction(entry: str) -> Prediction | None:
    """The prediction in this entry; None where there is none that is whole."""
    return _read(entry, Prediction.from_dict)


_Stored = TypeVar("_Stored")


def _read(entry: str, parse: Callable[[Any], _Stored]) -> _Stored | None:
    """What `parse` makes of the JSON in this entry; deleted where it makes nothing of it."""
    stored = cache.read_json(entry)
    if stored is None:
        return None
    try:
        return parse(stored)
    except (KeyError, TypeError, ValueError):
        cache.delete(entry)
        return None


def build_optimizer(
    entry: str, name: str, sizes: Sequence[tuple[int, int, str]], *, clip: float, scaled: bool
) -> CompiledOptimizer:
    """Compile the step of an optimizer over parameters of (numel, count, kind), and store it."""
    trainable: Counter[tuple[int, str]] = Counter()
    for numel, count, kind in sizes:
        trainable[numel, kind] += count
    compiled = compile_optimizer(name, trainable, max_grad_norm=clip, scaled=scaled)
    cache.write_json(entry, compiled.to_dict())
    return compiled
