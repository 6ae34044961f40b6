"""`tuner explain`: why a configuration does not fit, what would make it fit, and what slows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tuner.app.cli.listening import Printer
from tuner.app.cli.options import json_option, margin_option, set_option, subcommand
from tuner.app.cli.target_options import Selected, target_options
from tuner.app.device import with_profile
from tuner.app.listener import quiet_libraries
from tuner.app.search.supported import require_supported
from tuner.app.target import Target, comparable
from tuner.core.errors import DISTRIBUTION, UnavailableError
from tuner.core.records import Configuration, Measurement, parse_margin
from tuner.core.units import format_size, significant
from tuner.predict.releases import predicted_stack
from tuner.program.vocabulary import settings_for
from tuner.report.terminal.evidence import print_evidence
from tuner.report.terminal.progress import compiling
from tuner.report.terminal.render import echo, print_fields, print_json, settings_text
from tuner.report.terminal.tables import print_rows
from tuner.space import configure

if TYPE_CHECKING:
    from tuner.app.explain import Explanation, PeakAllocation
    from tuner.app.predicting import SpacePredictor, Suggestion

MAX_PAIRS = 12
"""Pairs that are shown; --json has them all."""

_WRAPPERS = ("base_model.model", "base_model", "PeftModelForCausalLM")


@subcommand(
    "explain",
    "tuner explain --space qlora27b --gpu a6000 --set micro_batch=4",
    "tuner explain --space qlora27b --gpu a6000 --json",
)
@target_options("Model to use instead of the space's.")
@set_option
@margin_option
@json_option
def command(
    *,
    selected: Selected,
    settings: dict[str, str],
    margin: str | None,
    as_json: bool,
) -> None:
    """Explain why a configuration does not fit, or how close it is, and what slows it.

    Parameters you don't set keep the value of the space's baseline. Lists the single changes that
    fit by the throughput they cost. Exit code 0 whether or not it fits.
    """
    target = selected.target()
    require_predictable(target)
    given = settings_for(target.space, settings)
    configuration = configure(target.space, given, strict=False)
    fraction = parse_margin(margin, target.gpu)
    with quiet_libraries():
        explanation = _explain(target, configuration, fraction)
    if as_json:
        named = {"space": target.space.name, "gpu": target.gpu.id}
        print_json({**named, **explanation.to_dict(), "versions": predicted_stack()})
    else:
        _print(target, explanation)


def require_predictable(target: Target) -> None:
    """Raise `UnavailableError` for code of the user's own, of which nothing can be predicted."""
    if not target.space.predictable:
        raise UnavailableError(
            f"search space {target.space.name!r} runs your own code, which can be measured but not "
            "predicted",
            hint=f"`{target.command('show')}` shows what trials of it came to",
        )


def _explain(target: Target, configuration: Configuration, fraction: float | None) -> Explanation:
    from tuner.app.explain import explain

    require_supported(configuration, target.gpu)
    with space_predictor(target, fraction) as predictor:
        return explain(predictor, configuration, measured=measured_trials(target))


def measured_trials(target: Target) -> dict[Configuration, Measurement]:
    """Measurements of the target's trials, by configuration; empty without results."""
    records = comparable(target.known.read().records, target)
    return {
        r.configuration: r.outcome.measurement for r in records if r.outcome.measurement is not None
    }


@contextlib.contextmanager
def space_predictor(target: Target, fraction: float | None) -> Iterator[SpacePredictor]:
    """A predictor for configurations of the target; progress goes to stderr."""
    from tuner.app.predicting import SpacePredictor
    from tuner.predict.compiling import default_workers

    gpu, profile = with_profile(target.gpu, Printer(err=True))
    with compiling(err=True, quiet=False) as report:
        yield SpacePredictor(
            target.space,
            gpu,
            margin_fraction=fraction,
            profile=profile,
            workers=default_workers(),
            on_progress=report,
        )


def _print(target: Target, explanation: Explanation) -> None:
    prediction = explanation.prediction
    settings, stage = explanation.current.configuration, prediction.limiting_stage
    print_fields(
        [
            ("space", f"{target.space.name}: {target.space.model}"),
            ("GPU", target.gpu.name),
            ("settings", settings_text(settings, target.space.knobs or None)),
            (
                "stage",
                f"{stage} needs the most memory; speed is that of all stages" if stage else "",
            ),
        ]
    )
    print_evidence(prediction, prediction.budget, fits=prediction.fits, versions=predicted_stack())
    _print_allocations(explanation)
    _print_operators(explanation)
    _print_changes(explanation)
    if explanation.reentrant is not None:
        change = explanation.reentrant
        saved = format_size(change.saved_bytes)
        echo(
            f"\nReentrant checkpointing ({change}) saves {saved} here, at {-change.lost:+.1%} "
            "speed (predicted)"
        )
    echo(f"\nWhat slows it ({prediction.source})")
    notes = [note.text for note in explanation.notes] or ["nothing takes 1 % of a step"]
    print_fields([("-", text) for text in notes], indent=2)
    if explanation.not_told:
        echo(f"\nNot told without {DISTRIBUTION}[all]")
        print_fields([("-", text) for text in explanation.not_told], indent=2)


