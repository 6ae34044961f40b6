"""The answers that `search`, `best` and `show` print: a front, a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.app.cli.front_plot import print_plot
from tuner.app.cli.stages import print_stages
from tuner.core.expressions import all_of, show
from tuner.core.records import KnobValue, Source, Status, TrialRecord
from tuner.core.setup.distributed_knobs import DISTRIBUTED, GPUS_PER_TRIAL, MACHINES
from tuner.core.units import format_duration, format_size, significant
from tuner.report.prediction_error import pairs, prediction_error_rows, verdict_text, verdicts
from tuner.report.terminal.render import count, echo, print_fields, settings_text
from tuner.report.terminal.tables import Sheet, print_rows, print_sheet, print_wider
from tuner.searches.best import BestTrial, near_tie_text
from tuner.searches.cost import COLUMNS, RunCost, row_texts, run_cost, trade_text
from tuner.searches.facts import OF_ONE, counted_gpus, gpus_text, ranks_text
from tuner.searches.front import UNDECIDED, room_bytes
from tuner.searches.view import SHOWN_LEVELS, View, levels

_NUMBERS = ("memory", "samples/s", "epoch", "tokens/s", "free", "step", "USD/epoch")
_SHOWN_OBJECTIVES = ("device_bytes", "samples_per_s", "tokens_per_s", "step_s", "epoch_usd")
_MAIN_NUMBERS = _NUMBERS[:3]
"""Those for which there is room in 80 columns beside the settings."""


def conditions_text(conditions: Sequence[str]) -> str:
    """The conditions as one sentence part; empty when there are none."""
    return all_of(conditions)


def print_front(view: View, *, stale: frozenset[str] = frozenset()) -> None:
    """The front as a table and as a picture: what differs between its configurations, in numbers.

    The knobs are columns where the screen is wide enough, else one column of settings. `stale`
    are ids of trials to mark as those of other library versions.
    """
    if not view.front:
        return
    # Derived values follow from the knobs and would only take their room.
    names = view.space.knobs or view.knobs
    differing = [n for n in names if len({r.configuration.get(n) for r in view.front}) > 1]
    echo(f"Front ({view.source}): {_front_text(view)}")
    same = [n for n in names if n not in differing]
    print_fields([("all with", settings_text(view.front[0].configuration, same))])
    echo()
    # Those objectives that no column shows already.
    more = [o for o in view.objectives if o.name not in (*_SHOWN_OBJECTIVES, *differing)]
    labels = [o.name for o in more]
    wide = Sheet(["", *_NUMBERS, *labels, *differing], right=(*_NUMBERS, *labels))
    narrow = Sheet(
        ["", *_MAIN_NUMBERS, *labels, "settings"],
        right=(*_MAIN_NUMBERS, *labels),
        drop=("epoch", *reversed(labels)),
    )
    undecided = view.undecided
    for record in view.front:
        mark = "*" if view.best and view.best.configuration == record.configuration else ""
        mark += "~" if record.trial_id in stale else ""
        mark += "?" if record in undecided else ""
        numbers = _numbers(record, view)
        values = [_cell(record.configuration.get(name)) for name in differing]
        others = [significant(o.value(record) or 0.0) for o in more]
        wide.add_row(mark, *numbers, *others, *values)
        settings = settings_text(record.configuration, differing)
        narrow.add_row(mark, *numbers[: len(_MAIN_NUMBERS)], *others, settings)
    print_wider(wide, narrow)
    if view.best is not None:
        echo("* recommended")
    if undecided:
        echo(f"? {UNDECIDED}")
    if any(counted_gpus(record.configuration) > 1 for record in view.front):
        echo(f"of several GPUs {OF_ONE}")
    if any(record.trial_id in stale for record in view.front):
        echo("~ stale: of other library versions than the newest trials")
    print_plot(view)


def print_levels(view: View) -> None:
    """One front for each level of rank and length, as one table; says so where there is none."""
    found = levels(view)
    if not found:
        echo("There are no levels: no capacity knob (rank, length) has two values here.")
        return
    shown = [(level, level.front()) for level in found[:SHOWN_LEVELS]]
    names = list(dict.fromkeys(name for level, _ in shown for name in level.values))
    echo(f"Fronts by level of {' and '.join(names)} ({view.source}): in each level")
    echo(f"{_front_text(view)}; floors do not apply")
    echo()
    rows = Sheet(
        [*names, *_MAIN_NUMBERS, "settings"], right=(*names, *_MAIN_NUMBERS), drop=("epoch",)
    )
    knobs = [name for name in view.space.knobs or view.knobs if name not in names]
    on_front = [record for _, front in shown for record in front]
    differing = [n for n in knobs if len({r.configuration.get(n) for r in on_front}) > 1]
    for level, front in shown:
        values = [_cell(level.values.get(name)) for name in names]
        if not front:
            rows.add_row(*values, *[""] * len(_MAIN_NUMBERS), f"none of {level.trials} fits")
        for record in front:
            numbers = _numbers(record, view)[: len(_MAIN_NUMBERS)]
            rows.add_row(*values, *numbers, settings_text(record.configuration, differing))
            values = [""] * len(names)
    print_sheet(rows)
    if len(found) > SHOWN_LEVELS:
        echo(f"and {len(found) - SHOWN_LEVELS} more levels, which --json lists")


def _front_text(view: View) -> str:
    if view.is_default:
        return "none is both faster and smaller"
    labels = " and ".join(objective.label for objective in view.objectives)
    return f"no configuration is better in {labels}"


def _cell(value: KnobValue | None) -> str:
    return "" if value is None else show(value)


def _numbers(record: TrialRecord, view: View) -> list[str]:
    evidence = record.outcome.evidence
    assert evidence is not None  # without numbers a trial is on no front
    cost = run_cost(record, view.space, view.gpu)
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


def print_recommendation(
    best: BestTrial, *, use: Sequence[str] = (), measure: str = "", verify: str = ""
) -> None:
    """The recommended configuration with what it needs and what follows from it.

    `use` are commands that bring it to where training is configured, `measure` the one whose
    trials decide between it and what may be as fast, and `verify` the one that tries it.
    """
    speed, memory = best.evidence.speed, best.evidence.memory
    echo(f"Recommended ({best.source}): {best.title}")
    free = f"{format_size(best.free_bytes)} free"
    around = best.device_bytes_interval
    size = format_size(memory.device_bytes) + (f" ({around.text(format_size)})" if around else "")
    margin = best.record.budget.margin_bytes
    mfu = f", {speed.mfu:.0%} of the peak (MFU)" if speed.mfu is not None else ""
    # Code of the user's own need not count tokens.
    tokens = f"{significant(speed.tokens_per_s)} tokens/s, " if speed.tokens_per_s else ""
    names = best.space.knobs or tuple(best.configuration)
    print_fields(
        [
            ("GPUs", gpus_text(best.configuration, best.gpu) if best.gpus > 1 else ""),
            ("set", settings_text(best.configuration, names)),
            ("rest", settings_text({n: best.configuration[n] for n in _others(best, names)})),
            (
                "memory",
                f"{size} of {format_size(best.memory_bytes)}{' on each' * (best.gpus > 1)}"
                f"{' ' * bool(best.limit_text)}{best.limit_text}: {free}, "
                f"margin {format_size(margin)}",
            ),
            ("ranks", ranks_text(best.evidence)),
            (
                "speed",
                f"{significant(speed.samples_per_s)} samples/s{_interval_text(best)}, {tokens}"
                f"{format_duration(speed.step_s)} an optimizer step{mfu}",
            ),
            ("verified", best.verified_text),
            ("time", _time_text(best.cost)),
            ("cost", _cost_text(best.cost)),
            ("against", _gain_text(best)),
            ("chosen", best.chosen_from),
            ("near tie", near_tie_text(best)),
        ],
        indent=2,
    )
    for name, line in (("verify", verify), ("measure", measure)):
        if line:
            echo(f"  {name:<10}{line}")
    print_stages(best.record, best.space)
    _print_by_gpus(best)
    for number, line in enumerate(use):
        # A command is one line, however long: it is there to be copied.
        echo(f"  {'' if number else 'use':<10}{line}")
    if best.space.model is not None and any(line.endswith(" --to train.py") for line in use):
        echo(f"  {'':<10}(train.py is your file that trains {best.space.model})")


def _print_by_gpus(best: BestTrial) -> None:
    """What an epoch takes and costs on each number of GPUs; nothing where there is one number."""
    if not best.by_gpus:
        return
    echo(f"\nThe fastest that fits on each number of GPUs ({best.source}); {OF_ONE}\n")
    hidden = (GPUS_PER_TRIAL, DISTRIBUTED, MACHINES)
    knobs = [name for name in best.space.knobs if name not in hidden]
    of = [row.record.configuration for row in best.by_gpus]
    differing = [name for name in knobs if len({c.get(name) for c in of}) > 1]
    rows = Sheet([*COLUMNS, "settings"], right=COLUMNS[2:], drop=("epoch",))
    for row in best.by_gpus:
        rows.add_row(*row_texts(row), settings_text(row.record.configuration, differing))
    print_sheet(rows)
    echo("< no other number is both faster and cheaper")
    print_fields([("trade", trade_text(best.by_gpus))])
    echo()


def _others(best: BestTrial, names: Sequence[str]) -> list[str]:
    """What the space sets or derives besides `names`: its defaults would bury that."""
    of_stages = {name for stage in best.space.stages for name in stage.values}
    hidden = {*names, *best.space.defaults, *of_stages}
    return [name for name in best.configuration if name not in hidden]


def _interval_text(best: BestTrial) -> str:
    interval = best.samples_per_s_interval
    return f" ({interval.text(significant)})" if interval else ""


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
    fits = "" if gain.baseline_fits else " (which does not fit)"
    return (
        f"{gain.speedup:.2f} x the samples/s of the baseline{fits}, with "
        f"{format_size(abs(gain.saved_bytes))} {more}: {baseline}"
    )


def print_prediction_error(records: Sequence[TrialRecord]) -> None:
    """How close the predictions came, where trials were measured; else nothing."""
    found = pairs(records)
    rows = prediction_error_rows(found)
    text = verdict_text(verdicts(records))
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
    """How the trials ended, in words: those that ran, and what was predicted."""
    by_source = {s: [r for r in records if r.source is s] for s in reversed(Source)}
    return "; ".join(f"{counts_text(found)} ({s})" for s, found in by_source.items() if found)


def counts_text(records: Sequence[TrialRecord]) -> str:
    """How the trials ended, in words."""
    oom = sum(r.outcome.status is Status.OOM for r in records)
    tight = sum(r.outcome.status is Status.OK and not r.fits for r in records)
    failed = sum(r.outcome.status not in (Status.OK, Status.OOM) for r in records)
    parts = [f"{sum(r.fits for r in records):,} fit", f"{oom:,} out of memory"]
    parts += [f"{tight} without the margin"] if tight else []
    parts += [f"{failed} failed"] if failed else []
    return f"{len(records):,} configurations: {', '.join(parts)}"
