"""The recommendations of several GPU types side by side, the cheapest epoch first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.app.plan import SkippedGpu
from tuner.app.recommendation import nothing_fits
from tuner.app.search import SearchedGpu
from tuner.app.target import Target
from tuner.core.errors import NothingFitsError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.searches.best import BestTrial


@dataclass(frozen=True, slots=True)
class Answer:
    """What one GPU type comes to: its recommendation, or why there is none."""

    gpu: Gpu
    best: BestTrial | None
    reason: str = ""

    @property
    def epoch_usd(self) -> float | None:
        """The price of an epoch; None where there is no recommendation or no price."""
        return self.best.cost.epoch_usd if self.best and self.best.cost else None


def answers(targets: Sequence[Target], recommended: Callable[[Target], BestTrial]) -> list[Answer]:
    """The answer of each target: the cheapest epoch first, then the fastest, then the rest."""
    found: list[Answer] = []
    missing: list[UnavailableError] = []
    for target in targets:
        try:
            found.append(Answer(target.gpu, recommended(target)))
        except (NothingFitsError, UnavailableError) as error:
            # One that was not searched yet is no reason to keep quiet about the others.
            found.append(Answer(target.gpu, None, error.message))
            missing += [error] if isinstance(error, UnavailableError) else []
    if len(missing) == len(targets):
        raise missing[0]
    return sorted(found, key=_order)


def answers_found(found: Sequence[SearchedGpu | SkippedGpu]) -> list[Answer]:
    """The answers of a search of several GPU types, in the same order as those of `answers`."""
    return sorted(map(_answer, found), key=_order)


def _answer(found: SearchedGpu | SkippedGpu) -> Answer:
    if isinstance(found, SkippedGpu):
        return Answer(found.target.gpu, None, found.reason)
    plan, view = found.plan, found.view
    if view.best is not None:
        return Answer(plan.target.gpu, view.best)
    met = [record for record in view.records if plan.meets(record.configuration)]
    return Answer(plan.target.gpu, None, nothing_fits(plan.target, met, plan.conditions))


def require_an_answer(found: Sequence[Answer]) -> None:
    """Raise `NothingFitsError` with every reason where no GPU type has a recommendation."""
    if any(answer.best for answer in found):
        return
    raise NothingFitsError(
        "nothing fits any of these GPU types:\n"
        + "\n".join(f"  {answer.gpu.id}: {answer.reason}" for answer in found),
        hint="lower the floors with --where, or search larger GPUs",
    )


def _order(answer: Answer) -> tuple[bool, float, float]:
    if answer.best is None:
        return (True, math.inf, math.inf)
    usd = answer.epoch_usd
    speed = answer.best.evidence.speed.samples_per_s
    return (False, math.inf if usd is None else usd, -speed)
