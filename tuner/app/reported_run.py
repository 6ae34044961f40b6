"""A measured trial as a row that its owner can give away: nothing in it is private."""

from __future__ import annotations

from typing import Any

from tuner.app.target import Target, comparable
from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration, TrialRecord
from tuner.core.setup.schemas import SCHEMAS
from tuner.report.prediction_error import QUANTITIES, Evidence, Pair, pairs
from tuner.searches.journal import latest
from tuner.space.models.catalogue import get_entry

SCHEMA = 1


def reported_runs(target: Target) -> list[dict[str, Any]]:
    """A row for each measured configuration of the target, the fastest first.

    Raises `UnavailableError` for code of the user's own, and where nothing was measured.
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
    return [_row(target, pair) for pair in found]


def _row(target: Target, pair: Pair) -> dict[str, Any]:
    record = pair.record
    return {
        "schema": SCHEMA,
        "model": _model(target, record),
        "workload": target.space.workload,
        "gpu": record.gpu,
        "device": record.device,
        "gpu_memory_bytes": record.gpu_memory_bytes,
        "configuration": _configuration(target, record.configuration),
        "versions": {name: text for name, text in record.versions.items() if name != "model"},
        "weights": pair.measured.weights,
        "lengths": pair.measured.lengths,
        "steps": pair.measured.steps,
        "measured": _numbers(pair.measured),
        "predicted": {**_numbers(pair.predicted), "method": pair.predicted.method},
    }


def _numbers(evidence: Evidence) -> dict[str, float]:
    return {quantity.name: quantity.value(evidence) for quantity in QUANTITIES}


def _model(target: Target, record: TrialRecord) -> str:
    """A model's public name, or the digest of an architecture that has none."""
    name = target.space.model or ""
    if get_entry(name) is not None:
        return name
    return f"architecture {record.versions.get('model', '').rpartition(' ')[2]}"


def _configuration(target: Target, configuration: Configuration) -> dict[str, Any]:
    """The knobs of the vocabulary with numbers, listed words and names of modules: no paths."""
    terms = SCHEMAS[target.space.workload].terms
    return {
        name: value
        for name, value in configuration.to_dict().items()
        if name in terms and (not isinstance(value, str) or value in terms[name].allowed)
    }
