"""Answers from the journal of a search: `tuner best`, `show`, `report`, `apply` and `export`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.applying import applying, export_recommended
from tuner.app.cli import options as opts
from tuner.app.cli import subcommand
from tuner.app.cli.answers import measure_command, print_answers, use_commands, verify_command
from tuner.app.recommendation import Criteria, answers, nothing_fits_error, recommended
from tuner.app.target import (
    ALL,
    Target,
    gpu_names,
    load_targets,
    searched_targets,
    stale_text,
    usable,
)
from tuner.core.errors import EXIT_FOUND, EXIT_NOTHING_FITS, InputError, unknown
from tuner.core.expressions import all_of, settings_text
from tuner.core.records import TrialRecord
from tuner.core.units import format_size
from tuner.program.changes import Change
from tuner.program.export import FORMATS
from tuner.report.terminal import front
from tuner.report.terminal.evidence import more_text, print_comparison, print_evidence, print_stages
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.report.terminal.verdict import fields_dict
from tuner.searches.best import check_text
from tuner.searches.facts import gpus_text
from tuner.searches.objectives import require_known
from tuner.searches.store import write_atomically

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """A space, one or several GPU types, and the folder of results, as they were named."""

    space: str
    gpu_name: str
    gpu_memory: int | None
    price: float | None
    model: str | None
    results: Path

    def target(self) -> Target:
        """The one that is named. Raises `InputError` for what is not known."""
        return self._of([self.gpu_name])[0]

    def targets(self) -> list[Target]:
        """Each GPU type that is named, for "all" each that was searched.

        Raises `InputError` with everything that is wrong, `UnavailableError` for "all" of none.
        """
        if self.gpu_name != ALL:
            return self._of(gpu_names(self.gpu_name))
        if self.gpu_memory is not None or self.price is not None:
            raise InputError("--gpu-memory and --price are about one GPU type, and --gpu is all")
        return searched_targets(self.space, self.model, self.results)

    def _of(self, names: Sequence[str]) -> list[Target]:
        named = dataclasses.asdict(self)
        del named["gpu_name"]
        return load_targets(**named, names=names)


def target_options(function: _Decorated) -> _Decorated:
    """`--space`, `--gpu`, `--gpu-memory`, `--price`, `--model` and `--results` as `selected`."""
    model = opts.model_option("Model the search was run with, if you overrode it.")
    options = opts.together(opts.space_option(), opts.gpu_options, model, opts.results_option)
    return options(opts.gathered(function, "selected", _Selected))


def criteria_options(function: _Decorated) -> _Decorated:
    """`--where`, `--max-memory`, `--headroom` and `--objective` as `criteria`."""
    return opts.choice_options(opts.gathered(function, "criteria", Criteria))


@subcommand(
    "best",
    "tuner best --space qlora27b --gpu a6000 --headroom 10%",
    "tuner best --space qlora27b --gpu all    # which GPU is cheapest per epoch?",
)
@target_options
@criteria_options
@opts.json_option
def best(*, selected: _Selected, criteria: Criteria, as_json: bool) -> None:
    """Print the fastest configuration that fits, from a finished search.

    --gpu all compares every searched GPU type, --gpu a6000,t4 the named ones. Exit code 1 if
    nothing tried fits.
    """
    targets = selected.targets()
    if selected.gpu_name == ALL or "," in selected.gpu_name:
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
        answer = fields_dict(front.recommended_fields(best))
        print_json({"by_gpus": [], **best.to_dict(), **commands, "answer": answer})
        return
    echo(f"{target.space.name} on {target.gpu.name}: {target.space.subject_of(best.configuration)}")
    if target.known != target.folder:
        echo("from the results that come with tuner; nothing was searched here")
    front.print_recommendation(best, use=use, measure=measure, verify=verify_command(target, best))


@subcommand(
    "show",
    "tuner show --space qlora27b --gpu a6000",
    "tuner show --space qlora27b --gpu a6000 3f2a91c0-007",
    "tuner show --space qlora27b --gpu a6000 --objective cost",
)
@click.argument("trial_id", metavar="[TRIAL]", required=False)
@target_options
@opts.where_option
@opts.objective_option
@opts.json_option
def show(
    *,
    trial_id: str | None,
    selected: _Selected,
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
    view = target.view(records, where, objectives=objectives)
    require_known(view.records, view.objectives)
    if as_json:
        print_json(
            {
                "space": target.space.name,
                "gpu": target.gpu.id,
                "source": view.source,
                "conditions": list(view.conditions),
                "trials": len(view.records),
                "objectives": [objective.name for objective in view.objectives],
                "front": [front.record_dict(record) for record in view.front],
                "best": view.best.to_dict() if view.best else None,
            }
        )
        return
    print_fields(
        [
            ("space", f"{target.space.name}: {target.space.subject}"),
            ("GPU", target.gpu.name),
            ("where", all_of(view.conditions)),
            ("of all", front.counts_text(view.records)),
            ("stale", f"{stale_text(old, records)} left out" if old else ""),
        ]
    )
    if not view.front:
        met = [r for r in view.records if target.space.matches(r.configuration, where)]
        raise nothing_fits_error(target, met, view.conditions)
    echo()
    front.print_front(view)


def _show_trial(
    target: Target, record: TrialRecord, old: Sequence[TrialRecord], *, as_json: bool
) -> None:
    if as_json:
        print_json(front.record_dict(record))
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
@target_options
@opts.where_option
@opts.json_option
def report(*, selected: _Selected, where: tuple[str, ...], as_json: bool) -> int:
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


@subcommand(
    "apply",
    "tuner apply --space qlora27b --gpu a6000 train.py",
    "tuner apply --space dynamo_t4 --gpu t4 --yes config.yaml",
    "tuner apply --space qlora4b --gpu a6000 -- torchrun train.py --epochs 3",
)
@target_options
@criteria_options
@click.option("--yes", "-y", is_flag=True, help="Write without asking.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def apply(*, selected: _Selected, criteria: Criteria, yes: bool, program: tuple[str, ...]) -> None:
    """Write the recommended values into the files of PROGRAM.

    PROGRAM is your script, its command, or its settings files. A value is changed where the
    program takes it from, or at the key that the space names under apply; every other byte stays.
    The diff is shown first, and a dated copy of each file is kept beside it.
    """
    target = selected.target()
    best = recommended(target, criteria)
    echo(
        f"{target.space.name} on {target.gpu.name}: trial {best.record.trial_id} ({best.source})",
        err=True,
    )
    if best.limit_text:
        used_bytes = best.evidence.memory.device_bytes
        sizes = f"{format_size(used_bytes)} of {format_size(best.memory_bytes)}"
        echo(f"fits: {sizes} {best.limit_text}", err=True)
    found = applying(target.space, best.configuration, program, target.arguments)
    echo(found.change.difference, nl=False)
    for text in found.refused:
        echo(f"not written: {text}", err=True)
    if found.lacking:
        echo(f"to set by hand: {', '.join(found.lacking)}", err=True)
    for note in found.notes:
        echo(f"note: {note}", err=True)
    write_asked(found.change, yes=yes)


def write_asked(change: Change | None, *, yes: bool = False) -> None:
    """Write a change into its files, each with a dated copy beside it, after a question."""
    files = " and ".join(map(str, change.files)) if change is not None else ""
    if change is None or not files:
        is_command = change is not None and change.before.command != change.after.command
        text = "only the command changes: start the program with it" if is_command else ""
        echo(text or "nothing changes", err=True)
    elif yes or click.confirm(f"Write {files}?", err=True):
        for path, backup in change.write().items():
            echo(f"wrote {path}; as it was: {backup}", err=True)
    else:
        echo("nothing was written", err=True)


@subcommand(
    "export",
    "tuner export --space qlora27b --gpu a6000 --format trl --output sft.yaml",
    "tuner export --space cot8b_h100 --gpu h100_sxm --format command",
)
@target_options
@criteria_options
@click.option(
    "--format", "name", required=True, metavar="NAME", help=f"One of {', '.join(FORMATS)}."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="New file to write.  [default: print]",
)
def export(*, selected: _Selected, criteria: Criteria, name: str, output: Path | None) -> None:
    """Print the recommended configuration as the settings of another tool.

    Settings that the tool does not have are named in a comment and on stderr.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    if output is not None and output.exists():
        raise InputError(f"{str(output)!r} is there already", hint="name another file")
    target = selected.target()
    best = recommended(target, criteria)
    exported = export_recommended(target, best, name)
    if output is None:
        click.echo(exported.text, nl=False)
    else:
        write_atomically(output, exported.text)
        echo(f"wrote {output}", err=True)
    for line in exported.left_out:
        echo(f"not said: {line}", err=True)
