"""The answer of `tuner check --largest`, printed and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.app.cli.checked_text import (
    answer_source,
    gpus_of,
    pace_of,
    print_found,
    print_predicted,
)
from tuner.app.largest import MODEL, Largest
from tuner.core.expressions import show
from tuner.report.terminal.render import echo
from tuner.report.terminal.verdict import (
    LINES,
    NOTE,
    difference_lines,
    field_lines,
    pace_fields,
    print_lines,
    with_more,
)


def print_largest(found: Largest, *, verbose: bool) -> None:
    """The value, its verdict, the change, speed, time and cost, in at most `LINES` lines.

    With `verbose` every number of the verdict.
    """
    echo(_head(found))
    answer = found.found or found.next_found
    if answer is None:
        return
    print_found(answer, None)
    change = found.change.difference if found.change is not None else ""
    if verbose:
        print_predicted(answer)
        echo("\n".join(("", change, *(f"note: {note}" for note in _notes(found)))))
        return
    fields = pace_fields(pace_of(answer), answer.gpu, gpus=gpus_of(answer)) if found.found else []
    fields.append(("source", with_more(answer_source(answer))))
    fields += [(NOTE, note) for note in list(_notes(found))[:1]]
    below = field_lines(fields)
    print_lines((*difference_lines(change, LINES - 2 - len(below)), *below))


def _head(found: Largest) -> str:
    if found.value is None:
        return f"No {found.name} fits: the smallest that was tried is {show(found.next_value)}"
    own = "as now" if found.value == found.own else f"now {show(found.own)}"
    end = "no larger one was tried"
    if found.next_value is not None:
        end = f"{show(found.next_value)} {'is not possible' if found.limit else 'does not fit'}"
    return f"Largest {found.name} that fits: {show(found.value)} ({own}); {end}"


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
