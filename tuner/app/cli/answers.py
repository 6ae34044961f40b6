"""Answers of a search: one GPU type, several side by side, and the commands to go on with."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.app import recommendation
from tuner.app.device import can_emulate
from tuner.app.target import Target
from tuner.core.expressions import settings_text, show
from tuner.core.records import Source
from tuner.core.units import GIB, format_duration, significant
from tuner.report.terminal import front
from tuner.report.terminal.render import differing, echo, print_fields, print_json, size_text
from tuner.report.terminal.tables import print_settings
from tuner.searches.best import BestTrial
from tuner.searches.facts import OF_ONE, times_text
from tuner.searches.options import SearchOptions
from tuner.space.settings import default_values

if TYPE_CHECKING:
    from tuner.app.search.plan import SearchPlan, SkippedGpu
    from tuner.app.search.run import SearchedGpu


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
    """Number of trials, duration, and why the search ended."""
    result, stopped_by = found.result, str(found.result.stopped_by)
    took = format_duration(result.duration_s)
    if found.plan.trial_device is not None:
        ended = stopped_text(found.plan.options, stopped_by)
        return f"{len(result.records) - result.reused} new trials in {took}{ended}"
    text = f"traced {result.traced} of them in full in {took}"
    if stopped_by == "exhausted":
        return text
    ended = {"budget": "; the front may hold others, too"}.get(
        stopped_by, stopped_text(found.plan.options, stopped_by)
    )
    return text + ended


def print_searched(found: SearchedGpu, *, as_json: bool) -> None:
    """The front, the recommendation and how good predictions were; JSON where asked for."""
    plan, view = found.plan, found.view
    if as_json:
        print_json(answer_dict(found))
        return
    echo(_done_text(found))
    echo(front.sources_text(view.records))
    echo()
    if view.best is None:
        echo(found.answer.reason)
        echo("Lower the minimums with --where, widen the space, or choose a larger GPU.")
    else:
        front.print_front(view)
        echo()
        measure = measure_command(plan.target, view.best)
        verify = verify_command(plan.target, view.best)
        # Under what this search asked for.
        own = plan.target.space.conditions(())
        where = tuple(text for text in plan.all_conditions if text not in own)
        criteria = recommendation.Criteria(where=where, objectives=plan.options.objectives)
        use = use_commands(plan.target, criteria)
        front.print_recommendation(view.best, use=use, measure=measure, verify=verify)
    front.print_prediction_error(view.records)
    folder = plan.target.folder
    files = f"{folder.path}/: best.yaml, pareto.csv, pareto.png, report.html, {folder.journal.name}"
    _print_end(plan, view.notes, files, plan.target.command("show"))


def _print_end(plan: SearchPlan, notes: Iterable[str], files: str, more: str) -> None:
    """The notes, the files that were written, and the command to go on with."""
    echo()
    for note in notes:
        print_fields([("note", note)])
    study = plan.options.study
    shown = shlex.join(["optuna-dashboard", str(study)]) if study is not None else ""
    print_fields([("files", files), ("study", shown), ("more", more)])


def print_all_searched(found: Sequence[SearchedGpu | SkippedGpu], *, as_json: bool) -> None:
    """The answer of each GPU type, then all side by side; with `as_json` a list.

    The list is in the order of the comparison: the cheapest epoch first.
    """
    from tuner.app.search.run import SearchedGpu

    found = sorted(found, key=lambda one: recommendation.by_cost(one.answer))
    answers = [one.answer for one in found]
    if as_json:
        print_json(
            [answer_dict(one) if isinstance(one, SearchedGpu) else one.to_dict() for one in found]
        )
        return
    ran = [one for one in found if isinstance(one, SearchedGpu)]
    for one in ran:
        echo(f"\n{one.plan.target.gpu.id}: {one.plan.target.gpu.name}")
        echo(_done_text(one))
        echo(front.sources_text(one.view.records))
        if one.view.best is not None:
            front.print_front(one.view)
        front.print_prediction_error(one.view.records)
    echo()
    print_comparison_of(answers)
    folders = "/, ".join(str(one.plan.target.folder.path) for one in ran)
    cheapest = answers[0].gpu.id if answers[0].best else ""
    best = next((one.plan for one in ran if one.plan.target.gpu.id == cheapest), None)
    _print_end(
        ran[0].plan,
        dict.fromkeys(note for one in ran for note in one.view.notes),
        f"best.yaml, pareto.csv, pareto.png, report.html and trials.jsonl in {folders}/",
        best.target.command("best") if best else "",
    )


def answer_dict(found: SearchedGpu) -> dict[str, Any]:
    """The answer of one GPU type, for `--json`."""
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
        "front": [front.record_dict(record) for record in view.front],
        "best": view.best.to_dict() if view.best else None,
        "files": {
            "journal": str(folder.journal),
            "pareto_csv": str(folder.pareto_csv),
            "best_yaml": str(folder.best_yaml),
            "pareto_png": str(folder.pareto_png),
            "report_html": str(folder.report_html),
        },
    }


def print_answers(found: Sequence[recommendation.Recommended], *, as_json: bool) -> None:
    """The comparison as a table. Raises `NothingFitsError` where no type fits anything."""
    recommendation.require_an_answer(found)
    if as_json:
        print_json(
            [
                a.best.to_dict() if a.best else {"gpu": {"id": a.gpu.id}, "reason": a.reason}
                for a in found
            ]
        )
        return
    print_comparison_of(found)


def print_comparison_of(found: Sequence[recommendation.Recommended]) -> None:
    """The recommendations side by side, and why a type has none."""
    if any(answer.best for answer in found):
        _print_gpus([answer for answer in found if answer.best])
    print_fields([(a.gpu.id, a.reason) for a in found if a.best is None])
    unpriced = [a.gpu.id for a in found if a.best and a.epoch_usd is None]
    if unpriced:
        echo(f"no offer was found of {', '.join(unpriced)}: --price of one type, or your gpus.yaml")


def _print_gpus(found: Sequence[recommendation.Recommended]) -> None:
    bests = [answer.best for answer in found if answer.best]
    varying, same = differing(bests[0].space.knobs, [best.configuration for best in bests])
    sources = [str(source) for source in Source if source in {best.source for best in bests}]
    echo(f"{bests[0].space.name}, the cheapest epoch first ({' and '.join(sources)})")
    print_fields([("all with", settings_text(bests[0].configuration, same))])
    echo()
    more = ["source"] if len(sources) > 1 else []
    print_settings(
        ("GPU", *GPU_NUMBERS, *more),
        [
            ((*gpu_cells(answer, best), *([str(best.source)] if more else [])), best.configuration)
            for answer, best in zip(found, bests, strict=True)
        ],
        varying,
        right=GPU_NUMBERS,
        drop=("source", "epoch"),
    )
    if any(best.gpus > 1 for best in bests):
        echo(f"of several GPUs {OF_ONE}")


GPU_NUMBERS = ("USD/epoch", "epoch", "samples/s", "GiB of")


def gpu_cells(answer: recommendation.Recommended, best: BestTrial) -> tuple[str, ...]:
    """A GPU type and its numbers."""
    size, cost, usd = best.evidence.memory.device_bytes, best.cost, answer.epoch_usd
    return (
        times_text(best.gpus, answer.gpu.id),
        "?" if usd is None else f"{usd:,.2f}",
        format_duration(cost.epoch_s) if cost else "?",
        significant(best.evidence.speed.samples_per_s),
        f"{size / GIB:.1f} of {best.memory_bytes / GIB:.1f}",
    )


def measure_command(target: Target, best: BestTrial) -> str:
    """The search whose trials decide between the recommendation and its rivals; empty without."""
    chosen = best.to_measure
    words: list[str] = []
    for name, knob in target.space.knobs.items():
        values = list(dict.fromkeys(c[name] for c in chosen if name in c))
        if len(knob.values) == 1 or any(isinstance(value, tuple) for value in values[1:]):
            continue  # nothing to choose, or lists, which no condition can name
        if len(values) == 1 and values[0] != "":
            words += ["--set", f"{name}={show(values[0])}"]
        elif values:
            # A word of an expression stands in quotes.
            among = ", ".join(f'"{v}"' if isinstance(v, str) else show(v) for v in values)
            is_one_of = f"in ({among})" if len(values) > 1 else f"== {among}"
            words += ["--where", f"{name} {is_one_of}"]
    return target.command("search", *words) if chosen else ""


def verify_command(target: Target, best: BestTrial) -> str:
    """The trial of the recommendation on an emulated GPU; "" where one has been, or cannot be."""
    is_tried = best.source is not Source.PREDICTED or best.record.verified_by is not None
    if is_tried or not can_emulate(target.gpu):
        return ""
    taken = ("--space", "--model", "--gpu", "--gpu-memory")
    # Options that all have a value.
    given = zip(target.arguments[::2], target.arguments[1::2], strict=True)
    words = [word for pair in given if pair[0] in taken for word in pair]
    usual = default_values(target.space)
    values = {n: best.configuration.get(n) for n in target.space.knobs}
    values = {n: value for n, value in values.items() if value != usual[n]}
    if any(value in ("", None) for value in values.values()):
        return ""  # which no command line can say
    words += [word for n, value in values.items() for word in ("--set", f"{n}={show(value)}")]
    return shlex.join(["tuner", "trial", *words, "--mode", "emulate"])


def use_commands(
    target: Target, criteria: recommendation.Criteria = recommendation.ANY_THAT_FITS
) -> tuple[str, ...]:
    """Commands that write the recommendation by `criteria` into your file, or another tool's."""
    words = [word for text in criteria.where for word in ("--where", text)]
    if criteria.max_memory is not None:
        words += ["--max-memory", size_text(criteria.max_memory)]
    words += ["--headroom", criteria.headroom] if criteria.headroom is not None else []
    words += [word for name in criteria.objectives for word in ("--objective", name)]
    return target.use_commands(*words)
