"""The answer of `tuner tune --predict`, printed."""

from __future__ import annotations

import shlex

from tuner.app.program_front import ProgramFront
from tuner.core.expressions import show
from tuner.core.units import format_size, significant
from tuner.report.terminal.front import print_front
from tuner.report.terminal.render import echo, print_fields, say
from tuner.report.terminal.verdict import READ_AS, field_lines, print_lines


def print_program_front(found: ProgramFront) -> None:
    """The recommended change as a diff, then the front that it is from."""
    base, best = found.base, found.view.best
    limit = base.gpu.memory_bytes
    if best is None:
        least = f"{format_size(found.least_bytes)} of {format_size(limit)}"
        say(f"nothing fits: the smallest takes {least}")
    elif found.change is None:
        echo("fits: the program has the fastest of these settings already")
    else:
        values = " ".join(f"{name}={show(value)}" for name, value in found.change.values.items())
        gain = best.evidence.speed.samples_per_s / base.prediction.speed.samples_per_s
        than = f"{significant(gain)} times as fast as now"
        now = than if base.fits else "which fits; the program as it is doesn't"
        memory = f"{format_size(best.evidence.memory.device_bytes)} of {format_size(limit)}"
        say(f"recommended: {values}, {memory}, {now}")
    print_lines(field_lines([(READ_AS, base.plan.read_as)]))
    if best is not None and found.change is not None:
        echo()
        echo(found.change.difference, nl=False)
    echo()
    print_fields(
        [
            ("program", shlex.join(base.command)),
            ("trainer", base.plan.trainer),
            ("model", base.plan.model),
            ("GPU", base.gpu.name),
            (
                "varied",
                "; ".join(f"{n}: {', '.join(map(show, v))}" for n, v in found.varied.items()),
            ),
            ("notes", "; ".join((*base.plan.notes, *found.notes))),
        ]
    )
    echo()
    print_front(found.view)
    echo(f"predicted, {len(found.view.records)} configurations; nothing was run or written")
