"""Measured runs that people give away: made of trials, and correcting predictions."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from tuner.app.target import Target, comparable
from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Configuration, Memory, Prediction, Speed, TrialRecord
from tuner.core.records.trial import PROCESSOR
from tuner.core.setup.schemas import SCHEMAS
from tuner.core.units import GIB
from tuner.cost.speed.profile import uses_profile
from tuner.report.prediction_error import Pair, pairs
from tuner.report.reported import (
    MeasuredNumbers,
    PredictedNumbers,
    ReportedRun,
    looks_of,
    problems_of,
    public,
    public_configuration,
    public_model,
    public_versions,
    read_row,
    shipped_rows,
)
from tuner.searches.journal import latest
from tuner.space.models.catalogue import get_entry, resolve_config


def rows_of_trials(target: Target) -> list[ReportedRun]:
    """A row for each measured configuration of the target, the fastest first.

    Raises `UnavailableError` for the user's own code, and if nothing was measured.
    """
    if not target.space.predictable:
        raise UnavailableError(
            f"search space {target.space.name!r} runs your own code, which no row can tell of"
        )
    found = pairs(latest(comparable(target.known.read().records, target)))
    if not found:
        raise UnavailableError(
            f"no trial of {target.space.name!r} was measured on {target.gpu.name}",
            hint=f"on a machine with one: `{target.command('search')}`",
        )
    found = sorted(found, key=lambda pair: -pair.measured.speed.samples_per_s)
    config = _config_of(target.space.model)
    return [_row(target, pair, config) for pair in found]


def row_of_file(path: Path) -> ReportedRun:
    """The row that a callback wrote, as it may be given away. Raises `InputError` for no row."""
    return _with_reporter(public(read_row(path)))


def _row(target: Target, pair: Pair, config: Mapping[str, Any] | None) -> ReportedRun:
    record, measured = pair.record, pair.measured
    row = ReportedRun(
        schema=2,
        gpu=record.gpu,
        workload=target.space.workload,
        device=record.device or "",
        gpu_memory_bytes=shared_memory(record.gpu, record.gpu_memory_bytes),
        configuration=public_configuration(target.space.workload, record.configuration.to_dict()),
        versions=public_versions(record.versions),
        weights=None
        if measured.weights is None
        else "synthetic"
        if measured.weights == "synthetic"
        else "checkpoint",
        lengths="full" if measured.lengths == "full" else "data" if measured.lengths else None,
        steps=measured.steps,
        measured=MeasuredNumbers(**_numbers(measured.memory, measured.speed)),
        predicted=predicted_numbers(pair.predicted),
        **public_model(target.space.model, config, _digest(record)),
    )
    return _with_reporter(public(row))


def shared_memory(gpu: str, memory_bytes: int) -> int:
    """The memory to share: that of a machine, which may tell it apart, in whole GiB."""
    return memory_bytes // GIB * GIB if gpu == PROCESSOR else memory_bytes


def predicted_numbers(prediction: Prediction) -> PredictedNumbers:
    """The numbers of a prediction, in a row."""
    return PredictedNumbers(
        **_numbers(prediction.memory, prediction.speed),
        has_profile=uses_profile(prediction.method),
        is_corrected=bool(prediction.corrections),
    )


def _numbers(memory: Memory, speed: Speed) -> dict[str, Any]:
    return {
        "step_s": speed.step_s,
        "device_bytes": memory.device_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
    }


def _config_of(model: str | None) -> dict[str, Any] | None:
    """The configuration of a model of one's own; None where it is gone, or has a public name."""
    if model is None or get_entry(model) is not None:
        return None
    try:
        found: dict[str, Any] = resolve_config(model).to_dict()
    except (InputError, UnavailableError):
        return None
    return found


def _digest(record: TrialRecord) -> str:
    return record.versions.get("model", "").rpartition(" ")[2]


# -- who reports ----------------------------------------------------------------------------------


def _with_reporter(row: ReportedRun) -> ReportedRun:
    return row if row.reporter else msgspec.structs.replace(row, reporter=_reporter())


@cache
def _reporter() -> str:
    """8 random hex digits, kept for the rows of this user; it says nothing of anybody."""
    try:
        path = platformdirs.user_config_path("tuner", appauthor=False) / "reporter"
        if path.is_file() and len(text := path.read_text().strip()) == 8:
            return text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made := secrets.token_hex(4))
    except (OSError, RuntimeError, ValueError):  # no home directory, or a read-only one
        return secrets.token_hex(4)
    return made


