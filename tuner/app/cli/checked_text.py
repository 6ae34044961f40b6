"""The answer of `tuner check`, printed and as JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tuner.app.checking import BetterChange, CheckedProgram
from tuner.app.cli.emulated_text import (
    engine_text,
    input_bound_text,
    not_run_text,
    print_emulation,
    print_last_lines,
    reason_text,
    refusals_text,
    run_fields,
    sizes_text,
    so_far_text,
    steps_by_text,
    unknown_text,
)
from tuner.app.cli.options import typed
from tuner.app.program_oracle import PredictedProgram, RunAnswer
from tuner.core.expressions import show
from tuner.core.records import MemoryBudget, Verdict
from tuner.core.units import GIB, format_duration, format_size, significant
from tuner.emulator.emulation import Emulation
from tuner.predict.releases import CUDA, predicted_stack
from tuner.program.planned import read_as
from tuner.report.terminal.evidence import print_evidence
from tuner.report.terminal.render import echo, is_in_notebook, print_fields, prose, settings_text
from tuner.report.terminal.verdict import (
    ANSWER,
    CHANGE,
    LINES,
    NOTE,
    NOTEBOOK_LINES,
    READ_AS,
    UNKNOWN_SPEED,
    Answer,
    Field,
    Pace,
    bound_text,
    difference_lines,
    field_lines,
    fields_dict,
    gpu_text,
    interval_text,
    least_lines,
    memory_text,
    numbers_text,
    pace_fields,
    print_lines,
    print_verdict,
    source_text,
    verdict_texts,
    with_more,
)
from tuner.searches.facts import counted_gpus
from tuner.space.gpus import load_catalogue

_STOPS = re.compile(r": ImportError: | has no \S+ \((until|since) ")
"""Notes on what keeps a program from starting with the releases of the answer."""


def print_found(found: RunAnswer, needed: RunAnswer | None) -> None:
    """The verdict of the program as it is, and what it was read as."""
    print_verdict(answer_of(found, needed))
    print_lines(read_lines(needed or found))


def read_lines(found: RunAnswer) -> list[str]:
    """The second line of an answer."""
    text = read_text(found)
    return field_lines([(READ_AS, text)]) if text else []


def read_text(found: RunAnswer) -> str:
    """The training in ten words; of an emulated one, what took effect."""
    if isinstance(found, PredictedProgram):
        return found.plan.read_as
    return read_as(found.settings, "") if found.settings else ""


def answer_of(found: RunAnswer, needed: RunAnswer | None = None) -> Answer:
    """The verdict and its numbers."""
    # The numbers are those of a larger GPU where this one had too little memory.
    of = found if needed is None or needed.fits is None else needed
    answer = Answer(
        found.verdict,
        of.used_bytes,
        _budget(found),
        gpu_text(found.gpu, gpus_of(found)),
        _ends(of),
        reason_text(found) if isinstance(found, Emulation) else "",
        so_far_text(found) if isinstance(found, Emulation) else "",
    )
    if isinstance(found, PredictedProgram) and found.verdict is Verdict.UNKNOWN:
        what = "what isn't modelled" if found.plan.at_least else "the logits that are kept"
        least = f"at least {numbers_text(answer)}, without {what}"
        return replace(answer, reason=bound_text(answer) if found.is_upper_bound else least)
    return answer


def _budget(found: RunAnswer) -> MemoryBudget:
    if isinstance(found, PredictedProgram):
        return found.prediction.budget
    return MemoryBudget(found.gpu.memory_bytes, found.margin_bytes)


def _ends(found: RunAnswer) -> tuple[float, float] | None:
    if isinstance(found, PredictedProgram):
        return found.prediction.intervals.get("device_bytes")
    return None


def gpus_of(found: RunAnswer) -> int:
    """The number of GPUs of an answer."""
    if isinstance(found, PredictedProgram):
        return counted_gpus(found.plan.configuration)
    return max(found.gpus, found.stands_for)


def print_checked(checked: CheckedProgram, *, verbose: bool) -> None:
    """The rest of the answer, below the verdict: the change first, then speed, time and cost."""
    if verbose:
        _print_all(checked)
        return
    if checked.found.ended in ("error", "crash"):
        print_last_lines(checked.log_tail, at_most=LINES - 5)
    print_lines(checked_lines(checked))
    for line in _pinned_lines(checked):
        echo(line)


def _pinned_lines(checked: CheckedProgram) -> list[str]:
    if not checked.with_pinned:
        return []
    return ["Predict with the pinned releases:", f"  {_with_pinned(checked)}"]


def _with_pinned(checked: CheckedProgram) -> str:
    """The typed command line in an environment that has the pinned releases."""
    command, *words = typed()
    predict = [] if "--predict" in words else ["--predict"]
    return shlex.join([*checked.with_pinned, "tuner", command, *predict, *words])


def answer_fields(checked: CheckedProgram) -> list[Field]:
    """The answer, which notebooks, JSON and MCP show whole, and a screen in part."""
    of = checked.needed or checked.found
    return [
        (ANSWER, ": ".join(verdict_texts(answer_of(checked.found, checked.needed)))),
        (READ_AS, read_text(of)),
        (CHANGE, " ".join(change_texts(checked))),
        ("memory", _memory_text(of)),
        *_run_fields(checked),
        *_pace_fields(checked),
        ("source", answer_source(checked.found)),
        *((NOTE, note) for note in notes_of(checked)),
    ]


def checked_lines(checked: CheckedProgram) -> list[str]:
    """The lines below the verdict, as many as a short answer has."""
    found, fields = checked.found, answer_fields(checked)
    notes = [text for label, text in fields if label == NOTE]
    apart = (ANSWER, READ_AS, CHANGE, "memory", "source", NOTE)
    memory = field_lines(field for field in fields if field[0] == "memory" and not found.fits)
    numbers = field_lines(field for field in fields if field[0] not in apart)
    is_whole = is_in_notebook()
    room = (NOTEBOOK_LINES if is_whole else LINES) - 2 - len(numbers)
    room -= len(read_lines(checked.needed or found))
    # The whole change has the room that it needs; then the memory, a note and the places have it.
    spare = room - _least_change_lines(checked)
    memory = memory[: max(0, spare)]
    shown = [(NOTE, note) for note in (notes if is_whole else notes[:1])]
    first = field_lines(shown, most=min(9 if is_whole else 2, spare - len(memory)))
    change = _change_lines(checked, room - len(memory) - len(first))
    more = 0 if is_whole else len(notes) - bool(first)
    source = field_lines([("source", with_more(answer_source(found), more))])
    return [*memory, *change, *numbers, *source, *first]


def _run_fields(checked: CheckedProgram) -> list[tuple[str, str]]:
    """The phases of a whole run."""
    found, needed = checked.found, checked.needed
    if isinstance(found, PredictedProgram):
        return predicted_phases(found)
    if not isinstance(found, Emulation) or isinstance(needed, PredictedProgram):
        return []
    return run_fields(found, needed)


def predicted_phases(found: PredictedProgram) -> list[tuple[str, str]]:
    """The phase that ends a predicted program, and the peaks of its phases."""
    ran = sorted(found.phases.items(), key=lambda phase: -phase[1])
    shown = ", ".join(f"{phase} {significant(size / GIB)}" for phase, size in ran)
    batch, length = (found.plan.configuration.get(n) for n in ("eval_batch", "max_length"))
    return [
        ("ends", f"in the evaluation, of {batch} x {length:,} tokens" if found.ends_in else ""),
        ("phases", f"{shown} GiB allocated; saving takes no more" if shown else ""),
    ]


def _evaluation_text(checked: CheckedProgram) -> str:
    """The batch of the evaluation with which the program fits; else empty."""
    if checked.evaluation is None:
        return ""
    size, of = checked.evaluation
    memory = f"{significant(of.used_bytes / GIB)} GiB{interval_text(_ends(of))}"
    return f"With --set per_device_eval_batch_size={size} it fits: {memory}"


def _least_change_lines(checked: CheckedProgram) -> int:
    if checked.suggestion is not None:
        return 1 + least_lines(checked.suggestion.change.difference)
    return len(_change_lines(checked, 0))


def _change_lines(checked: CheckedProgram, room: int) -> list[str]:
    """The change, in at most `room` lines."""
    found = checked.suggestion
    lines = [line for text in change_texts(checked) for line in prose(text).split("\n")]
    return [*lines, *difference_lines(found.change.difference, room - 1)] if found else lines


def change_texts(checked: CheckedProgram) -> list[str]:
    """The effect of a change without its difference, or that no change helps."""
    if checked.suggestion is not None:
        return [_title(checked, checked.suggestion)]
    if checked.evaluation is not None:
        return [_evaluation_text(checked)]
    if not checked.found.fits or checked.needed is not None:
        return _nothing_fits(checked)
    if checked.runs > 1:
        return ["Nothing faster was found with the same effective batch, adapters and lengths."]
    return []


def _title(checked: CheckedProgram, found: BetterChange) -> str:
    of = found.found
    size = f"{significant(of.used_bytes / GIB)} GiB{interval_text(_ends(of))}"
    if not checked.found.fits:
        return f"With this change it {of.verdict.replace('tight', 'fits, tightly')}: {size}"
    faster = f"{found.speedup:.2f} times as fast" if found.speedup else "faster"
    return f"With this change it is {faster}: {size}"


def _memory_text(of: RunAnswer) -> str:
    """The largest parts of the memory."""
    if isinstance(of, PredictedProgram):
        return memory_text(of.prediction.memory.breakdown)
    return memory_text(of.limiting.breakdown) if of.limiting else ""


def _pace_fields(checked: CheckedProgram) -> list[tuple[str, str]]:
    """Speed, time and cost, with the change where the program does not fit without it."""
    base = checked.needed or checked.found
    pace, change = pace_of(base), checked.suggestion
    if pace is None:
        return [] if isinstance(base, Emulation) else [("speed", UNKNOWN_SPEED)]
    changed_s = change.step_s if change is not None and not checked.found.fits else None
    if changed_s is not None:
        pace = Pace(changed_s, pace.samples, pace.tokens)
    run = base.run_time if isinstance(base, Emulation) and changed_s is None else None
    speed, *others = pace_fields(pace, base.gpu, gpus=gpus_of(base), run=run)
    return [
        ("speed", f"{speed[1]} with the change" if changed_s is not None else speed[1]),
        *others,
    ]


def pace_of(found: RunAnswer) -> Pace | None:
    """The pace of an answer; None when unknown."""
    if isinstance(found, PredictedProgram):
        return Pace.of(found.prediction)
    if found.time is None:
        return None
    rows = sum(rows for rows, _ in found.inputs) * found.ranks or None
    tokens = sum(rows * tokens for rows, tokens in found.inputs) * found.ranks or None
    return Pace(found.time.step_s, rows, tokens, found.time.interval_s, found.time.mfu)


def _versions(found: RunAnswer) -> dict[str, str]:
    if isinstance(found, Emulation):
        return {"torch": found.torch, CUDA: found.cuda}
    return predicted_stack()


def answer_source(found: RunAnswer) -> str:
    """The source of an answer, with the versions that it depends on."""
    if isinstance(found, Emulation):
        how = f"emulated, {found.steps} optimizer step{'s' * (found.steps != 1)} ran"
        return source_text(how, _versions(found))
    return source_text("predicted", _versions(found))


def notes_of(checked: CheckedProgram) -> Iterator[str]:
    """Restrictions of the answer, the gravest first."""
    found = checked.needed or checked.found
    for knob, written, arrived in checked.ignored:
        setting = checked.settings[knob]
        yield (
            f"{setting.where}: {setting.name}={show(written)} has no effect, the training has "
            f"{show(arrived)}"
        )
    if isinstance(found, Emulation):
        texts = (
            refusals_text(found) if found.fits is not None else "",
            engine_text(found),
            unknown_text(found),
            sizes_text(found.unknown_values),
            input_bound_text(found),
            steps_by_text(found),
        )
        yield from filter(None, (*texts, not_run_text(found)))
    else:
        plan = found.plan
        stops = [note for note in plan.notes if _STOPS.search(note)]
        yield from stops
        yield from plan.at_least
        yield from (found.not_priced,) if found.not_priced else ()
        yield from checked.pinned
        yield from plan.findings
        yield from (f"not modelled: {', '.join(plan.left_out)}",) if plan.left_out else ()
        yield from (note for note in plan.notes if note not in (*plan.findings, *stops))
        yield from others_of(found)
    yield from checked.notes
    if not isinstance(found, Emulation):
        yield f"assumed: {'; '.join((*found.plan.assumed, DATA))}"


def others_of(found: PredictedProgram) -> Iterator[str]:
    """The other trainings of a program, each with its verdict."""
    if found.others:
        yield (
            f"{found.plan.where} is the largest of {1 + len(found.others)} trainings, each alone: "
            "what an earlier one leaves in memory isn't counted"
        )
    for one in found.others:
        size = significant(one.used_bytes / GIB)
        yield f"{one.plan.where}: {one.plan.read_as}: {one.verdict}, {size} GiB"


def _print_all(checked: CheckedProgram) -> None:
    """Every number, what it rests on, and the change as a diff that can be applied."""
    found, needed = checked.found, checked.needed
    if not isinstance(found, Emulation):
        print_predicted(found)
    elif isinstance(needed, Emulation) and needed.fits is not None:
        print_emulation(needed, refused=found)
    else:
        print_emulation(found)
    if checked.found.ended in ("error", "crash"):
        print_last_lines(checked.log_tail)
    echo()
    for knob, written, arrived in checked.ignored:
        setting = checked.settings[knob]
        echo(
            f"{setting.where}: {setting.name}={show(written)} has no effect, the training has "
            f"{show(arrived)}"
        )
    if checked.suggestion is not None:
        _print_suggestion(checked, checked.suggestion)
    elif checked.evaluation is not None:
        echo(_evaluation_text(checked))
    elif not checked.found.fits or checked.needed is not None:
        echo("\n".join(_nothing_fits(checked)))
    elif checked.runs > 1:
        echo("Nothing faster was found with the same effective batch, adapters and lengths.")
    for note in (*checked.pinned, *checked.notes):
        echo(f"note: {note}")
    for line in _pinned_lines(checked):
        echo(line)
    what = "run" if checked.source == "emulated" else "prediction"
    number = f"{checked.runs} {what}{'s' * (checked.runs != 1)}"
    echo(f"{checked.source}, in {number}; nothing was written")


def _print_suggestion(checked: CheckedProgram, found: BetterChange) -> None:
    fits = bool(checked.found.fits)
    values = " ".join(f"{name}={show(value)}" for name, value in found.change.values.items())
    title = "Faster, and it fits" if fits else "This change fits"
    echo(f"{title}, with the same effective batch, adapters and lengths: {values}")
    limit = found.found.gpu.memory_bytes
    text = f"{format_size(found.found.used_bytes)} of {format_size(limit)}"
    speed = "" if found.step_s is None else f"{format_duration(found.step_s)} an optimizer step"
    if found.step_s is not None and found.speedup is not None and fits:
        speed += f", {found.speedup:.2f} times as fast as now"
    print_fields([("memory", f"{text}, {checked.source}"), ("speed", speed)], indent=2)
    echo()
    echo(found.change.difference, nl=False)
    echo()


def _nothing_fits(checked: CheckedProgram) -> list[str]:
    """The least memory that a change took, and GPU types that have it."""
    if checked.least_bytes is None:
        return []  # no change was tried
    margin = checked.found.margin_bytes / checked.found.gpu.memory_bytes
    larger = sorted(
        (
            gpu
            for gpu in load_catalogue().values()
            if gpu.memory_bytes * (1 - margin) >= checked.least_bytes
        ),
        key=lambda gpu: gpu.memory_bytes,
    )
    names = ", ".join(gpu.id for gpu in larger[:3])
    where = f": {names} would have room" if names else ""
    return [
        "No change tried with the same effective batch, adapters and lengths fits.",
        f"The smallest takes {format_size(checked.least_bytes)}{where}.",
    ]


def checked_to_dict(checked: CheckedProgram) -> dict[str, Any]:
    """The answer as JSON types; `source` says what every number in it is."""
    found = checked.suggestion
    return {
        "source": checked.source,
        "answer": fields_dict(answer_fields(checked)),
        "fits": checked.found.fits,
        "verdict": str(checked.found.verdict),
        "program": checked.found.to_dict(),
        "needed": checked.needed.to_dict() if checked.needed is not None else None,
        "settings": {
            knob: {
                "name": setting.name,
                "value": setting.value,
                "where": setting.where,
                "problem": setting.problem,
                "arrived": checked.found.settings.get(knob),
            }
            for knob, setting in checked.settings.items()
            if setting.is_given
        },
        "suggestion": None
        if found is None
        else {
            "values": dict(found.change.values),
            "difference": found.change.difference,
            "step_s": found.step_s,
            "speedup": found.speedup,
            "found": found.found.to_dict(),
        },
        "smaller_evaluation": None
        if checked.evaluation is None
        else {
            "per_device_eval_batch_size": checked.evaluation[0],
            "device_bytes": checked.evaluation[1].used_bytes,
        },
        "least_bytes": checked.least_bytes,
        "runs": checked.runs,
        "notes": [*checked.pinned, *map(str.strip, _pinned_lines(checked)), *checked.notes],
        "versions": _versions(checked.found),
    }


DATA = "every sequence is of full length; data, logging and saving take no memory"
"""Assumptions of every prediction of a program."""


def print_predicted(found: PredictedProgram) -> None:
    """The settings read, assumed and ignored, and the numbers."""
    plan = found.plan
    echo()
    print_fields(
        [
            ("program", shlex.join(found.command)),
            ("trainer", plan.trainer),
            ("model", plan.model),
            ("GPU", found.gpu.name),
            ("settings", settings_text(plan.configuration)),
            ("assumed", "; ".join((*plan.assumed, DATA))),
            ("left out", ", ".join(plan.left_out)),
            ("adds", "; ".join(plan.at_least)),
            ("notes", "; ".join((*plan.notes, *others_of(found)))),
            ("evaluation", found.not_priced),
            *predicted_phases(found),
        ]
    )
    prediction = found.prediction
    print_evidence(prediction, prediction.budget, predicted_stack())
