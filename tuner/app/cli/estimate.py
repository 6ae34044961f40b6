"""`tuner estimate` and `calculator`: memory and speed of a configuration, without running it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tuner.app.cause import cause_of
from tuner.app.cli import options as opts
from tuner.app.cli import subcommand
from tuner.app.device import find_gpu, profile_for
from tuner.app.estimate import Estimate, asked, corrected, estimate_asked, exchanging_each
from tuner.app.listener import quiet_libraries
from tuner.core.errors import UnavailableError
from tuner.core.expressions import settings_text
from tuner.core.records import Configuration, MemoryCategory, Verdict, parse_margin
from tuner.core.setup.distributed_knobs import SYNC
from tuner.core.units import format_duration, format_size
from tuner.predict.releases import predicted_stack
from tuner.program.loops import LOOPS
from tuner.report.terminal import verdict
from tuner.report.terminal.evidence import evidence_fields, print_parts, print_rows_of_stages
from tuner.report.terminal.progress import Waiting
from tuner.report.terminal.render import print_fields, print_json
from tuner.searches import facts
from tuner.searches.cost import cost_of
from tuner.searches.store import write_atomically
from tuner.space.models.trainable import model_defaults


@subcommand(
    "estimate",
    "tuner estimate --space qlora27b --gpu a6000 --batch-size 4",
    "tuner estimate --model mistral-7b-v0.3 --gpu rtx4090 --qlora --batch-size 4",
    "tuner estimate --model qwen3-8b --gpu t4 --set load_in_8bit=true",
)
@opts.space_option(required=False)
@opts.model_option(
    "Model to use instead of the space's; without --space, all settings have their defaults."
)
@opts.any_gpu_options
@click.option(
    "--loop",
    type=click.Choice(LOOPS),
    help="Training loop whose defaults count, with --model.  [default: trl]",
)
@opts.setting_flags()
@opts.set_option
@opts.margin_option
@opts.results_option
@opts.verbose_option
@opts.json_option
def command(  # noqa: PLR0913 - one argument for each option
    *,
    space: str | None,
    model: str | None,
    gpu_name: str | None,
    gpu_memory: int | None,
    price: float | None,
    loop: str | None,
    settings: dict[str, Any],
    margin: str | None,
    results: Path,
    verbose: bool,
    as_json: bool,
) -> None:
    """Predict memory and speed of one configuration. Nothing runs or is written.

    Trials of the space on this GPU type correct it. The first line is the answer: fits, tight (the
    90 % interval spans the limit) or does not fit. Exit code 0 whether or not it fits: see `fits`.
    """
    if gpu_name is None:
        opts.require_gpu("--gpu-memory", gpu_memory)
        opts.require_gpu("--price", price)
    if space is None and model is None:
        raise click.UsageError("Missing option '--space' or '--model'.")
    if gpu_name is None:
        from tuner.app.everywhere import show_everywhere, space_everywhere

        with Waiting() as waiting, quiet_libraries():
            waiting("predicting the configuration for every GPU type")
            every = space_everywhere(partial(asked, space, model, settings, loop=loop), margin)
        show_everywhere(every, verbose=verbose, as_json=as_json)
        return
    from tuner.predict.predict import WITHOUT  # numpy

    gpu = find_gpu(gpu_name, memory_bytes=gpu_memory, price_usd_per_hour=price)
    fraction = parse_margin(margin, gpu)
    with quiet_libraries():
        profile = profile_for(gpu)
        training = asked(space, model, settings, loop=loop, gpu=gpu)
        found = estimate_asked(training, gpu, margin_fraction=fraction, profile=profile)
        if space is not None:
            found = corrected(found, results)
        each = None
        with contextlib.suppress(UnavailableError):
            each = None if as_json else exchanging_each(found, profile)
    notes = [*found.findings, _correction_text(found)]
    if space is None:
        # The settings that are not the usual defaults: the model's class has not got those.
        chosen = {k: v for k, v in model_defaults(str(model)).items() if k not in settings}
        text = settings_text(Configuration(chosen))
        notes.append(f"{text}: this model has nothing else in transformers" if chosen else "")
    if each is not None:
        named = [("--space", space), ("--model", model), ("--gpu", gpu_name), ("--loop", loop)]
        words = [word for name, value in named if value for word in (name, value)]
        for name, value in settings.items():
            flag = (name,) if value is True else (name, str(value))
            words += flag if name.startswith("--") else ("--set", f"{name}={value}")
        line = shlex.join(["tuner", "estimate", *words, "--set", f"{SYNC}=true"])
        kept = found.memory.breakdown[str(MemoryCategory.UNSHARDED_GRADIENTS)]
        slower = found.prediction.speed.samples_per_s / each.prediction.speed.samples_per_s - 1
        notes.append(
            f"{format_size(kept)} are unsharded gradients, kept between micro-steps (no_sync); "
            f"{format_size(each.memory.device_bytes)}, {slower:.0%} slower, with --set {SYNC}=true"
            + (f": {line}" if verbose else "")
        )
    # The settings whose effect is in no number.
    _, without, names = found.prediction.method.partition(WITHOUT)
    bound = "; memory is an upper bound" if found.prediction.is_compiled else ""
    notes.append(f"{without}{names}{bound}")
    _print(found, _fields(found, notes), verbose=verbose, as_json=as_json)


def _answer_of(found: Estimate) -> verdict.Answer:
    prediction = found.prediction
    answer = verdict.Answer(
        prediction.verdict,
        prediction.memory.device_bytes,
        prediction.budget,
        facts.times_text(facts.counted_gpus(found.configuration), found.gpu.id),
        prediction.intervals.get("device_bytes"),
    )
    if answer.verdict is Verdict.UNKNOWN:
        answer = replace(answer, reason=verdict.bound_text(answer))
    return answer


def _fields(found: Estimate, notes: Sequence[str]) -> list[verdict.Field]:
    prediction, gpu, configuration = found.prediction, found.gpu, found.configuration
    limiting = found.stages.limiting if found.stages is not None else ""
    cost = cost_of(prediction, configuration, facts.SpaceFacts.of(found.space), gpu)
    gpus, pace = facts.paid_gpus(configuration, gpu), verdict.Pace.of(prediction)
    return [
        (verdict.ANSWER, ": ".join(verdict.verdict_texts(_answer_of(found)))),
        (verdict.READ_AS, found.read_as),
        ("memory", "" if found.fits else verdict.memory_text(prediction.memory.breakdown)),
        ("cause", cause_of(prediction.memory, configuration, str(found.space.predicted_model()))),
        ("stage", f"{limiting} needs the most memory" if limiting else ""),
        *(
            verdict.pace_fields(pace, gpu, gpus=gpus, cost=cost)
            or [("speed", verdict.UNKNOWN_SPEED)]
        ),
        ("source", verdict.source_text(str(prediction.source), predicted_stack())),
        *((verdict.NOTE, note) for note in notes),
    ]


def _print(found: Estimate, fields: list[verdict.Field], *, verbose: bool, as_json: bool) -> None:
    """The verdict, then speed, time and cost; everything with `verbose`."""
    if as_json:
        print_json({**found.to_dict(), "answer": verdict.fields_dict(fields)})
        return
    prediction, configuration = found.prediction, found.configuration
    verdict.print_verdict(_answer_of(found))
    if not verbose:
        lines = verdict.field_lines(
            (label, verdict.with_more(text) if label == "source" else text)
            for label, text in fields[1:]
        )
        verdict.print_lines(lines[: verdict.LINES - 1])
        return
    details = [
        (verdict.READ_AS, found.read_as),
        ("model", str(found.space.model)),
        ("GPU", facts.gpus_text(configuration, found.gpu)),
        ("settings", settings_text(configuration)),
        *evidence_fields(prediction, prediction.budget, predicted_stack()),
    ]
    print_fields(verdict.with_details(fields[1:], details))
    breakdown_s = found.speed.breakdown_s if found.speed else {}
    print_parts(prediction.source, prediction.memory, breakdown_s)
    if found.stages is None:
        return
    space, source = facts.SpaceFacts.of(found.space), str(prediction.source)
    print_rows_of_stages(
        facts.stage_rows(prediction, configuration, space, prediction.budget), source
    )
    together = []
    if found.stages.epoch_s is not None:
        together.append(("one epoch of each", format_duration(found.stages.epoch_s)))
    if found.stages.run_s not in (None, found.stages.epoch_s):
        together.append(("all epochs", format_duration(found.stages.run_s)))
    print_fields(together, indent=2)


def _correction_text(found: Estimate) -> str:
    """The trials that corrected it, and by how much; empty without any."""
    if not found.corrected_by:
        return ""
    of, corrections = f"{found.corrected_by} trial", found.prediction.corrections
    labels = {"device_bytes": "device memory", "step_s": "step time"}
    factors = [f"{label} x {corrections[n]:.2f}" for n, label in labels.items() if n in corrections]
    return (
        f"corrected by {of}{'s' * (found.corrected_by > 1)} of this space on this GPU: "
        f"{', '.join(factors)} (as predicted: --results none)"
    )


@subcommand("calculator", "tuner calculator --output calculator.html")
@click.option(
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default="calculator.html",
    show_default=True,
    metavar="FILE",
    help="Page to write.",
)
def calculator(*, path: Path) -> None:
    """Write a page with a form for model, GPU and settings, which answers as `tuner estimate` does.

    The page is one file that needs no server and no network. It has the models and settings whose
    timelines come with tuner, and all GPU types.
    """
    from tuner.app.calculator import calculator_html  # numpy, jinja2
    from tuner.predict.shipped import shipped

    write_atomically(path, calculator_html(shipped()))
    print_fields([("written", str(path))])
