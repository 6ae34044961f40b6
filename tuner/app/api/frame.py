"""Trials as a pandas table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.core.errors import UnavailableError
from tuner.core.records import TrialRecord
from tuner.searches.cost import run_cost
from tuner.searches.view import Kind, View

if TYPE_CHECKING:
    import pandas


def frame_of(view: View) -> pandas.DataFrame:
    """A row for each trial of `view`, in its order."""
    return _pandas().DataFrame(
        [_row(record, kind, view) for record, kind in zip(view.records, view.kinds, strict=True)]
    )


def joined(frames: Sequence[pandas.DataFrame]) -> pandas.DataFrame:
    """All rows, numbered anew."""
    return _pandas().concat(frames, ignore_index=True) if frames else _pandas().DataFrame()


def _row(record: TrialRecord, kind: Kind, view: View) -> dict[str, Any]:
    row: dict[str, Any] = {
        "gpu": record.gpu,
        "trial_id": record.trial_id,
        "source": str(record.source),
        "status": str(record.outcome.status),
        "fits": record.fits,
        "on_front": kind in (Kind.FRONT, Kind.BEST),
        "recommended": kind is Kind.BEST,
        **{name: record.configuration.get(name) for name in (*view.knobs, *view.fixed)},
    }
    evidence = record.outcome.evidence
    if evidence is None:
        return row
    memory, speed = evidence.memory, evidence.speed
    cost = run_cost(record, view.space, view.gpu)
    return row | {
        "device_bytes": memory.device_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "samples_per_s": speed.samples_per_s,
        "tokens_per_s": speed.tokens_per_s,
        "step_s": speed.step_s,
        "mfu": speed.mfu,
        "epoch_s": cost.epoch_s if cost else None,
        "epoch_usd": cost.epoch_usd if cost else None,
    }


def _pandas() -> Any:
    try:
        import pandas  # a second; it comes with Ray Tune
    except ImportError as error:
        raise UnavailableError(
            "pandas is not installed", hint="pip install pandas, or read `records`"
        ) from error
    return pandas
