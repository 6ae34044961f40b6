"""The recommended configuration, with what it needs and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.core.expressions import settings_text
from tuner.core.setup.distributed_knobs import DISTRIBUTED, GPUS_PER_TRIAL, MACHINES
from tuner.core.units import format_duration, format_size, significant
from tuner.report.terminal.evidence import print_stages
from tuner.report.terminal.render import count, differing, echo, print_fields, say
from tuner.report.terminal.tables import print_rows
from tuner.report.terminal.verdict import ANSWER, Field
from tuner.searches.best import BestTrial, close_calls_text, not_measured_text
from tuner.searches.cost import COLUMNS, RunCost, row_texts, trade_text
from tuner.searches.facts import OF_ONE, gpus_text, ranks_text


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
