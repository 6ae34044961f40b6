"""The answer about a program, checked or only run: printed, and as JSON."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tuner.app.cause import cause_of
from tuner.app.checking import NOT_TRIED, CheckedProgram
from tuner.app.cli import emulated_text
from tuner.app.cli.options import typed
from tuner.app.program_oracle import PredictedProgram, RunAnswer
from tuner.app.programs import MODEL, Largest
from tuner.core.expressions import settings_text, show
from tuner.core.records import Verdict
from tuner.core.units import GIB, format_duration, format_size, significant
from tuner.emulator.emulation import Emulation
from tuner.emulator.ending import Ended
from tuner.predict.releases import CUDA, predicted_stack
from tuner.program.planned import read_as
from tuner.report.terminal import verdict
from tuner.report.terminal.evidence import evidence_fields, print_parts
from tuner.report.terminal.render import echo, is_in_notebook, print_fields, prose
from tuner.searches.facts import times_text
from tuner.space.gpus import load_catalogue

_STOPS = re.compile(r": ImportError: | has no \S+ \((until|since) ")
"""Notes on what keeps a program from starting with the releases of the answer."""


def print_found(found: RunAnswer, needed: RunAnswer | None) -> None:
    """The verdict of the program as it is, and what it was read as."""
    verdict.print_verdict(answer_of(found, needed))
    verdict.print_lines(_read_lines(needed or found))


def _read_lines(found: RunAnswer) -> list[str]:
    text = _read_text(found)
    return verdict.field_lines([(verdict.READ_AS, text)]) if text else []


def _read_text(found: RunAnswer) -> str:
    """The training in ten words; of an emulated one, what took effect."""
    if isinstance(found, PredictedProgram):
        return found.plan.read_as
    return read_as(found.settings, "") if found.settings else ""


def answer_of(found: RunAnswer, needed: RunAnswer | None = None) -> verdict.Answer:
    """The verdict and its numbers."""
    gpu = times_text(gpus_of(found), found.gpu.id)
    # The numbers are those of a larger GPU where this one had too little memory.
    of = found if needed is None or needed.fits is None else needed
    answer = verdict.Answer(found.verdict, of.used_bytes, found.budget, gpu, of.interval)
    if isinstance(found, Emulation):
        reason = emulated_text.reason_text(found)
        if found.ended is Ended.OOM and found.fits is False and of is found:
            reason = reason or emulated_text.ended_text(found)
        return replace(answer, reason=reason, words=emulated_text.so_far_text(found))
    if found.verdict is not Verdict.UNKNOWN:
        return answer
    what = "what isn't modelled" if found.plan.at_least else "the logits that are kept"
    least = f"at least {verdict.numbers_text(answer)}, without {what}"
    return replace(answer, reason=verdict.bound_text(answer) if found.is_upper_bound else least)


def gpus_of(found: RunAnswer) -> int:
    """The number of GPUs of an answer."""
    return max(found.gpus, found.stands_for) if isinstance(found, Emulation) else found.ranks


def print_checked(checked: CheckedProgram, *, verbose: bool) -> None:
    """The rest of the answer, below the verdict: the change first, then speed, time and cost."""
    if verbose:
        _print_all(checked)
        return
    _print_log(checked, verdict.LINES - 5)
    verdict.print_lines(checked_lines(checked))
    for line in _pinned_lines(checked):
        echo(line)


def _print_log(checked: CheckedProgram, at_most: int) -> None:
    if checked.found.ended in ("error", "crash") and checked.log_tail:
        emulated_text.print_last_lines(checked.log_tail, at_most=at_most)


def _pinned_lines(checked: CheckedProgram) -> list[str]:
    """The typed command line in an environment that has the pinned releases."""
    if not checked.with_pinned:
        return []
    command, *words = typed()
    predict = [] if "--predict" in words else ["--predict"]
    line = shlex.join([*checked.with_pinned, "tuner", command, *predict, *words])
    return ["Predict with the pinned releases:", f"  {line}"]


def answer_fields(checked: CheckedProgram) -> list[verdict.Field]:
    """The answer, which notebooks, JSON and MCP show whole, and a screen in part."""
    found = checked.found
    of = checked.needed or found
    run = predicted_phases(found) if isinstance(found, PredictedProgram) else []
    trained = (of.plan.configuration, of.plan.model) if isinstance(of, PredictedProgram) else ()
    if isinstance(found, Emulation) and isinstance(of, Emulation):
        run = emulated_text.run_fields(found, of)
    return [
        (verdict.ANSWER, ": ".join(verdict.verdict_texts(answer_of(found, checked.needed)))),
        (verdict.READ_AS, _read_text(of)),
        (verdict.CHANGE, " ".join(change_texts(checked))),
        ("memory", verdict.memory_text(of.memory.breakdown) if of.memory else ""),
        ("cause", cause_of(of.memory, *trained) if of.memory else ""),
        *run,
        *_pace_fields(checked),
        ("source", _source(found)),
        *((verdict.NOTE, note) for note in notes_of(checked)),
    ]


def checked_lines(checked: CheckedProgram) -> list[str]:
    """The lines below the verdict, as many as a short answer has."""
    found, fields = checked.found, answer_fields(checked)
    notes = [text for label, text in fields if label == verdict.NOTE]
    better = checked.suggestion
    apart = [verdict.ANSWER, verdict.READ_AS, verdict.CHANGE, "memory", "source", verdict.NOTE]
    apart += ["cause"] if better is not None and found.fits else []
    memory = verdict.field_lines(
        field for field in fields if field[0] == "memory" and not found.fits
    )
    numbers = verdict.field_lines(field for field in fields if field[0] not in apart)
    is_whole = is_in_notebook()
    room = (verdict.NOTEBOOK_LINES if is_whole else verdict.LINES) - 2 - len(numbers)
    room -= len(_read_lines(checked.needed or found))
    # The whole change has the room that it needs; then the memory, a note and the places have it.
    spare = room - len(_change_lines(checked, 0))
    if better is not None:
        spare = room - 1 - verdict.least_lines(better.change.difference)
    memory = memory[: max(0, spare)]
    shown = [(verdict.NOTE, note) for note in (notes if is_whole else notes[:1])]
    first = verdict.field_lines(shown, most=min(9 if is_whole else 2, spare - len(memory)))
    change = _change_lines(checked, room - len(memory) - len(first))
    more = 0 if is_whole else len(notes) - bool(first)
    source = verdict.field_lines([("source", verdict.with_more(_source(found), more))])
    return [*memory, *change, *numbers, *source, *first]


def predicted_phases(found: PredictedProgram) -> list[verdict.Field]:
    """The phase that ends a predicted program, and the peaks of its phases."""
    ran = sorted(found.phases.items(), key=lambda phase: -phase[1])
    shown = ", ".join(f"{phase} {significant(size / GIB)}" for phase, size in ran)
    batch, length = (found.plan.configuration.get(n) for n in ("eval_batch", "max_length"))
    return [
        ("ends", f"in the evaluation, of {batch} x {length:,} tokens" if found.ends_in else ""),
        ("phases", f"{shown} GiB allocated; saving takes no more" if shown else ""),
    ]


def _change_lines(checked: CheckedProgram, room: int) -> list[str]:
    """The change, in at most `room` lines."""
    found = checked.suggestion
    lines = [line for text in change_texts(checked) for line in prose(text).split("\n")]
    return (
        [*lines, *verdict.difference_lines(found.change.difference, room - 1)] if found else lines
    )


def change_texts(checked: CheckedProgram) -> list[str]:
    """The effect of a change without its difference, or that no change helps."""
    better = checked.suggestion
    if better is not None:
        of = better.found
        does = of.verdict.replace("tight", "fits, tightly")
        if checked.found.fits:
            faster = f"{better.speedup:.2f} times as fast" if better.speedup else "faster"
            does = f"is {faster}"
        return [f"With this change it {does}: {_size(of)}"]
    lacking = [note for note in checked.notes if note.startswith(NOT_TRIED)]
    where = "Without PyTorch, not" if "without PyTorch" in "".join(lacking) else "Not"
    untried = [f"{where} every change could be tried."] if lacking else []
    if not checked.found.fits or checked.needed is not None:
        return [*_nothing_fits(checked), *_otherwise(checked), *untried]
    if checked.runs > 1:
        same = "" if lacking else " with the same effective batch, adapters and lengths"
        return [*untried, f"No {'other ' * bool(lacking)}change{same} is clearly faster."]
    return []


def _otherwise(checked: CheckedProgram) -> Iterator[str]:
    for values, of in checked.otherwise:
        words = " ".join(f"--set {name}={show(value)}" for name, value in values.items())
        does = "it fits" if "per_device_eval_batch_size" in values else "it fits, trained otherwise"
        how = f" ({of.source})" if of.source != checked.source else ""
        yield f"With {words} {does}{how}: {_size(of)}"


def _size(of: RunAnswer) -> str:
    return f"{significant(of.used_bytes / GIB)} GiB{verdict.interval_text(of.interval)}"


def _nothing_fits(checked: CheckedProgram) -> list[str]:
    """The least memory that a change took, and GPU types that have it."""
    if checked.least_bytes is None:
        return []  # no change was tried
    budget = checked.found.budget
    share = budget.usable_bytes / budget.limit_bytes
    from_ampere = {"bf16", "flash_attention_2"} & set(map(show, checked.found.settings.values()))
    prices = {
        gpu.id: gpu.price_usd_per_hour or math.inf
        for gpu in load_catalogue().values()
        if gpu.memory_bytes * share >= checked.least_bytes and (gpu.has_bf16 or not from_ampere)
    }
    names = sorted(prices, key=prices.__getitem__)[:3]
    if names and (price := prices[names[0]]) < math.inf:
        names[0] += f" ({price:.3g} USD per hour)"
    where = f": the cheapest with room are {', '.join(names)}" if names else ""
    return [
        "No change tried with the same effective batch, adapters and lengths fits.",
        f"The smallest takes {format_size(checked.least_bytes)}{where}.",
    ]


def _pace_fields(checked: CheckedProgram) -> list[verdict.Field]:
    """Speed, time and cost, with the change where the program does not fit without it."""
    base = checked.needed or checked.found
    pace, change = _pace_of(base), checked.suggestion
    if pace is None:
        return [] if isinstance(base, Emulation) else [("speed", verdict.UNKNOWN_SPEED)]
    changed_s = change.step_s if change is not None and not checked.found.fits else None
    run = base.run_time
    if changed_s is not None:
        run = run and run.slowed(changed_s / pace.step_s)
        pace = verdict.Pace(changed_s, pace.samples, pace.tokens)
    rows = ""
    if isinstance(base, PredictedProgram):
        epochs = base.plan.schedule.epochs
        rows = f"{f' of {epochs:g} x the data' if epochs else ''} at full length"
    paid = gpus_of(base)
    (label, speed), *others = verdict.pace_fields(pace, base.gpu, gpus=paid, run=run, rows=rows)
    return [(label, f"{speed} with the change" if changed_s is not None else speed), *others]


def _pace_of(found: RunAnswer) -> verdict.Pace | None:
    """The pace of an answer; None when unknown."""
    if isinstance(found, PredictedProgram):
        return verdict.Pace.of(found.prediction)
    if found.time is None:
        return None
    rows = sum(rows for rows, _ in found.inputs) * found.ranks or None
    tokens = sum(rows * tokens for rows, tokens in found.inputs) * found.ranks or None
    return verdict.Pace(found.time.step_s, rows, tokens, found.time.interval_s, found.time.mfu)


def _versions(found: RunAnswer) -> dict[str, str]:
    if isinstance(found, Emulation):
        return {"torch": found.torch, CUDA: found.cuda}
    return predicted_stack()


def _source(found: RunAnswer) -> str:
    """The source of an answer, with the versions that it depends on."""
    how = found.source
    if isinstance(found, Emulation):
        how = f"emulated, {found.steps} optimizer step{'s' * (found.steps != 1)} ran"
    return verdict.source_text(how, _versions(found))


def notes_of(checked: CheckedProgram) -> Iterator[str]:
    """Restrictions of the answer, the gravest first."""
    found = checked.needed or checked.found
    yield from checked.ignored
    if isinstance(found, Emulation):
        yield from emulated_text.emulated_notes(found)
        yield from checked.notes
        return
    plan = found.plan
    stops = [note for note in plan.notes if _STOPS.search(note)]
    yield from stops
    yield from plan.at_least
    yield from (found.not_priced,) if found.not_priced else ()
    yield from checked.pinned
    yield from plan.findings
    yield from (f"not modelled: {', '.join(plan.left_out)}",) if plan.left_out else ()
    yield from (note for note in plan.notes if note not in (*plan.findings, *stops))
    if found.others:
        yield (
            f"{plan.where} is the largest of {1 + len(found.others)} trainings, each alone: "
            "what an earlier one leaves in memory isn't counted"
        )
    for one in found.others:
        size = significant(one.used_bytes / GIB)
        yield f"{one.plan.where}: {one.plan.read_as}: {one.verdict}, {size} GiB"
    yield from checked.notes
    if found.examples and found.time is not None and found.run_time is None:
        yield "--examples tells no time: the rows that they are packed into aren't counted"
    data = "every sequence is of full length; data, logging and saving take no memory"
    yield f"assumed: {'; '.join((*plan.assumed, data))}"


def _print_all(checked: CheckedProgram) -> None:
    """Every number, what it rests on, and the change as a diff that can be applied."""
    found, better = checked.found, checked.suggestion
    of = found if checked.needed is None or checked.needed.fits is None else checked.needed
    shown = (verdict.ANSWER, verdict.READ_AS, verdict.CHANGE)
    as_it_is = answer_fields(replace(checked, suggestion=None))
    fields = [field for field in as_it_is if field[0] not in shown]
    echo()
    print_fields(verdict.with_details(fields, _details(of, answer_of(found, checked.needed))))
    time = of.time
    if of.memory is not None:
        print_parts(of.source, of.memory, time.breakdown_s if time else {})
    use = of.limiting if isinstance(of, Emulation) else None
    if use is not None and use.allocations:
        echo()
        emulated_text.print_lines_of_code(use)
    _print_log(checked, verdict.LINES)
    echo()
    for text in change_texts(checked):
        echo(text)
    if better is not None:
        kept = "the same effective batch, adapters and lengths"
        step = "" if better.step_s is None else f"{format_duration(better.step_s)} per step, with "
        echo(f"{step}{kept}: {settings_text(better.change.values)}\n\n{better.change.difference}")
    for line in _pinned_lines(checked):
        echo(line)
    if checked.runs:
        what = "run" if checked.source == "emulated" else "prediction"
        number = f"{checked.runs} {what}{'s' * (checked.runs != 1)}"
        echo(f"{checked.source}, in {number}")


def _details(found: RunAnswer, answer: verdict.Answer) -> list[verdict.Field]:
    """The program and its settings, and the numbers that only --verbose shows."""
    number = times_text(gpus_of(found), found.gpu.name)
    common = [
        ("program", shlex.join(found.command)),
        ("GPU", f"{number}, {format_size(found.gpu.memory_bytes)}"),
    ]
    if isinstance(found, Emulation):
        room = "" if answer.reason else verdict.room_text(answer)
        return [*common, ("verdict", room), *emulated_text.more_fields(found)]
    plan = found.plan
    return [
        *common,
        ("trainer", plan.trainer),
        ("model", plan.model),
        ("settings", settings_text(plan.configuration)),
        *evidence_fields(found.prediction, found.budget, predicted_stack()),
    ]


def checked_to_dict(checked: CheckedProgram) -> dict[str, Any]:
    """The answer as JSON types; `source` says what every number in it is."""
    found = checked.suggestion
    return {
        "source": checked.source,
        "answer": verdict.fields_dict(answer_fields(checked)),
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
        "otherwise": [
            {"values": dict(values), "source": of.source, "device_bytes": of.used_bytes}
            for values, of in checked.otherwise
        ],
        "least_bytes": checked.least_bytes,
        "runs": checked.runs,
        "notes": [*checked.pinned, *map(str.strip, _pinned_lines(checked)), *checked.notes],
        "versions": _versions(checked.found),
    }


# -- the largest value that fits ----------------------------------------------------------------


def print_largest(found: Largest, *, verbose: bool) -> None:
    """The value, its verdict, the change, speed, time and cost, in at most `LINES` lines.

    With `verbose` every number of the verdict.
    """
    if found.value is None:
        echo(f"No {found.name} fits: the smallest that was tried is {show(found.next_value)}")
    else:
        own = "as now" if found.value == found.own else f"now {show(found.own)}"
        end = "no larger one was tried"
        if found.next_value is not None:
            end = f"{show(found.next_value)} {'is refused' if found.limit else 'does not fit'}"
        echo(f"Largest {found.name} that fits: {show(found.value)} ({own}); {end}")
    answer = found.found or found.next_found
    if answer is None:
        return
    print_found(answer, None)
    change = found.change.difference if found.change is not None else ""
    notes = list(_notes(found))
    checked = CheckedProgram(answer)
    if verbose:
        print_checked(checked, verbose=True)
        echo("\n".join((change, *(f"note: {note}" for note in notes))))
        return
    fields = _pace_fields(checked) if found.found else []
    fields.append(("source", verdict.with_more(_source(answer))))
    below = verdict.field_lines([*fields, *((verdict.NOTE, note) for note in notes[:1])])
    verdict.print_lines((*verdict.difference_lines(change, verdict.LINES - 2 - len(below)), *below))


def _notes(found: Largest) -> Iterator[str]:
    if found.limit:
        yield found.limit
    if found.name == MODEL and found.value not in (None, found.own):
        yield f"with --model {show(found.value)} `tuner check --predict` has all about it"
    elif found.name == "micro_batch" and found.change is not None:
        yield "accumulation stays: the effective batch changes with the micro-batch"
    elif found.name in ("max_length", "lora_rank") and found.change is not None:
        yield "it changes what is learnt"


def largest_to_dict(found: Largest) -> dict[str, Any]:
    """The answer as JSON types; `source` says what every number in it is."""
    return {
        "source": "predicted",
        "name": found.name,
        "own": found.own,
        "value": found.value,
        "found": None if found.found is None else found.found.to_dict(),
        "next_value": found.next_value,
        "next": None if found.next_found is None else found.next_found.to_dict(),
        "limit": found.limit,
        "difference": found.change.difference if found.change is not None else "",
        "runs": found.runs,
        "notes": list(_notes(found)),
    }
