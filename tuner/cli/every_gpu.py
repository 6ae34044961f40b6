"""`tuner best --gpu all`: the recommendations of all GPU types side by side, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.errors import NothingFitsError, UnavailableError

if TYPE_CHECKING:
    from tuner.cli.target import Target
    from tuner.gpus import Gpu
    from tuner.results.best import Recommendation

ALL = "all"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one GPU type comes to: its recommendation, or why there is none."""

    gpu: Gpu
    best: Recommendation | None
    reason: str = ""


def searched_targets(space_name: str, model: str | None, results: Path) -> list[Target]:
    """The GPU types on which the space was searched. Raises `UnavailableError` for none."""
    from tuner.cli.target import load_target, with_model
    from tuner.gpus import load_catalogue
    from tuner.results.store import ResultsFolder
    from tuner.space import load_space

    name = with_model(load_space(space_name), model).name
    found = [
        load_target(space_name, gpu, model=model, results=results)
        for gpu in load_catalogue()
        if ResultsFolder(results, name, gpu).journal.exists()
    ]
    if not found:
        raise UnavailableError(
            f"no results of {space_name!r} in {str(results)!r} yet",
            hint=f"run `tuner search --space {space_name} --gpu GPU` for each GPU type to compare",
        )
    return found


def answers(
    targets: Sequence[Target], recommended: Callable[[Target], Recommendation]
) -> list[Answer]:
    """The answer of each target: the cheapest epoch first, then the fastest, then the rest."""
    found = []
    for target in targets:
        try:
            found.append(Answer(target.gpu, recommended(target)))
        except NothingFitsError as error:
            found.append(Answer(target.gpu, None, error.message))
    return sorted(found, key=_order)


def print_answers(found: Sequence[Answer], *, as_json: bool) -> None:
    """The comparison as a table. Raises `NothingFitsError` where no type fits anything."""
    from tuner.cli.render import print_json

    if not any(answer.best for answer in found):
        raise NothingFitsError(
            "nothing fits any of these GPU types:\n"
            + "\n".join(f"  {answer.gpu.id}: {answer.reason}" for answer in found),
            hint="lower the floors with --where, or search larger GPUs",
        )
    if as_json:
        print_json(
            [
                a.best.to_dict() if a.best else {"gpu": {"id": a.gpu.id}, "reason": a.reason}
                for a in found
            ]
        )
        return
    _print_table([answer for answer in found if answer.best])
    for answer in found:
        if answer.best is None:
            click.echo(f"{answer.gpu.id}: {answer.reason}")
    unpriced = [a.gpu.id for a in found if a.best and _epoch_usd(a) is None]
    if unpriced:
        click.echo(f"no price is known of {', '.join(unpriced)}: see `tuner gpus`")


def _print_table(found: Sequence[Answer]) -> None:
    from tuner.cli.render import console, print_fields, settings_text, table
    from tuner.units import GIB, format_duration, significant

    bests = [answer.best for answer in found if answer.best]
    knobs = bests[0].space.knobs
    differing = [
        name for name in knobs if len({str(best.configuration.get(name)) for best in bests}) > 1
    ]
    sources = sorted({str(best.source) for best in bests})
    click.echo(f"{bests[0].space.name}, the cheapest epoch first ({' and '.join(sources)})")
    same = [name for name in knobs if name not in differing]
    print_fields([("all with", settings_text(bests[0].configuration, same) if same else "")])
    click.echo()
    numbers = ("USD/epoch", "epoch", "samples/s", "GiB of")
    columns = ["GPU", *numbers, *(["source"] if len(sources) > 1 else [])]
    drawn = table([*columns, *(["settings"] if differing else [])], right=numbers)
    for answer, best in zip(found, bests, strict=True):
        cost, usd = best.cost, _epoch_usd(answer)
        size = best.evidence.memory.device_bytes
        cells = [
            answer.gpu.id,
            "?" if usd is None else f"{usd:,.2f}",
            format_duration(cost.epoch_s) if cost else "?",
            significant(best.evidence.speed.samples_per_s),
            f"{size / GIB:.1f} of {answer.gpu.memory_bytes / GIB:.1f}",
            *([str(best.source)] if len(sources) > 1 else []),
        ]
        drawn.add_row(
            *cells, *([settings_text(best.configuration, differing)] if differing else [])
        )
    console().print(drawn)


def _epoch_usd(answer: Answer) -> float | None:
    return answer.best.cost.epoch_usd if answer.best and answer.best.cost else None


def _order(answer: Answer) -> tuple[bool, float, float]:
    if answer.best is None:
        return (True, math.inf, math.inf)
    usd = _epoch_usd(answer)
    speed = answer.best.evidence.speed.samples_per_s
    return (False, math.inf if usd is None else usd, -speed)
