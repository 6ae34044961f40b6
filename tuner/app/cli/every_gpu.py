"""Prints the recommendations of several GPU types side by side, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.app.recommendation import Answer, require_an_answer
from tuner.core.records import Source
from tuner.core.units import GIB, format_duration, significant
from tuner.report.terminal.render import echo, print_fields, print_json, settings_text
from tuner.report.terminal.tables import Sheet, print_wider
from tuner.searches.facts import OF_ONE, times_text


def print_answers(found: Sequence[Answer], *, as_json: bool) -> None:
    """The comparison as a table. Raises `NothingFitsError` where no type fits anything."""
    require_an_answer(found)
    if as_json:
        print_json(
            [
                a.best.to_dict() if a.best else {"gpu": {"id": a.gpu.id}, "reason": a.reason}
                for a in found
            ]
        )
        return
    print_comparison_of(found)


def print_comparison_of(found: Sequence[Answer]) -> None:
    """The recommendations side by side, and why a type has none."""
    if any(answer.best for answer in found):
        _print_table([answer for answer in found if answer.best])
    print_fields([(a.gpu.id, a.reason) for a in found if a.best is None])
    unpriced = [a.gpu.id for a in found if a.best and a.epoch_usd is None]
    if unpriced:
        echo(f"no price is known of {', '.join(unpriced)}: see `tuner gpus`")


def _print_table(found: Sequence[Answer]) -> None:
    bests = [answer.best for answer in found if answer.best]
    knobs = bests[0].space.knobs
    differing = [
        name for name in knobs if len({str(best.configuration.get(name)) for best in bests}) > 1
    ]
    sources = [str(source) for source in Source if source in {best.source for best in bests}]
    echo(f"{bests[0].space.name}, the cheapest epoch first ({' and '.join(sources)})")
    same = [name for name in knobs if name not in differing]
    print_fields([("all with", settings_text(bests[0].configuration, same) if same else "")])
    echo()
    numbers = ("USD/epoch", "epoch", "samples/s", "GiB of")
    columns = ["GPU", *numbers, *(["source"] if len(sources) > 1 else [])]
    wide = Sheet([*columns, *differing], right=numbers)
    narrow = Sheet(
        [*columns, *(["settings"] if differing else [])], right=numbers, drop=("source", "epoch")
    )
    for answer, best in zip(found, bests, strict=True):
        cost, usd = best.cost, answer.epoch_usd
        size = best.evidence.memory.device_bytes
        cells = [
            times_text(best.gpus, answer.gpu.id),
            "?" if usd is None else f"{usd:,.2f}",
            format_duration(cost.epoch_s) if cost else "?",
            significant(best.evidence.speed.samples_per_s),
            f"{size / GIB:.1f} of {best.memory_bytes / GIB:.1f}",
            *([str(best.source)] if len(sources) > 1 else []),
        ]
        values = (settings_text(best.configuration, [name]) for name in differing)
        wide.add_row(*cells, *(text.partition("=")[2] for text in values))
        settings = [settings_text(best.configuration, differing)] if differing else []
        narrow.add_row(*cells, *settings)
    print_wider(wide, narrow)
    if any(best.gpus > 1 for best in bests):
        echo(f"of several GPUs {OF_ONE}")
