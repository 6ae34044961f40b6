"""The recommendation, the Pareto front as a table, and how well trials were predicted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuner.core.expressions import settings_text
from tuner.core.records import Measurement, Prediction, Source, Status, TrialRecord
from tuner.core.setup.distributed_knobs import DISTRIBUTED, GPUS_PER_TRIAL, MACHINES
from tuner.core.units import format_duration, format_size, significant
from tuner.report.terminal.evidence import print_stages
from tuner.report.terminal.render import count, differing, echo, print_fields, say
from tuner.report.terminal.tables import print_rows, print_settings
from tuner.report.terminal.verdict import ANSWER, Field
from tuner.searches.best import BestTrial, close_calls_text, not_measured_text
from tuner.searches.cost import COLUMNS, RunCost, row_texts, run_cost, trade_text
from tuner.searches.facts import OF_ONE, counted_gpus, gpus_text, ranks_text
from tuner.searches.front import UNDECIDED, evidence_of, room_bytes
from tuner.searches.view import View


def recommended_fields(best: BestTrial) -> list[Field]:
    """The recommended configuration with what it needs and what follows from it."""
    speed, memory = best.evidence.speed, best.evidence.memory
    free = f"{format_size(best.free_bytes)} free"
    around = best.device_bytes_interval
    size = format_size(memory.device_bytes) + (f" ({around.text(format_size)})" if around else "")
    mfu = f", {speed.mfu:.0%} of the peak (MFU)" if speed.mfu is not None else ""
    # Code of the user's own need not count tokens.
    tokens = f"{significant(speed.tokens_per_s)} tokens/s, " if speed.tokens_per_s else ""
    names = best.names
    of_stages = {name for stage in best.space.stages for name in stage.values}
    hidden = {*names, *best.space.defaults, *of_stages}
    rate = best.samples_per_s_interval
    interval = f" ({rate.text(significant)})" if rate else ""
    return [
        (ANSWER, f"Recommended ({best.source}): {best.title}"),
        ("GPUs", gpus_text(best.configuration, best.gpu) if best.gpus > 1 else ""),
        ("set", settings_text(best.configuration, names)),
        ("rest", settings_text({n: v for n, v in best.configuration.items() if n not in hidden})),
        (
            "memory",
            f"{size} of {format_size(best.memory_bytes)}{' on each' * (best.gpus > 1)}"
            f"{' ' * bool(best.limit_text)}{best.limit_text}: {free}",
        ),
        ("ranks", ranks_text(best.evidence)),
        (
            "speed",
            f"{significant(speed.samples_per_s)} samples/s{interval}, {tokens}"
            f"{format_duration(speed.step_s)} an optimizer step{mfu}",
        ),
        ("verified", best.verified_text),
        ("time", _time_text(best.cost)),
        ("cost", _cost_text(best.cost)),
        ("vs. baseline", _gain_text(best)),
        ("chosen", best.chosen_from),
        ("close calls", close_calls_text(best)),
        ("unmeasured", not_measured_text(best)),
    ]


def print_recommendation(
    best: BestTrial, *, use: Sequence[str] = (), measure: str = "", verify: str = ""
) -> None:
    """The fields of a recommendation, and the commands to go on with.

    `use` are commands that bring it to where training is configured, `measure` the one whose
    trials decide between it and what may be as fast, and `verify` the one that tries it.
    """
    (_, title), *fields = recommended_fields(best)
    say(title)
    is_of_file = best.space.model and any(line.endswith(" train.py") for line in use)
    own = f"(train.py is your file that trains {best.space.model})" if is_of_file else ""
    print_fields(
        fields,
        indent=2,
        commands=[
            ("verify", verify),
            ("measure", measure),
            *(("" if number else "use", line) for number, line in enumerate(use)),
            ("", own),
        ],
    )
    print_stages(best.record, best.space)
    _print_by_gpus(best)


def _print_by_gpus(best: BestTrial) -> None:
    """Time and cost of an epoch on each number of GPUs, if there are several."""
    if not best.by_gpus:
        return
    echo(f"\nThe fastest that fits on each number of GPUs ({best.source}); {OF_ONE}\n")
    hidden = (GPUS_PER_TRIAL, DISTRIBUTED, MACHINES)
    knobs = [name for name in best.space.knobs if name not in hidden]
    varying, _ = differing(knobs, [row.record.configuration for row in best.by_gpus])
    print_rows(
        [*COLUMNS, "settings"],
        [
            (*row_texts(row), settings_text(row.record.configuration, varying))
            for row in best.by_gpus
        ],
        right=COLUMNS[2:],
        drop=("epoch",),
    )
    echo("< no other number is both faster and cheaper")
    print_fields([("trade", trade_text(best.by_gpus))])
    echo()


def _time_text(cost: RunCost | None) -> str:
    if cost is None:
        return ""
    of_stages = f"of {cost.stages} stages with " if cost.stages else "of "
    text = f"{format_duration(cost.epoch_s)} an epoch {of_stages}{count(cost.examples)} examples"
    if cost.run_s is not None:
        text += f", {format_duration(cost.run_s)} for {cost.epochs_text}"
    return f"{text} (training only, every example at full length)"


def _cost_text(cost: RunCost | None) -> str:
    if cost is None or cost.epoch_usd is None:
        return ""
    text = f"{cost.epoch_usd:,.2f} USD an epoch"
    if cost.run_usd is not None:
        text += f", {cost.run_usd:,.2f} USD for {cost.epochs_text}"
    each = f" for each of {cost.gpus} GPUs" if cost.gpus > 1 else ""
    when = f" (price of {cost.price_date})" if cost.price_date else ""
    return f"{text}, at {cost.price_usd_per_hour:g} USD per hour{each}{when}"


def _gain_text(best: BestTrial) -> str:
    gain = best.gain
    if gain is None or gain.speedup is None or gain.saved_bytes is None:
        return ""
    if gain.baseline.configuration == best.configuration:
        return "the baseline itself: no other configuration that fits is faster"
    baseline = settings_text(gain.baseline.configuration, best.space.knobs)
    more = "less" if gain.saved_bytes >= 0 else "more"
    fits = "" if gain.baseline_fits else "; it does not fit"
    pace = "slower" if gain.speedup < 1 else "faster"
    times = f"{gain.speedup:.3g} times as fast" if gain.speedup >= 2 else ""
    speed = times or f"{abs(gain.speedup - 1):.0%} {pace}"
    return f"{speed}, {format_size(abs(gain.saved_bytes))} {more}{fits}: {baseline}"


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