def _print_allocations(explanation: Explanation) -> None:
    phase = explanation.prediction.memory.peak_phase
    how = "compiled timeline" if explanation.not_told else "traced"
    echo(f"\nLargest allocations at the peak, in the {phase} phase ({how})")
    print_rows(
        ["each", "number", "for", "what"],
        [
            (format_size(a.size_bytes), str(a.count), a.category.replace("_", " "), _origin(a))
            for a in explanation.allocations
        ],
        right=("each", "number"),
        drop=("number", "for"),
    )


def _print_operators(explanation: Explanation) -> None:
    echo("\nOperators that take most of a step (predicted)")
    print_rows(
        ["share", "recomputed", "operator", "limited by", "cheaper by"],
        [
            (
                f"{each.share:.1%}",
                f"{each.recomputed:.0%}",
                each.label,
                each.limited_by,
                each.cheaper,
            )
            for each in explanation.operators
        ],
        right=("share", "recomputed"),
        drop=("recomputed",),
    )


def _origin(allocation: PeakAllocation) -> str:
    """The tensor, where and when it was made: "float32 [4, 1024] by mm in lm_head, forward"."""
    if not allocation.phase:
        return ""
    shape = "x".join(map(str, allocation.shape))
    parts = [f"{allocation.dtype} {shape}".strip()]
    if allocation.made_by:
        parts.append(f"by {allocation.made_by.partition('::')[2]}")
    # What peft puts around the model says nothing of it.
    place = "the model" if allocation.place in _WRAPPERS else allocation.place
    place = place.removeprefix("base_model.model.")
    if place:
        parts.append(f"in {place}" if allocation.made_by else place)
    text = " ".join(part for part in parts if part)
    if not text:
        text = f"work space of {'cuBLAS' if 'workspace' in allocation.category else 'a kernel'}"
    return f"{text}, {allocation.phase}"


def _print_changes(explanation: Explanation) -> None:
    fits, fitting = explanation.prediction.fits, explanation.fitting
    if fits:
        faster = [change for change in fitting if change.lost < 0]
        if faster:
            echo("\nSingle changes that are faster and still fit (predicted)")
            _print_table(faster)
        else:
            echo("\nNo single change within the space is faster and still fits (predicted)")
        return
    if fitting:
        echo("\nSingle changes that make it fit, by throughput lost (predicted)")
        _print_table(fitting)
        return
    echo("\nNo single change within the space makes it fit (predicted)")
    if explanation.pairs:
        echo("\nPairs of changes that make it fit, by throughput lost (predicted)")
        _print_table(explanation.pairs[:MAX_PAIRS])
        if len(explanation.pairs) > MAX_PAIRS:
            echo(f"{len(explanation.pairs) - MAX_PAIRS} more: see --json")
    elif explanation.smallest is not None:
        least = explanation.smallest
        echo(
            f"nor does any pair; the smallest single change is {least}, which needs "
            f"{format_size(least.prediction.memory.device_bytes)}"
        )


def _print_table(changes: Sequence[Suggestion]) -> None:
    numbers = ("memory", "free", "samples/s", "speed")
    print_rows(
        ["change", *numbers, "note"],
        [
            (
                str(change),
                format_size(size := change.prediction.memory.device_bytes),
                format_size(change.prediction.budget.limit_bytes - size),
                significant(change.prediction.speed.samples_per_s),
                f"{-change.lost:+.1%}",
                _remark(change),
            )
            for change in changes
        ],
        right=numbers,
        drop=("free", "speed"),
    )


def _remark(change: Suggestion) -> str:
    """Side effects of the change, with their numbers."""
    remarks = [f"below the floor {text}" for text in change.below]
    low, high = change.truncated or (0.0, 0.0)
    if high > 0:
        share = f"{low:.1%}" if low == high else f"{low:.0%} to {high:.0%}"
        remarks.append(f"cuts {share} of the examples")
    return "; ".join(remarks)
