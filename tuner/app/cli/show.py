"""`tuner show`: the front of a search, or one of its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from tuner.app.cli import completing
from tuner.app.cli.answers import (
    conditions_text,
    counts_text,
    print_front,
    print_levels,
    record_dict,
)
from tuner.app.cli.comparison import more_text, print_comparison
from tuner.app.cli.evidence import print_evidence
from tuner.app.cli.options import examples, json_option, objective_option, where_option
from tuner.app.cli.stages import print_stages
from tuner.app.cli.target_options import Selected, target_options
from tuner.app.recommendation import nothing_fits_error
from tuner.app.target import (
    Target,
    check_conditions,
    stale_text,
    usable,
)
from tuner.core.errors import InputError, unknown
from tuner.core.records import TrialRecord
from tuner.report.terminal.render import echo, print_fields, print_json, settings_text
from tuner.searches.best import check_text
from tuner.searches.facts import gpus_text
from tuner.searches.objectives import require_known
from tuner.searches.view import View, build_view, levels


@click.command(
    "show",
    epilog=examples(
        "tuner show --space qlora27b --gpu a6000",
        "tuner show --space qlora27b --gpu a6000 3f2a91c0-007",
        "tuner show --space qlora27b --gpu a6000 --levels",
        "tuner show --space qlora27b --gpu a6000 --objective cost",
    ),
)
@click.argument("trial_id", metavar="[TRIAL]", required=False, shell_complete=completing.trials)
@target_options("The --model of the search.")
@where_option
@objective_option
@click.option("--levels", "by_level", is_flag=True, help="One front per level of rank and length.")
@click.option(
    "--stale", "with_stale", is_flag=True, help="Include trials of other library versions."
)
@json_option
def command(
    *,
    trial_id: str | None,
    selected: Selected,
    where: tuple[str, ...],
    objectives: tuple[str, ...],
    by_level: bool,
    with_stale: bool,
    as_json: bool,
) -> None:
    """Print the front of a search, or everything known about one TRIAL."""
    target = selected.target()
    records, old, _ = usable(target)
    if trial_id is None:
        show = Shown(where, objectives, by_level=by_level, as_json=as_json)
        if with_stale:
            show = replace(show, stale=frozenset(record.trial_id for record in old))
            records = (*old, *records)
        elif old:
            show = replace(show, note=f"{stale_text(old, records)} left out; --stale includes them")
        _show_front(target, records, show)
    else:
        _show_trial(target, _find((*old, *records), trial_id), old, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a search is shown, and how."""

    where: tuple[str, ...]
    objectives: tuple[str, ...]
    by_level: bool
    as_json: bool
    stale: frozenset[str] = frozenset()
    """Ids of trials of other library versions that are among those shown."""
    note: str = ""


def _show_front(target: Target, records: Sequence[TrialRecord], show: Shown) -> None:
    where = show.where
    conditions = check_conditions(target, where)
    view = build_view(
        records,
        target.facts,
        target.gpu,
        where=lambda configuration: target.space.matches(configuration, where),
        conditions=conditions,
        objectives=show.objectives,
    )
    require_known(view.records, view.objectives)
    if show.as_json:
        print_json(
            {
                "space": target.space.name,
                "gpu": target.gpu.id,
                "source": view.source,
                "conditions": list(conditions),
                "trials": len(view.records),
                "stale": sorted(r.trial_id for r in view.records if r.trial_id in show.stale),
                "objectives": [objective.name for objective in view.objectives],
                "front": [record_dict(record) for record in view.front],
                **({"levels": _levels_dict(view)} if show.by_level else {}),
                "best": view.best.to_dict() if view.best else None,
            }
        )
        return
    print_fields(
        [
            ("space", f"{target.space.name}: {target.space.subject}"),
            ("GPU", target.gpu.name),
            ("where", conditions_text(conditions)),
            ("of all", counts_text(view.records)),
            ("stale", show.note),
        ]
    )
    if show.by_level:
        echo()
        print_levels(view)
        return
    if not view.front:
        met = [r for r in view.records if target.space.matches(r.configuration, where)]
        raise nothing_fits_error(target, met, conditions)
    echo()
    print_front(view, stale=show.stale)


def _levels_dict(view: View) -> list[dict[str, Any]]:
    return [
        {
            "level": dict(level.values),
            "trials": level.trials,
            "front": [record.trial_id for record in level.front()],
        }
        for level in levels(view)
    ]


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
        print_evidence(
            outcome.evidence,
            fits=record.fits,
            limit_bytes=record.budget.limit_bytes,
            margin_bytes=record.budget.margin_bytes,
        )
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
