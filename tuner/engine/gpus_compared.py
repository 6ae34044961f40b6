"""The recommendations of several GPU types side by side, the cheapest epoch first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.engine.target import Target, load_target, with_model
from tuner.errors import NothingFitsError, UnavailableError

if TYPE_CHECKING:
    from tuner.gpus import Gpu
    from tuner.results.best import Recommendation

ALL = "all"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one GPU type comes to: its recommendation, or why there is none."""

    gpu: Gpu
    best: Recommendation | None
    reason: str = ""

    @property
    def epoch_usd(self) -> float | None:
        """The price of an epoch; None where there is no recommendation or no price."""
        return self.best.cost.epoch_usd if self.best and self.best.cost else None


def searched_targets(space_name: str, model: str | None, results: Path) -> list[Target]:
    """The GPU types on which the space was searched. Raises `UnavailableError` for none."""
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


def _order(answer: Answer) -> tuple[bool, float, float]:
    if answer.best is None:
        return (True, math.inf, math.inf)
    usd = answer.epoch_usd
    speed = answer.best.evidence.speed.samples_per_s
    return (False, math.inf if usd is None else usd, -speed)
