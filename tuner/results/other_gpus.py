"""The results of one search space on several GPU types, side by side.

What another GPU type came to is read from the files that its own search left: the front in
`pareto.csv` and the recommendation in `best.yaml`. Nothing is worked out anew, so each keeps the
conditions it was searched under.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.expressions import all_of
from tuner.records import TrialRecord
from tuner.results.cost import run_cost
from tuner.results.front import device_bytes, samples_per_s
from tuner.results.store import ResultsFolder
from tuner.results.table import value_text
from tuner.results.view import View


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
        except (OSError, KeyError, TypeError, ValueError):  # edited, or of another version
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
    try:
        found: dict[str, Any] = yaml.safe_load((path / "best.yaml").read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    run = found.get("run") or {}
    has_report = path.name in written_together or (path / "report.html").exists()
    with (path / "pareto.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return GpuFront(
        gpu=str(found["gpu"]["id"]),
        gpu_name=str(found["gpu"]["name"]),
        memory_bytes=int(found["gpu"]["memory_bytes"]),
        points=tuple(_row_point(row, knobs) for row in rows),
        epoch_s=_number(run.get("time_per_epoch_s")),
        epoch_usd=_number(run.get("cost_per_epoch_usd")),
        conditions=all_of((found.get("chosen_from") or {}).get("conditions") or ()),
        report=f"../{path.name}/report.html" if has_report else "",
    )


def _row_point(row: Mapping[str, str], knobs: Sequence[str]) -> FrontPoint:
    return FrontPoint(
        device_bytes=int(row["device_bytes"]),
        samples_per_s=float(row["samples_per_s"]),
        source=row["source"],
        settings={name: row[name] for name in knobs if name in row},
        recommended=row["recommended"] == "true",
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
