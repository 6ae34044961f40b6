"""What `tuner search` prints: its plan before, its answer after."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.app.cli.answers import (
    conditions_text,
    print_front,
    print_prediction_error,
    print_recommendation,
    record_dict,
    sources_text,
)
from tuner.app.cli.every_gpu import print_comparison_of
from tuner.app.cli.next_commands import measure_command, use_commands, verify_command
from tuner.app.measuring import Predicting
from tuner.app.recommendation import Criteria, answers_found, nothing_fits
from tuner.app.search.plan import SearchOptions, SearchPlan, SkippedGpu
from tuner.app.search.run import SearchedGpu
from tuner.app.search.supported import GUIDED, has_predictions
from tuner.core.records import TrialRecord
from tuner.core.units import format_duration, format_gib
from tuner.report.terminal.render import count, echo, print_fields, print_json

if TYPE_CHECKING:
    from tuner.app.search.supported import SupportedSpace


def print_plan(
    plan: SearchPlan, known: tuple[TrialRecord, ...], *, err: bool, again: bool = False
) -> None:
    """What will be searched, on what, and where the numbers come from.

    What is the same for all GPU types is left out where it is said `again`.
    """
    target, options, part = plan.target, plan.options, plan.part
    gpu = target.gpu
    there = len(part.supported)
    # Near-ties are measured again with what is left of a budget that is larger.
    number = "all" if options.trials >= there else f"{options.trials} of"
    wanted = f"{number} {count(there)} configurations"
    searcher = f"{options.searcher}, seed {options.seed}"
    if options.searcher == GUIDED and not has_predictions(target.space, gpu):
        searcher += "; without predictions, as there are none of your own code"
    to_try = ("to try", f"{wanted} ({searcher})")
    if isinstance(plan.trials_on, Predicting):
        to_try = ("predict", f"all {count(there)} configurations; the front is traced in full")
    common = [
        ("space", f"{target.space.name}: {target.space.description}".rstrip(": ")),
        ("model" if target.space.model else "trains", target.space.subject),
        ("for", ", ".join(objective.label for objective in plan.objectives)),
        ("at most", _limits_text(plan)),
        ("where", _where_text(plan)),
    ]
    print_fields(
        [
            *([] if again else common),
            ("GPU", f"{gpu.name}, {format_gib(gpu.memory_bytes)}, {_price_text(plan)}"),
            to_try,
            ("left out", _left_out_text(part)),
            ("margin", f"{format_gib(plan.margin_bytes)} of memory to keep free (--margin)"),
            ("known", _known_text(plan, known)),
            ("numbers", _numbers_text(plan)),
        ],
        err=err,
    )
    echo(err=err)


def _limits_text(plan: SearchPlan) -> str:
    options = plan.options
    limits = {
        "{:g} GPU hours": options.gpu_hours,
        "{:g} USD": options.max_cost_usd,
    }
    texts = [text.format(value) for text, value in limits.items() if value is not None]
    if texts and plan.trial_device is not None and plan.trial_device.emulated:
        texts.append("of which emulated trials take nothing")
    return ", ".join(texts)


def _price_text(plan: SearchPlan) -> str:
    gpu = plan.target.gpu
    if gpu.price_usd_per_hour is None:
        return "price unknown (--price)"
    dated = f" ({gpu.price_date})" if gpu.price_date else ""
    return f"{gpu.price_usd_per_hour:g} USD per hour{dated}"


def _known_text(plan: SearchPlan, known: tuple[TrialRecord, ...]) -> str:
    alike = sum(map(plan.is_alike, known))
    what = "traces" if isinstance(plan.trials_on, Predicting) else "trials"
    return f"{alike} {what} from {plan.target.folder.journal}" if alike else ""


def _numbers_text(plan: SearchPlan) -> str:
    if isinstance(plan.trials_on, Predicting):
        return f"predicted, not measured: {plan.trials_on.why}"
    return plan.trials_on.text(plan.target.gpu)


def _where_text(plan: SearchPlan) -> str:
    text = conditions_text(plan.all_conditions)
    floors = [floor for floor in plan.conditions if floor not in plan.options.where]
    if floors:
        name = plan.part.space.condition(floors[0]).names
        text += f" (floors of the space; --where '{min(name)} >= ...' sets others)"
    return text


def _left_out_text(part: SupportedSpace) -> str:
    if not part.left_out:
        return ""
    reasons = "; ".join(part.reasons)
    return f"{count(part.left_out)} configurations that the GPU cannot run: {reasons}"


def stopped_text(options: SearchOptions, stopped_by: str) -> str:
    """Why a search ended, where that is not the number of trials."""
    limits = {
        "gpu_hours": options.gpu_hours,
        "max_cost": options.max_cost_usd,
        "min_gain": options.min_gain and 100 * options.min_gain,
    }
    text = {
        "budget": "",
        "exhausted": "every configuration has been tried",
        "nothing_left": "no remaining configuration may fit",
        "time_limit": "the time limit was reached",
        "gpu_hours": "one more may go beyond {:g} GPU hours",
        "max_cost": "one more may cost more than {:g} USD",
        "min_gain": "no trial is expected to gain {:g}% of hypervolume or throughput",
        "interrupted": "interrupted; the same command continues from here",
    }[stopped_by].format(limits.get(stopped_by))
    return f"; {text}" if text else ""


def _done_text(found: SearchedGpu) -> str:
    """What ran, how long it took, and why it ended."""
    result, stopped_by = found.result, str(found.result.stopped_by)
    took = format_duration(result.duration_s)
    if not isinstance(found.plan.trials_on, Predicting):
        ended = stopped_text(found.plan.options, stopped_by)
        return f"{len(result.records) - result.reused} new trials in {took}{ended}"
    text = f"traced {result.traced} of them in full in {took}"
    if stopped_by == "exhausted":
        return text
    ended = {"budget": "; the front may hold others, too"}.get(
        stopped_by, stopped_text(found.plan.options, stopped_by)
    )
    return text + ended


def print_answer(found: SearchedGpu, *, as_json: bool) -> None:
    """The front, the recommendation and how good predictions were; JSON where asked for."""
    plan, view = found.plan, found.view
    if as_json:
        print_json(answer_dict(found))
        return
    echo(_done_text(found))
    echo(sources_text(view.records))
    echo()
    if view.best is None:
        met = [r for r in view.records if plan.meets(r.configuration)]
        echo(nothing_fits(plan.target, met, plan.conditions))
        echo("Lower the floors with --where, widen the space, or choose a larger GPU.")
    else:
        print_front(view)
        echo()
        measure = measure_command(plan.target, view.best)
        verify = verify_command(plan.target, view.best)
        print_recommendation(view.best, use=_use(plan), measure=measure, verify=verify)
    print_prediction_error(view.records)
    echo()
    for note in view.notes:
        print_fields([("note", note)])
    folder = plan.target.folder
    print_fields(
        [
            ("files", f"{folder.path}/: best.yaml, pareto.csv, pareto.png, report.html, "
             f"{folder.journal.name}"),
            ("study", _study_text(plan)),
            ("more", plan.target.command("show")),
        ]
    )  # fmt: skip


def print_answers(found: Sequence[SearchedGpu | SkippedGpu], *, as_json: bool) -> None:
    """What each GPU type came to, and all of them side by side; a list where JSON is asked for.

    The list is in the order of the comparison: the cheapest epoch first.
    """
    answers = answers_found(found)
    if as_json:
        order = [answer.gpu.id for answer in answers]
        dicts = {(one["gpu"]): one for one in map(_any_dict, found)}
        print_json([dicts[gpu] for gpu in order])
        return
    ran = [one for one in found if isinstance(one, SearchedGpu)]
    for one in ran:
        _print_part(one)
    echo()
    print_comparison_of(answers)
    echo()
    for note in dict.fromkeys(note for one in ran for note in one.view.notes):
        print_fields([("note", note)])
    folders = [str(one.plan.target.folder.path) for one in ran]
    cheapest = answers[0].gpu.id if answers[0].best else ""
    best = next((one.plan for one in ran if one.plan.target.gpu.id == cheapest), None)
    print_fields(
        [
            ("files", f"best.yaml, pareto.csv, pareto.png, report.html and trials.jsonl in "
             f"{'/, '.join(folders)}/"),
            ("study", _study_text(ran[0].plan)),
            ("more", best.target.command("best") if best else ""),
        ]
    )  # fmt: skip


def _print_part(found: SearchedGpu) -> None:
    """The front of one GPU type of several."""
    plan, view = found.plan, found.view
    echo(f"\n{plan.target.gpu.id}: {plan.target.gpu.name}")
    echo(_done_text(found))
    echo(sources_text(view.records))
    if view.best is not None:
        print_front(view)
    print_prediction_error(view.records)


def _any_dict(found: SearchedGpu | SkippedGpu) -> dict[str, Any]:
    if isinstance(found, SearchedGpu):
        return answer_dict(found)
    target = found.target
    return {
        "space": target.space.name,
        "model": target.space.model,
        "gpu": target.gpu.id,
        "reason": found.reason,
        "best": None,
        "front": [],
    }


def _use(plan: SearchPlan) -> tuple[str, ...]:
    """The commands that bring the recommendation to use, under what this search asked for."""
    own = plan.target.space.conditions(())
    where = [text for text in plan.all_conditions if text not in own]
    return use_commands(
        plan.target, Criteria(where=tuple(where), objectives=plan.options.objectives)
    )


def _study_text(plan: SearchPlan) -> str:
    path = plan.options.study
    return shlex.join(["optuna-dashboard", str(path)]) if path is not None else ""


def answer_dict(found: SearchedGpu) -> dict[str, Any]:
    """What a search of one GPU type came to, for `--json`."""
    plan, result, view = found.plan, found.result, found.view
    folder = plan.target.folder
    return {
        "space": plan.target.space.name,
        "model": plan.target.space.model,
        "gpu": plan.target.gpu.id,
        "source": view.source,
        "stopped_by": str(result.stopped_by),
        "duration_s": round(result.duration_s, 3),
        "conditions": list(plan.all_conditions),
        "candidates": result.candidates,
        "left_out": plan.part.left_out,
        "notes": list(view.notes),
        "trials": len(result.records) if result.traced is None else 0,
        **({} if result.traced is None else {"traced": result.traced}),
        "reused": result.reused,
        "statuses": {str(status): number for status, number in result.counts.items()},
        "front": [record_dict(record) for record in view.front],
        "best": view.best.to_dict() if view.best else None,
        "files": {
            "journal": str(folder.journal),
            "pareto_csv": str(folder.pareto_csv),
            "best_yaml": str(folder.best_yaml),
            "pareto_png": str(folder.pareto_png),
            "report_html": str(folder.report_html),
        },
    }