# -- correcting predictions -----------------------------------------------------------------------


NEEDED = 3
"""Reporters that have to agree before their rows correct a prediction."""

AGREEMENT = {
    "device_bytes": 0.05,
    "peak_reserved_bytes": 0.05,
    "peak_allocated_bytes": 0.02,
    "step_s": 0.15,
}
"""Reporters agree within this share of their median: what identical runs differ by, twice."""

KIND = (
    "adapter", "attention", "compute_dtype", "distributed", "gradient_checkpointing", "loss",
    "mixed_precision", "optimizer", "padding", "precision", "torch_compile", "training_loop",
    "gpus_per_trial", "images", "num_labels", "reference_pass",
)  # fmt: skip
"""Knobs that a row and the prediction that it corrects have in common."""


def corrected_by_rows(
    prediction: Prediction,
    model: str | None,
    workload: str,
    configuration: Configuration,
    rows: Iterable[ReportedRun] | None = None,
) -> tuple[Prediction, int]:
    """The prediction corrected by reported runs, and their number; itself and 0 without any.

    They are of its model, its GPU type and its kind of training. At least `NEEDED` reporters have
    to agree on a quantity, and to be more than two thirds of all that reported it; each has one
    vote, however many rows. Rows of another release of tuner say nothing of this one's predictions,
    and disturbed ones, those far off and those of examples of any length have no vote. `rows` are
    those that come with tuner, by default.
    """
    entry = get_entry(model or "")
    # One processor says nothing of another.
    if entry is None or prediction.gpu == PROCESSOR or prediction.corrections or prediction.stages:
        return prediction, 0
    alike = [
        row
        for row in (shipped_rows() if rows is None else rows)
        if (row.model, row.gpu, row.workload) == (entry.id, prediction.gpu, workload)
        and row.predicted.has_profile == uses_profile(prediction.method)
        and _kind(workload, row.configuration) == _kind(workload, configuration)
        and _has_vote(row)
    ]
    agreeing = {name: found for name in AGREEMENT if (found := _agreeing(alike, name))}
    if not agreeing:
        return prediction, 0
    from tuner.cost.calibrate import calibrations_of  # numpy
    from tuner.cost.interval import Observation

    seen = [
        Observation(
            name,
            getattr(row.predicted, name),
            measured=getattr(row.measured, name),
            units=float(str(row.configuration.get("grad_accum", 1))),
        )
        for name, found in agreeing.items()
        for row in found
    ]
    count = len({row.reporter for found in agreeing.values() for row in found})
    return calibrations_of(seen, prediction, _REPORTED).apply(prediction, _REPORTED), count


def rows_text(count: int) -> str:
    """The note on a prediction that reported runs corrected; empty without."""
    return f"corrected by {count} reported runs of this model on this GPU" if count else ""


_REPORTED = "reported runs"


def _has_vote(row: ReportedRun) -> bool:
    """True for an undisturbed run beside this release's own prediction, and not far from it."""
    from tuner import __version__

    return (
        row.versions.get("tuner") == __version__
        and row.predicted.source == "predicted"
        and not row.predicted.is_corrected
        and not row.disturbed
        and row.lengths == "full"
        and not any(looks_of(row))
        and not any(problems_of(row))
    )


def _kind(workload: str, values: Mapping[str, Any] | Configuration) -> tuple[Any, ...]:
    terms = SCHEMAS[workload].terms
    return tuple(values.get(name, terms[name].default) for name in KIND if name in terms)


def _agreeing(rows: Iterable[ReportedRun], quantity: str) -> tuple[ReportedRun, ...]:
    """The median run of each reporter that agrees with the median of all; none if too few do."""
    by_reporter: dict[str, list[tuple[float, ReportedRun]]] = {}
    for row in rows:
        ratio = row.ratio(quantity)
        if ratio is not None and row.reporter:
            by_reporter.setdefault(row.reporter, []).append((ratio, row))
    votes = [sorted(own, key=lambda one: one[0])[len(own) // 2] for own in by_reporter.values()]
    if len(votes) < NEEDED:
        return ()
    middle = statistics.median(ratio for ratio, _ in votes)
    agreeing = tuple(row for r, row in votes if abs(r / middle - 1) <= AGREEMENT[quantity])
    enough = len(agreeing) >= NEEDED and 3 * len(agreeing) > 2 * len(votes)
    return agreeing if enough else ()
