"""Finds the recommended configuration in a search's journal, or says why there is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.app.target import Target, check_conditions, usable, with_margin
from tuner.core.errors import NothingFitsError, UnavailableError
from tuner.core.expressions import all_of
from tuner.core.gpu import Gpu
from tuner.core.records import MemoryBudget, TrialRecord, parse_margin
from tuner.core.units import format_size
from tuner.searches.best import BestTrial, recommend
from tuner.searches.front import device_bytes
from tuner.searches.journal import latest
from tuner.searches.objectives import objectives_of, require_known
from tuner.searches.view import source_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """The conditions for a recommendation, and the objectives that rank candidates.

    `where` are conditions on knobs. `headroom` ("10%") replaces the margin of the search.
    `max_memory` (bytes) replaces the GPU's memory if it is less. `objectives` replace those of the
    space; the first one decides.
    """

    where: tuple[str, ...] = ()
    headroom: str | None = None
    max_memory: int | None = None
    objectives: tuple[str, ...] = ()


ANY_THAT_FITS = Criteria()


def recommended(target: Target, criteria: Criteria = ANY_THAT_FITS) -> BestTrial:
    """The recommendation from the journal of `target`; see `recommended_of`.

    Raises `UnavailableError` if nothing was searched yet.
    """
    check_conditions(target, criteria.where)  # report invalid conditions first
    return recommended_of(target, latest(usable(target).comparable), criteria)


def recommended_of(target: Target, records: Sequence[TrialRecord], criteria: Criteria) -> BestTrial:
    """The recommendation from `records`, which hold one record per configuration.

    Raises `NothingFitsError`, which says how much memory is missing.
    """
    conditions = check_conditions(target, criteria.where)
    share = parse_margin(criteria.headroom, target.gpu)
    if share is not None:
        margin = MemoryBudget.of(target.gpu.memory_bytes, share).margin_bytes
        records = tuple(with_margin(record, margin) for record in records)
    allowed = target.gpu
    if criteria.max_memory is not None:
        allowed = dataclasses.replace(
            allowed, memory_bytes=min(criteria.max_memory, target.gpu.memory_bytes)
        )
    facts = target.facts
    chosen = objectives_of(criteria.objectives or facts.objectives, facts, allowed)
    require_known(records, chosen)
    best = recommend(
        records,
        facts,
        allowed,
        where=lambda configuration: target.space.matches(configuration, criteria.where),
        conditions=conditions,
        objective=chosen[0],
    )
    if best is None:
        met = [r for r in records if target.space.matches(r.configuration, criteria.where)]
        raise nothing_fits_error(dataclasses.replace(target, gpu=allowed), met, conditions)
    return best


def nothing_fits(target: Target, records: Sequence[TrialRecord], conditions: Sequence[str]) -> str:
    """The reason why there is no recommendation, with the smallest memory need found."""
    sizes = [size for r in records if (size := device_bytes(r)) is not None]
    tried = f"none of the {len(records)} configurations fits {target.gpu.name}"
    if conditions:
        tried += f" where {all_of(conditions)}"
    if not sizes:
        return tried
    limit = format_size(target.gpu.memory_bytes)
    margin = max((record.budget.margin_bytes for record in records), default=0)
    return (
        f"{tried}: the smallest needs {format_size(min(sizes))} ({source_label(records)}) of "
        f"{limit}, of which "
        f"{format_size(margin)} must stay free"
    )


def nothing_fits_error(
    target: Target, records: Sequence[TrialRecord], conditions: Sequence[str]
) -> NothingFitsError:
    """The error that ends a command which has nothing to recommend."""
    return NothingFitsError(
        nothing_fits(target, records, conditions),
        hint="lower the minimums with --where, allow smaller values in the space, run more trials, "
        "or choose a larger GPU",
    )


@dataclass(frozen=True, slots=True)
class Recommended:
    """The answer for one GPU type: its recommendation, or the reason why there is none."""

    gpu: Gpu
    best: BestTrial | None
    reason: str = ""

    @property
    def epoch_usd(self) -> float | None:
        """The price of an epoch in USD; None without a recommendation or a price."""
        return self.best.cost.epoch_usd if self.best and self.best.cost else None


def answers(
    targets: Sequence[Target], recommended: Callable[[Target], BestTrial]
) -> list[Recommended]:
    """The answers of all targets: the cheapest epoch first, then the fastest, then the rest."""
    found: list[Recommended] = []
    missing: list[UnavailableError] = []
    for target in targets:
        try:
            found.append(Recommended(target.gpu, recommended(target)))
        except (NothingFitsError, UnavailableError) as error:
            # A target that was not searched yet must not hide the answers of the others.
            found.append(Recommended(target.gpu, None, error.message))
            missing += [error] if isinstance(error, UnavailableError) else []
    if len(missing) == len(targets):
        raise missing[0]
    return sorted(found, key=by_cost)


def require_an_answer(found: Sequence[Recommended]) -> None:
    """Raise `NothingFitsError` with all reasons if no GPU type has a recommendation."""
    if any(answer.best for answer in found):
        return
    raise NothingFitsError(
        "nothing fits any of these GPU types:\n"
        + "\n".join(f"  {answer.gpu.id}: {answer.reason}" for answer in found),
        hint="lower the minimums with --where, or search larger GPUs",
    )


def by_cost(answer: Recommended) -> tuple[bool, float, float]:
    """Sorts answers: the cheapest epoch first, then the fastest, then the rest."""
    if answer.best is None:
        return (True, math.inf, math.inf)
    usd = answer.epoch_usd
    speed = answer.best.evidence.speed.samples_per_s
    return (False, math.inf if usd is None else usd, -speed)
