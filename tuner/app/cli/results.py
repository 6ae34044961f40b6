"""`tuner best`, `show` and `report`: answers from the journal of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from tuner.app.cli.answers import measure_command, print_answers, use_commands, verify_command
from tuner.app.cli.options import json_option, objective_option, subcommand, where_option
from tuner.app.cli.target_options import Selected, criteria_options, target_options
from tuner.app.recommendation import Criteria, answers, nothing_fits_error, recommended
from tuner.app.target import Target, check_conditions, stale_text, usable
from tuner.core.errors import EXIT_FOUND, EXIT_NOTHING_FITS, InputError, unknown
from tuner.core.expressions import all_of
from tuner.core.records import TrialRecord
from tuner.report.terminal.evidence import more_text, print_comparison, print_evidence, print_stages
from tuner.report.terminal.front import (
    counts_text,
    print_front,
    record_dict,
)
from tuner.report.terminal.recommendation import print_recommendation, recommended_fields
from tuner.report.terminal.render import echo, print_fields, print_json, settings_text
from tuner.report.terminal.verdict import fields_dict
from tuner.searches.best import check_text
from tuner.searches.facts import gpus_text
from tuner.searches.objectives import require_known
from tuner.searches.view import View, build_view


@subcommand(
    "best",
    "tuner best --space qlora27b --gpu a6000 --headroom 10%",
    "tuner best --space qlora27b --gpu all    # which GPU is cheapest per epoch?",
)
@target_options()
@criteria_options
@json_option
def best(
    *,
    selected: Selected,
    criteria: Criteria,
    as_json: bool,
) -> None:
    """Print the fastest configuration that fits, from a finished search.

    --gpu all compares every searched GPU type, --gpu a6000,t4 the named ones. Exit code 1 if
    nothing tried fits.
    """
    targets = selected.targets()
    if selected.is_several:
        print_answers(
            answers(targets, lambda target: recommended(target, criteria)), as_json=as_json
        )
        return
    target = targets[0]
    best = recommended(target, criteria)
    use = use_commands(target, criteria)
    measure = measure_command(target, best)
    if as_json:
        commands = {"use": list(use), "measure": measure}
        answer = fields_dict(recommended_fields(best))
        print_json({"by_gpus": [], **best.to_dict(), **commands, "answer": answer})
        return
    echo(f"{target.space.name} on {target.gpu.name}: {target.space.subject_of(best.configuration)}")
    if target.known != target.folder:
        echo("from the results that come with tuner; nothing was searched here")
    print_recommendation(best, use=use, measure=measure, verify=verify_command(target, best))


@subcommand(
    "show",
    "tuner show --space qlora27b --gpu a6000",
    "tuner show --space qlora27b --gpu a6000 3f2a91c0-007",
    "tuner show --space qlora27b --gpu a6000 --objective cost",
)
@click.argument("trial_id", metavar="[TRIAL]", required=False)
@target_options()
@where_option
@objective_option
@json_option
def show(
    *,
    trial_id: str | None,
    selected: Selected,
    where: tuple[str, ...],
    objectives: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the front of a search, or everything known about one TRIAL."""
    target = selected.target()
    records, old, _ = usable(target)
    if trial_id is not None:
        _show_trial(target, _find((*old, *records), trial_id), old, as_json=as_json)
        return
    view = build_view(
        records,
        target.facts,
        target.gpu,
        where=lambda configuration: target.space.matches(configuration, where),
        conditions=check_conditions(target, where),
        objectives=objectives,
    )
    require_known(view.records, view.objectives)
    if as_json:
        print_json(_front_dict(target, view))
        return
    print_fields(
        [
            ("space", f"{target.space.name}: {target.space.subject}"),
            ("GPU", target.gpu.name),
            ("where", all_of(view.conditions)),
            ("of all", counts_text(view.records)),
            ("stale", f"{stale_text(old, records)} left out" if old else ""),
        ]
    )
    if not view.front:
        met = [r for r in view.records if target.space.matches(r.configuration, where)]
        raise nothing_fits_error(target, met, view.conditions)
    echo()
    print_front(view)


def _front_dict(target: Target, view: View) -> dict[str, Any]:
    return {
        "space": target.space.name,
        "gpu": target.gpu.id,
        "source": view.source,
        "conditions": list(view.conditions),
        "trials": len(view.records),
        "objectives": [objective.name for objective in view.objectives],
        "front": [record_dict(record) for record in view.front],
        "best": view.best.to_dict() if view.best else None,
    }


def _show_trial(
    target: Target, record: TrialRecord, old: Sequence[TrialRecord], *, as_json: bool
) -> None:
    if as_json:
        print_json(record_dict(record))
        return
    outcome = record.outcome
    print_fields(
        [
            ("trial", f"{record.trial_id} of {record.started_at}"),
            ("space", f"{target.space.name}: {target.space.subject_of(record.configuration)}"),
            ("GPU", gpus_text(record.configuration, target.gpu)),
            ("ran on", record.device or ""),
            ("emulated", record.emulated_device or ""),
            ("verified", check_text(record)),
            ("status", f"{outcome.status}{f' in {outcome.phase}' if outcome.phase else ''}"),
            ("stale", "other versions than the newest trials" if record in old else ""),
            ("message", outcome.message),
            ("settings", settings_text(record.configuration)),
            ("versions", ", ".join(f"{k} {v}" for k, v in record.versions.items())),
        ]
    )
    if outcome.evidence is not None:
        echo()
        print_evidence(outcome.evidence, record.budget)
        print_stages(record, target.facts)
    ran = outcome.ran
    if ran is not None and outcome.prediction is not None:
        echo()
        print_fields([(str(ran.source), more_text(ran))])
        print_comparison(outcome.prediction, ran, ran.source)


def _find(records: Sequence[TrialRecord], trial_id: str) -> TrialRecord:
    """The trial of that id, or the only one whose id begins so. Raises `InputError`."""
    by_id = {record.trial_id: record for record in records}  # the last line of a trial counts
    if trial_id in by_id:
        return by_id[trial_id]
    begun = [name for name in by_id if name.startswith(trial_id)]
    if len(begun) == 1:
        return by_id[begun[0]]
    if begun:
        raise InputError(
            f"trial {trial_id!r} is ambiguous: {len(begun)} trials begin with it",
            hint=f"for example {begun[0]}",
        )
    raise unknown("trial", trial_id, by_id, list_command="tuner show")


@subcommand(
    "report",
    "tuner report --space qlora27b --gpu a6000",
    "tuner report --space qlora27b --gpu a6000,t4    # or all, beside each other",
)
@target_options()
@where_option
@json_option
def report(
    *,
    selected: Selected,
    where: tuple[str, ...],
    as_json: bool,
) -> int:
    """Rewrite report.html, pareto.png, pareto.csv and best.yaml from the journal.

    Runs no trial. Without --where, the search's conditions stay. --gpu all draws every searched GPU
    type, --gpu a6000,t4 the named ones. Exit code 1 if nothing tried fits.
    """
    targets = selected.targets()
    from tuner.app.search.result_files import redraw  # the pages of a report

    views = redraw(targets, where)
    files = [target.folder.report_html for target in targets]
    if as_json:
        print_json(
            [
                {"gpu": view.gpu.id, "report": str(path), "trials": len(view.records)}
                for view, path in zip(views, files, strict=True)
            ]
        )
    else:
        print_fields([(view.gpu.id, str(path)) for view, path in zip(views, files, strict=True)])
    return EXIT_FOUND if any(view.best for view in views) else EXIT_NOTHING_FITS
