"""The results of one search space on several GPU types, side by side.

What another GPU type came to is read from the files that its own search left: the front in
`pareto.csv` and the recommendation in `best.yaml`. Nothing is worked out anew, so each keeps the
conditions it was searched under.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.core.errors import InputError
from tuner.core.expressions import all_of
from tuner.core.files import read_file
from tuner.core.records import TrialRecord
from tuner.report.table import cell_value, value_text
from tuner.searches.cost import run_cost
from tuner.searches.front import device_bytes, samples_per_s
from tuner.searches.store import ResultsFolder
from tuner.searches.view import View

MAX_BYTES = 16 * 1024 * 1024
"""A front of tens of thousands of configurations; what is larger is none."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One configuration of a front. `settings` are the values of the knobs, by name, as text."""

    device_bytes: int
    samples_per_s: float
    source: str
    settings: Mapping[str, str]
    recommended: bool


@dataclass(frozen=True, slots=True)
class GpuFront:
    """What a space came to on one GPU type; an empty `points` where nothing fits.

    `epoch_s` and `epoch_usd` are those of the recommended configuration, None where unknown.
    `report` is the address of its report, relative to that of another GPU type.
    """

    gpu: str
    gpu_name: str
    memory_bytes: int
    points: tuple[FrontPoint, ...]
    epoch_s: float | None
    epoch_usd: float | None
    conditions: str
    report: str = ""

    @property
    def best(self) -> FrontPoint | None:
        """The recommended configuration."""
        return next((point for point in self.points if point.recommended), None)


@dataclass(frozen=True, slots=True)
class OtherGpus:
    """The other GPU types of a space, by id; `unreadable` are folders whose files are broken."""

    fronts: tuple[GpuFront, ...] = ()
    unreadable: tuple[str, ...] = ()


def read_other_gpus(
    folder: ResultsFolder, knobs: Sequence[str], written_together: Collection[str] = ()
) -> OtherGpus:
    """What the folders beside `folder` hold: the other GPU types that the space was searched on.

    `knobs` are the names of the settings that are shown of each configuration. A report is linked
    to where there is one, or is about to be: that of the types `written_together`.
    """
    fronts, unreadable = [], []
    found = sorted(folder.path.parent.glob("*/best.yaml"))
    for path in (path.parent for path in found if path.parent != folder.path):
        try:
            fronts.append(_read(path, knobs, written_together))
        # Edited, of another version, or not ours at all: a neighbour ends no search.
        except (OSError, InputError, KeyError, TypeError, ValueError, OverflowError, csv.Error):
            unreadable.append(path.name)
    return OtherGpus(tuple(fronts), tuple(unreadable))


def front_of(view: View) -> GpuFront:
    """The same of the GPU type that `view` is about."""
    best = view.best
    cost = run_cost(best.record, view.space, view.gpu) if best else None
    return GpuFront(
        gpu=view.gpu.id,
        gpu_name=view.gpu.name,
        memory_bytes=view.gpu.memory_bytes,
        points=tuple(_point(record, view) for record in view.front),
        epoch_s=cost.epoch_s if cost else None,
        epoch_usd=cost.epoch_usd if cost else None,
        conditions=all_of(view.conditions),
    )


def _point(record: TrialRecord, view: View) -> FrontPoint:
    evidence, best = record.outcome.evidence, view.best
    return FrontPoint(
        device_bytes=device_bytes(record) or 0,
        samples_per_s=samples_per_s(record) or 0.0,
        source=str(evidence.source) if evidence else "",
        settings={name: value_text(record.configuration.get(name)) for name in view.knobs},
        recommended=best is not None and best.configuration == record.configuration,
    )


def _read(path: Path, knobs: Sequence[str], written_together: Collection[str]) -> GpuFront:
    """The front in the folder at `path`. Raises `OSError`, or ValueError for what is none."""
    try:
        found = _mapping(yaml.safe_load(read_file(path / "best.yaml", MAX_BYTES)))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    run, gpu = _mapping(found.get("run") or {}), _mapping(found.get("gpu"))
    conditions = _mapping(found.get("chosen_from") or {}).get("conditions") or ()
    if not all(isinstance(condition, str) for condition in conditions):
        raise TypeError("a condition is no text")  # aliases of aliases would make gigabytes of it
    has_report = path.name in written_together or (path / "report.html").exists()
    rows = list(
        csv.DictReader(io.StringIO(read_file(path / "pareto.csv", MAX_BYTES).decode("utf-8")))
    )
    return GpuFront(
        gpu=_word(gpu["id"]),
        gpu_name=_word(gpu["name"]),
        memory_bytes=_size(gpu["memory_bytes"]),
        points=tuple(_row_point(row, knobs) for row in rows),
        epoch_s=_number(run.get("time_per_epoch_s")),
        epoch_usd=_number(run.get("cost_per_epoch_usd")),
        conditions=all_of(list(conditions)),
        report=f"../{path.name}/report.html" if has_report else "",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} is no mapping")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is no text")
    return value


def _row_point(row: Mapping[str, str], knobs: Sequence[str]) -> FrontPoint:
    rate = _number(float(row["samples_per_s"]))
    if rate is None:
        raise ValueError(f"{row['samples_per_s']} samples/s is no rate")
    return FrontPoint(
        device_bytes=_size(int(row["device_bytes"])),
        samples_per_s=rate,
        source=row["source"],
        settings={name: cell_value(row[name]) for name in knobs if name in row},
        recommended=row["recommended"] == "true",
    )


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.60} is no number of bytes")
    return value


def _number(value: object) -> float | None:
    """A number of at least 0; None for everything else."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
