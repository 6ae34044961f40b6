"""`tuner compare`: what is used now against what is recommended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.app.baseline import Baseline, read_baseline
from tuner.app.cli.explain import measured_trials, require_predictable, space_predictor
from tuner.app.cli.options import (
    calibration_option,
    json_option,
    margin_option,
    set_option,
    subcommand,
    where_option,
)
from tuner.app.cli.target_options import Selected, target_options
from tuner.app.estimate import Corrector, correction_text
from tuner.app.listener import quiet_libraries
from tuner.app.recommendation import Criteria, recommended
from tuner.app.search.supported import require_supported
from tuner.app.target import Target, check_conditions
from tuner.core.errors import NothingFitsError, UnavailableError
from tuner.core.records import Configuration, parse_margin
from tuner.report.terminal.render import echo, print_json
from tuner.report.terminal.tables import print_rows
from tuner.searches.best import BestTrial

if TYPE_CHECKING:
    from tuner.app.compare import Comparison, Row
    from tuner.app.predicting import SpacePredictor


@subcommand(
    "compare",
    "tuner compare --space qlora27b --gpu a6000 --baseline current.yaml",
    "tuner compare --space qlora27b --gpu a6000 --set max_length=2048 \\",
    "    --format markdown",
)
@target_options()
@click.option(
    "--baseline",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="What you use now: YAML of parameters and values, your own configuration file with the "
    "keys that the space names under apply, or a file of Axolotl, LLaMA-Factory or TRL. Can be "
    "repeated. "
    "[default: the space's baseline]",
)
@set_option
@where_option
@margin_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "markdown"]),
    default="table",
    show_default=True,
    help="Format of the table.",
)
@calibration_option
@json_option
def command(  # noqa: PLR0913 - one argument for each option
    *,
    selected: Selected,
    files: tuple[Path, ...],
    settings: dict[str, str],
    where: tuple[str, ...],
    margin: str | None,
    form: str,
    calibrated: bool,
    as_json: bool,
) -> None:
    """Compare what you use now with the recommendation: memory, speed, time, cost, truncation.

    The recommendation comes from a search, or, without one, from the predicted space. Both sides
    are measured if both were, else both are predicted, corrected by the trials of the space that
    ran on this GPU type.
    """
    target = selected.target()
    require_predictable(target)
    check_conditions(target, where)
    baseline = read_baseline(target.space, files, settings)
    fraction = parse_margin(margin, target.gpu)
    with quiet_libraries():
        comparison = _compare(target, baseline, where, fraction, calibrated=calibrated)
    if as_json:
        print_json({**comparison.to_dict(), "outside": list(baseline.outside)})
    else:
        for text in baseline.outside:
            echo(f"not of this comparison: {text}")
        _print(comparison, markdown=form == "markdown")


def _compare(
    target: Target,
    baseline: Baseline,
    where: tuple[str, ...],
    fraction: float | None,
    *,
    calibrated: bool,
) -> Comparison:
    from tuner.app.compare import Comparison, side_of

    require_supported(baseline.configuration, target.gpu)
    best = _searched(target, where)
    with space_predictor(target, fraction) as predictor:
        if best is None:
            chosen, chosen_from = _predicted(predictor, target, where)
        else:
            chosen = best.configuration
            chosen_from = best.chosen_from
        # As what decides a predicted search is, so that `tuner best` says the same.
        both = predictor.trace([baseline.configuration, chosen])
        measured = measured_trials(target)
        seen = [measured.get(each.configuration) for each in both]
        found = seen if None not in seen else [None, None]
        corrector = Corrector.of(target, target.known)
        if calibrated and None in seen:
            both = [replace(each, prediction=corrector.corrected(each.prediction)) for each in both]
        current, recommended = (
            side_of(each, target.space, predictor.gpu, measurement)
            for each, measurement in zip(both, found, strict=True)
        )
    notes = list(baseline.notes)
    if baseline.assumed:
        notes.append(f"not in the file, taken from the space: {', '.join(baseline.assumed)}")
    if any(each.prediction.corrections for each in both):
        notes.append(correction_text(corrector.trials))
    if seen != found:
        notes.append("only one of the two was measured, so both are shown as predicted")
    if baseline.configuration == chosen:
        notes.append("you already use the recommendation")
    return Comparison(target.space, predictor.gpu, current, recommended, chosen_from, tuple(notes))


def _searched(target: Target, where: tuple[str, ...]) -> BestTrial | None:
    """The recommendation of a search; None where there was no search."""
    try:
        return recommended(target, Criteria(where=where))
    except UnavailableError:
        return None


def _predicted(
    predictor: SpacePredictor, target: Target, where: tuple[str, ...]
) -> tuple[Configuration, str]:
    """The best of the predicted space. Raises `NothingFitsError`."""
    from tuner.app.compare import predicted_best

    target.space.require_configurations(where)
    best, number = predicted_best(predictor, where)
    if best is None:
        raise NothingFitsError(
            f"none of {number} configurations is predicted to fit {target.gpu.name}, so there is "
            "nothing to compare with",
            hint="set other floors with --where, or choose a larger GPU",
        )
    return best.configuration, f"fastest of {number} predicted configurations; no search was run"


def _print(comparison: Comparison, *, markdown: bool) -> None:
    source = comparison.current.evidence.source
    title = f"{comparison.space.name} on {comparison.gpu.name} ({source})"
    columns = ["", "current", "recommended", "change"]
    rows = comparison.rows()
    if markdown:
        for line in _markdown(title, columns, rows):
            echo(line)
    else:
        echo(title)
        cells = [(r.label, r.current, r.recommended, r.change) for r in rows]
        print_rows(columns, cells, right=columns[1:])
    echo()
    for text in (f"recommended: {comparison.chosen_from}", *_remarks(comparison)):
        echo(f"- {text}" if markdown else text)


def _remarks(comparison: Comparison) -> Iterable[str]:
    yield "times are of training only, every example at full length"
    gpu = comparison.gpu
    if gpu.price_usd_per_hour is not None:
        when = f" (price of {gpu.price_date})" if gpu.price_date else ""
        yield f"costs at {gpu.price_usd_per_hour:g} USD an hour{when}"
    if comparison.current.batch != comparison.recommended.batch:
        yield (
            "the effective batches differ: compare samples/s, not steps; the training result "
            "differs too"
        )
    yield from comparison.notes


def _markdown(title: str, columns: list[str], rows: list[Row]) -> Iterable[str]:
    yield f"**{title}**"
    yield ""
    yield "| " + " | ".join(columns) + " |"
    yield "|---|---:|---:|---:|"
    for row in rows:
        cells = (row.label, row.current, row.recommended, row.change)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
