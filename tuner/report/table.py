"""`pareto.csv`: the front as a table that spreadsheets and pandas read."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from tuner.core.records import KnobValue, TrialRecord
from tuner.core.units import GIB, format_duration, format_size, significant
from tuner.searches.cost import run_cost
from tuner.searches.facts import rows_of
from tuner.searches.front import evidence_of, room_bytes
from tuner.searches.view import Level, View

_NUMBERS = (
    "device_gib", "device_bytes", "peak_reserved_bytes", "peak_allocated_bytes", "free_bytes",
    "samples_per_s", "tokens_per_s", "it_per_s", "step_s", "mfu", "epoch_s", "epoch_usd",
)  # fmt: skip


def pareto_csv(view: View) -> str:
    """The front as CSV, one row per configuration, from the least memory to the most.

    Columns: `recommended`, `source`, every value of the configuration (knobs first), the
    numbers with their units in the name, and the trial's id in the journal.
    """
    names = [*view.knobs, *view.fixed]
    more = [o for o in view.objectives if o.name not in (*_NUMBERS, *names)]
    stage = ["limiting_stage"] if view.space.stages else []
    numbers = [*_NUMBERS, *(o.name for o in more)]
    columns = ["recommended", "source", *names, *numbers, *stage, "trial_id"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for record in view.front:
        values = {name: cell(record.configuration.get(name)) for name in names}
        others = {o.name: f"{o.value(record):.6g}" for o in more}
        others |= dict.fromkeys(stage, cell(record.outcome.limiting_stage))
        writer.writerow({**values, **_row(record, view), **others})
    return text.getvalue()


_FORMULA = ("=", "+", "-", "@", "\t")
"""First characters of formulas in spreadsheets (OWASP, "CSV Injection"): a quote is put before."""

_QUOTE = "'"


def cell(value: KnobValue | None) -> str:
    """A value as the cell of a table: a text is never a formula, and a number stays one."""
    text = value_text(value).replace("\r", " ")  # which ends a row, and csv does not quote
    is_text = isinstance(value, str | tuple)
    return _QUOTE + text if is_text and text.strip(" ").startswith((*_FORMULA, _QUOTE)) else text


def value_text(value: KnobValue | None) -> str:
    """A configuration value as people write it: true, nf4, q_proj+v_proj; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "+".join(value) if isinstance(value, tuple) else str(value)


_SIZES = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
_RATES = ("samples_per_s", "tokens_per_s", "step_s", "mfu")


def numbers_of(record: TrialRecord, view: View) -> dict[str, float | None]:
    """The numbers of a trial that has some: sizes in bytes, times in seconds, money in USD."""
    evidence, cost = evidence_of(record), run_cost(record, view.space, view.gpu)
    return {
        **{name: getattr(evidence.memory, name) for name in _SIZES},
        **{name: getattr(evidence.speed, name) for name in _RATES},
        "epoch_s": cost.epoch_s if cost else None,
        "epoch_usd": cost.epoch_usd if cost else None,
    }


def _row(record: TrialRecord, view: View) -> dict[str, Any]:
    evidence, best = evidence_of(record), view.best
    numbers = {**numbers_of(record, view), "it_per_s": evidence.speed.it_per_s}
    size = evidence.memory.device_bytes
    digits = {"mfu": ".4f", "epoch_s": ".0f", "epoch_usd": ".2f"}
    return {
        "recommended": value_text(best is not None and best.configuration == record.configuration),
        "source": str(evidence.source),
        "device_gib": f"{size / GIB:.3f}",
        "free_bytes": room_bytes(record, view.gpu.memory_bytes) - size,
        **{
            name: "" if n is None else n if name in _SIZES else f"{n:{digits.get(name, '.6g')}}"
            for name, n in numbers.items()
        },
        "trial_id": cell(record.trial_id),
    }


def front_row(view: View, record: TrialRecord) -> dict[str, Any]:
    """A configuration of the front as a row of the report."""
    evidence, best = evidence_of(record), view.best
    size = evidence.memory.device_bytes
    return {
        "best": best is not None and best.configuration == record.configuration,
        "undecided": record in view.undecided,
        "settings": [value_text(record.configuration.get(name)) for name in view.knobs],
        "memory": f"{size / GIB:.2f}" if size >= GIB else f"{size / GIB:.3f}",
        "free": f"{(room_bytes(record, view.gpu.memory_bytes) - size) / GIB:.2f}",
        "samples": significant(evidence.speed.samples_per_s),
        "tokens": significant(evidence.speed.tokens_per_s),
    }


def level_rows(view: View, shown: Sequence[Level]) -> list[dict[str, Any]]:
    """The front of each level as rows of the report."""
    return [
        {
            "text": ", ".join(f"{k} {value_text(v)}" for k, v in level.values.items()),
            "trials": len(level.records),
            "rows": [front_row(view, record) for record in level.front()],
        }
        for level in shown
    ]


def stage_rows(view: View) -> list[dict[str, Any]]:
    """The stages of the recommended configuration, each with a bar for its memory."""
    if view.best is None:
        return []
    return [
        {
            "name": row.label,
            "settings": row.settings,
            "memory": format_size(row.numbers.device_bytes),
            "percent": 100 * row.numbers.device_bytes / view.best.memory_bytes,
            "samples": significant(row.numbers.samples_per_s),
            "step": format_duration(row.numbers.step_s),
            "time": row.time_text,
            "hardest": row.hardest,
        }
        for row in rows_of(view.best.record, view.space)
    ]
