"""The Pareto front as a table, how the trials ended, and how well they were predicted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuner.core.expressions import settings_text
from tuner.core.records import Measurement, Prediction, Source, Status, TrialRecord
from tuner.core.units import format_duration, format_size, significant
from tuner.report.terminal.render import differing, echo, print_fields, say
from tuner.report.terminal.tables import print_rows, print_settings
from tuner.searches.cost import run_cost
from tuner.searches.facts import OF_ONE, counted_gpus
from tuner.searches.front import UNDECIDED, evidence_of, room_bytes
from tuner.searches.view import View

QUANTITIES: Sequence[tuple[str, str, Callable[[Prediction | Measurement], float]]] = (
    ("device_bytes", "device memory", lambda e: e.memory.device_bytes),
    ("peak_allocated_bytes", "peak allocated", lambda e: e.memory.peak_allocated_bytes),
    ("step_s", "optimizer step", lambda e: e.speed.step_s),
)
"""Numbers that are both predicted and measured: the name of the interval, a label, the value."""

Pair = tuple[Prediction, Measurement]
"""One trial that was predicted beforehand and measured to its end."""


def pairs(records: Iterable[TrialRecord]) -> list[Pair]:
    """The trials that were predicted and measured, in their order."""
    return [
        (prediction, measurement)
        for record in records
        if record.outcome.status is Status.OK
        and (prediction := record.outcome.prediction) is not None
        and (measurement := record.outcome.measurement) is not None
        and all(value(measurement) > 0 for _, _, value in QUANTITIES)
    ]


def prediction_error_rows(found: Sequence[Pair]) -> list[Mapping[str, str]]:
    """Predicted over measured: a row for each quantity, in words; empty without trials."""
    rows: list[Mapping[str, str]] = []
    for name, label, value in QUANTITIES if found else ():
        ratios = [value(said) / value(seen) for said, seen in found]
        within = [
            ends[0] <= value(seen) <= ends[1]
            for said, seen in found
            if (ends := said.intervals.get(name)) is not None
        ]
        rows.append(
            {
                "predicted / measured": label,
                "median": f"{statistics.median(ratios):.3f}",
                "range": f"{min(ratios):.3f} to {max(ratios):.3f}",
                "mean error": f"{statistics.fmean(abs(ratio - 1) for ratio in ratios):.1%}",
                "in 90 % interval": f"{sum(within) / len(within):.0%}" if within else "?",
            }
        )
    return rows


def verdicts_text(records: Iterable[TrialRecord]) -> str:
    """The number of trials of which it was predicted right whether they fit.

    It is of measured trials that fitted or ran out of memory; empty without any.
    """
    # A trial that ended, in more memory than was to be used, does not fit either.
    counts = Counter(
        (prediction.fits, record.fits)
        for record in records
        if record.source is Source.MEASURED
        and record.outcome.status in (Status.OK, Status.OOM)
        and (prediction := record.outcome.prediction) is not None
    )
    if not counts:
        return ""
    right = counts[True, True] + counts[False, False]
    text = f"whether it fits was predicted correctly for {right} of {counts.total()} trials"
    if counts[True, False]:
        text += f"; {counts[True, False]} did not fit, contrary to the prediction"
    if counts[False, True]:
        text += f"; {counts[False, True]} fitted, contrary to the prediction"
    return text


_NUMBERS = ("memory", "samples/s", "epoch", "tokens/s", "free", "step", "USD/epoch")


_SHOWN_OBJECTIVES = ("device_bytes", "samples_per_s", "tokens_per_s", "step_s", "epoch_usd")


MAIN_NUMBERS = _NUMBERS[:3]
"""Numbers that fit beside the settings in 80 columns."""


def print_front(view: View, *, best: str = "recommended") -> None:
    """The front as a table: what differs between its configurations, in numbers.

    `best` are the words for the one marked with a star.

    The knobs are columns where the screen is wide enough, else one column of settings.
    """
    if not view.front:
        return
    # Derived values follow from the knobs and would only take their room.
    names = view.space.knobs or view.knobs
    varying, same = differing(names, [record.configuration for record in view.front])
    goals = " and ".join(objective.label for objective in view.objectives)
    better = f"no configuration is better in {goals}"
    better = "none is both faster and smaller" if view.is_default else better
    echo(f"Pareto front ({view.source}): {better}")
    print_fields([("all with", settings_text(view.front[0].configuration, same))])
    echo()
    # Those objectives that no column shows already.
    more = [o for o in view.objectives if o.name not in (*_SHOWN_OBJECTIVES, *varying)]
    labels = [o.name for o in more]
    undecided = view.undecided
    rows = []
    for record in view.front:
        mark = "*" if view.best and view.best.configuration == record.configuration else ""
        mark += "?" if record in undecided else ""
        others = [significant(o.value(record) or 0.0) for o in more]
        rows.append(((mark, *front_numbers(record, view), *others), record.configuration))
    print_settings(
        ("", *_NUMBERS, *labels),
        rows,
        varying,
        right=(*_NUMBERS, *labels),
        drop=("epoch", *reversed(labels)),
        wide_only=_NUMBERS[len(MAIN_NUMBERS) :],
    )
    if view.best is not None:
        echo(f"* {best}")
    if undecided:
        say(f"? {UNDECIDED}")
    if any(counted_gpus(record.configuration) > 1 for record in view.front):
        echo(f"of several GPUs {OF_ONE}")


def front_numbers(record: TrialRecord, view: View) -> list[str]:
    """The numbers of a configuration of the front, as in the columns of the table."""
    evidence, cost = evidence_of(record), run_cost(record, view.space, view.gpu)
    used_bytes = evidence.memory.device_bytes
    return [
        format_size(used_bytes),
        significant(evidence.speed.samples_per_s),
        format_duration(cost.epoch_s) if cost else "?",
        significant(evidence.speed.tokens_per_s),
        format_size(room_bytes(record, view.gpu.memory_bytes) - used_bytes),
        format_duration(evidence.speed.step_s),
        f"{cost.epoch_usd:.2f}" if cost and cost.epoch_usd is not None else "?",
    ]


def print_prediction_error(records: Sequence[TrialRecord]) -> None:
    """The error of the predictions of measured trials, if there are any."""
    found = pairs(records)
    rows = prediction_error_rows(found)
    text = verdicts_text(records)
    if rows:
        echo(f"\nPredicted against measured ({len(found)} trials)")
        columns = list(rows[0])
        print_rows(columns, [list(row.values()) for row in rows], right=columns[1:])
    if text:
        echo(text)


def record_dict(record: TrialRecord) -> dict[str, Any]:
    """A trial for `--json`: the journal's record, and whether it fits."""
    return {**record.to_dict(), "fits": record.fits}


def sources_text(records: Sequence[TrialRecord]) -> str:
    """The number of trials by source and ending."""
    by_source = {s: [r for r in records if r.source is s] for s in reversed(Source)}
    return "; ".join(f"{counts_text(found)} ({s})" for s, found in by_source.items() if found)


def counts_text(records: Sequence[TrialRecord]) -> str:
    """The number of trials by ending."""
    oom = sum(r.outcome.status is Status.OOM for r in records)
    tight = sum(r.outcome.status is Status.OK and not r.fits for r in records)
    failed = sum(r.outcome.status not in (Status.OK, Status.OOM) for r in records)
    parts = [f"{sum(r.fits for r in records):,} fit"]
    parts += [f"{tight:,} fit without headroom"] if tight else []
    parts += [f"{oom:,} don't"]
    parts += [f"{failed} failed"] if failed else []
    return f"{len(records):,} configurations: {', '.join(parts)}"
