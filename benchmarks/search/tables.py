"""A search space as arrays: what the searcher is told, one entry per configuration."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.core.errors import TunerError
from tuner.core.host import usable_cpus
from tuner.core.records import Configuration, Prediction
from tuner.predict.predict import check_supported
from tuner.predict.predictor import SpacePredictor
from tuner.space import SearchSpace, configure, list_spaces, load_space
from tuner.space.gpus import get_gpu

Floats = NDArray[np.float64]

SAMPLES_PER_S, DEVICE, LOADED, STEP, MARGIN, LIMIT = (
    "samples_per_s",
    "device_bytes",
    "loaded_bytes",
    "step_s",
    "margin_bytes",
    "limit_bytes",
)
SHARE = "share_of_step:"
"""Prefix of the arrays that hold the predicted share of a kind of work in the step time."""


@dataclass(frozen=True)
class Table:
    """One space on one GPU, narrowed by the space's floors, with the prediction of each entry.

    `knobs` are those with more than one value. The arrays have one entry per configuration.
    """

    name: str
    configurations: tuple[Configuration, ...]
    knobs: tuple[str, ...]
    baseline: Configuration | None
    arrays: dict[str, Floats]
    limit_bytes: float
    margin_bytes: float

    @property
    def kinds(self) -> dict[str, Floats]:
        """Predicted share of each kind of work in the step time, by kind."""
        return {k.removeprefix(SHARE): v for k, v in self.arrays.items() if k.startswith(SHARE)}

    def column(self, knob: str) -> list[object]:
        """The value of a knob in each configuration."""
        return [configuration[knob] for configuration in self.configurations]


def tables(names: Sequence[str], gpus: Sequence[str], *, fresh: bool = False) -> list[Table]:
    """The tables of the named spaces (all shipped ones without names), on `gpus` or their own.

    A space that the estimator cannot predict is left out, and a line says why.
    """
    found: list[Table] = []
    for name in names or [info.name for info in list_spaces()]:
        space = load_space(name)
        for gpu in gpus or space.gpus:
            try:
                found.append(load_table(space, gpu, fresh=fresh))
            except TunerError as error:
                print(f"{name} on {gpu} is left out: {error}")
    return found


def load_table(space: SearchSpace, gpu_id: str, *, fresh: bool = False) -> Table:
    """The table of one space on one GPU, from the cache where it is there.

    The cache is keyed by the configurations, in all stages, the model and the GPU only: a table
    stays as good a world when the estimator has changed since. `fresh` predicts it anew.
    """
    gpu = get_gpu(gpu_id)
    configurations = tuple(c for c in space.configurations() if not check_supported(c, gpu))
    named = [sorted((s, c.key) for s, c in space.stage_configurations(c).items()) or c.key
             for c in configurations]  # fmt: skip
    work = [(stage.name, stage.examples) for stage in space.stages]
    digest = hashlib.sha256(json.dumps([space.model, work, named]).encode())
    path = cache_folder() / f"{space.name}-{gpu_id}-{digest.hexdigest()[:16]}.npz"
    if fresh or not path.exists():
        arrays = _predicted(space, configurations, gpu_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    limit, margin = float(arrays.pop(LIMIT)[0]), float(arrays.pop(MARGIN)[0])
    return Table(
        name=f"{space.name} on {gpu_id}",
        configurations=configurations,
        knobs=tuple(n for n in space.knobs if len({c[n] for c in configurations}) > 1),
        baseline=configure(space) if space.baseline else None,
        arrays=arrays,
        limit_bytes=limit,
        margin_bytes=margin,
    )


def _predicted(
    space: SearchSpace, configurations: Sequence[Configuration], gpu_id: str
) -> dict[str, Floats]:
    print(f"predicting {len(configurations)} configurations of {space.name} on {gpu_id} ...")
    if space.model is None:
        raise TunerError(f"space {space.name!r} names no model")
    predictor = SpacePredictor(space, get_gpu(gpu_id), workers=usable_cpus())
    return arrays_of([each.prediction for each in predictor.predict(configurations)])


def arrays_of(predictions: Sequence[Prediction]) -> dict[str, Floats]:
    """What a table keeps of predictions."""
    kinds = sorted({kind for p in predictions for kind in p.speed.breakdown_s})
    values = {
        SAMPLES_PER_S: [p.speed.samples_per_s for p in predictions],
        DEVICE: [p.memory.device_bytes for p in predictions],
        LOADED: [p.memory.loaded_bytes for p in predictions],
        STEP: [p.speed.step_s for p in predictions],
        MARGIN: [p.budget.margin_bytes for p in predictions],
        LIMIT: [p.budget.limit_bytes for p in predictions],
    }
    for kind in kinds:
        values[SHARE + kind] = [
            p.speed.breakdown_s.get(kind, 0.0) / p.speed.step_s for p in predictions
        ]
    return {name: np.array(column, dtype=float) for name, column in values.items()}


def cache_folder() -> Path:
    """Where arrays of predictions are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tuner" / "search-benchmark"
