"""`tuner search --dry-run`: the trials that would run, their duration and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.app.cli.answers import stopped_text
from tuner.app.listener import Listener
from tuner.app.measuring import Measuring, Predicting
from tuner.app.search.plan import SearchPlan, SkippedGpu
from tuner.app.search.prepare import Predictors, Prepared, measure_options, prepare
from tuner.app.target import comparable, with_margin
from tuner.core.errors import EXIT_FOUND, InputError
from tuner.core.records import TrialRecord
from tuner.core.units import format_duration, format_size, significant
from tuner.report.terminal.render import (
    differing,
    echo,
    print_fields,
    print_json,
    settings_text,
)
from tuner.report.terminal.tables import print_rows
from tuner.trial.stop_rule import LONGEST_S

if TYPE_CHECKING:
    from tuner.searches.preview import PlannedTrial, Preview

SHOWN = 12
"""Trials in the table; what comes later depends on what these come to. JSON has all."""


def dry_run(plans: Sequence[SearchPlan | SkippedGpu], listener: Listener, *, as_json: bool) -> int:
    """Print the trials that would run; writes nothing but the cache of predictions.

    Exit code 0 whatever they are expected to come to. Raises `InputError` for code of the
    user's own, of which nothing is predicted.
    """
    answers = []
    predictors = Predictors()
    for plan in plans:
        if isinstance(plan, SkippedGpu):
            listener.refused(plan)
            answers.append({"dry_run": True, "gpu": plan.target.gpu.id, "reason": plan.reason})
            continue
        if len(plans) > 1 and not as_json:
            echo(f"\n{plan.target.gpu.id}: {plan.target.gpu.name}\n")
        answers.append(_dry_run(plan, listener, predictors, as_json=as_json))
    if as_json:
        print_json(answers if len(plans) > 1 else answers[0])
    return EXIT_FOUND


def _dry_run(
    plan: SearchPlan, listener: Listener, predictors: Predictors, *, as_json: bool
) -> dict[str, Any]:
    options = plan.options
    if not plan.part.space.predictable:
        raise InputError(
            "a dry run shows predictions, and there are none for your own code",
            hint="--trials 1 in place of --dry-run tries one configuration",
        )
    known: tuple[TrialRecord, ...] = ()
    if isinstance(plan.trials_on, Measuring) and not options.fresh:  # traces are no trials
        known = comparable(plan.target.folder.read().records, plan.target)
    known = tuple(with_margin(record, plan.margin_bytes) for record in known)
    listener.planned(plan, known)
    prepared = prepare(plan, known, listener, predictors=predictors)
    if prepared.why_infeasible:
        if not as_json:
            echo(f"\nDry run: no trial would run: {prepared.why_infeasible}.")
        return {"dry_run": True, "gpu": plan.target.gpu.id, "reason": prepared.why_infeasible}
    from tuner.searches.preview import preview  # Ray and Optuna: seconds to import

    trials_on = plan.trials_on
    how = measure_options(trials_on, options) if isinstance(trials_on, Measuring) else None
    found = preview(prepared.request, how)
    if not as_json:
        _print(plan, found)
    return _to_dict(plan, prepared, found)


def _print(plan: SearchPlan, found: Preview) -> None:
    echo("\nDry run: no trial was run, and no results were written.")
    if not found.trials:
        echo(f"No trial would run{stopped_text(plan.options, str(found.stopped_by))}.")
        return
    names = plan.target.facts.knobs
    first = found.trials[:SHOWN]
    varying, same = differing(names, [trial.configuration for trial in first])
    head = f"Would run, in this order if all goes as predicted (the first {len(first)})"
    echo(head if len(found.trials) > len(first) else head.rpartition(" (")[0])
    print_fields([("all with", settings_text(first[0].configuration, same))])
    echo()
    numbers = ("", "memory", "fits", "samples/s", "time")
    print_rows(
        [*numbers, "settings"],
        [
            (
                str(number),
                format_size(trial.prediction.memory.device_bytes),
                _percent_text(trial.fit_probability),
                significant(trial.prediction.speed.samples_per_s),
                format_duration(trial.device_s),
                settings_text(trial.configuration, varying),
            )
            for number, trial in enumerate(first, start=1)
        ],
        right=numbers,
        drop=("time", "samples/s"),
    )
    echo("fits: the probability of not running out of memory; all numbers are predicted")
    echo()
    print_fields(
        [
            ("in all", _total_text(plan, found)),
            ("too long", _too_long_text(plan, found)),
            ("here", _here_text(plan)),
        ]
    )


def _percent_text(share: float) -> str:
    """No certainty is claimed that a model of the GPU cannot have."""
    return ">99%" if share > 0.99 else f"{share:.0%}"


def _total_text(plan: SearchPlan, found: Preview) -> str:
    cost = _cost_usd(plan, found)
    price = plan.target.gpu.price_usd_per_hour
    text = f"{len(found.trials)} trials, about {format_duration(found.device_s)} of GPU time"
    text += f", {cost:.2f} USD at {price:g} USD per hour" if cost is not None else ""
    return text + stopped_text(plan.options, str(found.stopped_by))


def _too_long_text(plan: SearchPlan, found: Preview) -> str:
    """Trials that a device would be at when their time is over."""
    timeout_s = plan.options.timeout_s or LONGEST_S
    long = sum(trial.device_s > timeout_s for trial in found.trials)
    if not long:
        return ""
    return (
        f"on a GPU, {long} of them would be stopped after {format_duration(timeout_s)}; --timeout "
        "sets another limit"
    )


def _here_text(plan: SearchPlan) -> str:
    trials_on = plan.trials_on
    if isinstance(trials_on, Predicting):
        return f"{trials_on.why}: a search would run no trials, and cost nothing"
    at_once = plan.options.workers or len(trials_on.local)
    return f"{at_once} trials at once" if at_once > 1 else ""


def _cost_usd(plan: SearchPlan, found: Preview) -> float | None:
    price = plan.target.gpu.price_usd_per_hour
    return found.device_s / 3600 * price if price is not None else None


def _to_dict(plan: SearchPlan, prepared: Prepared, found: Preview) -> dict[str, Any]:
    return {
        "dry_run": True,
        "space": plan.target.space.name,
        "gpu": plan.target.gpu.id,
        "predicted": isinstance(plan.trials_on, Predicting),
        "notes": list(prepared.notes),
        "reused": found.reused,
        "stopped_by": str(found.stopped_by),
        "gpu_s": round(found.device_s, 1),
        "cost_usd": _cost_usd(plan, found),
        "trials": [_trial_dict(trial) for trial in found.trials],
    }


def _trial_dict(trial: PlannedTrial) -> dict[str, Any]:
    return {
        "configuration": trial.configuration.to_dict(),
        "fit_probability": round(trial.fit_probability, 4),
        "gpu_s": round(trial.device_s, 1),
        "predicted": trial.prediction.to_dict(),
    }
