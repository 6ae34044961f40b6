"""The configuration that a search recommends, as `best`, `apply` and `export` look it up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.cli.target import Target
    from tuner.results.best import Recommendation


def recommended(
    target: Target,
    where: tuple[str, ...],
    *,
    headroom: str | None = None,
    max_memory: int | None = None,
    objectives: tuple[str, ...] = (),
) -> Recommendation:
    """The recommendation from the journal of `target`.

    `headroom` ("10%") takes the place of the margin of the search, and `max_memory` (bytes) of
    the GPU's memory where it is less; the first of `objectives` takes the place of the space's.
    Raises `UnavailableError` where nothing was searched yet,
    and `NothingFitsError`.
    """
    from tuner.cli.answers import nothing_fits_error
    from tuner.cli.options import parse_margin
    from tuner.cli.target import check_conditions, require_records, with_margin
    from tuner.results.best import recommend
    from tuner.results.journal import latest
    from tuner.results.objectives import objectives_of, require_known

    conditions = check_conditions(target, where)
    share = parse_margin(headroom, target.gpu, what="headroom")
    records = latest(require_records(target))
    if share is not None:
        margin = round(target.gpu.memory_bytes * share)
        records = tuple(with_margin(record, margin) for record in records)
    allowed = target.gpu
    if max_memory is not None:
        allowed = dataclasses.replace(
            allowed, memory_bytes=min(max_memory, target.gpu.memory_bytes)
        )
    facts = target.facts
    chosen = objectives_of(objectives or facts.objectives, facts, allowed)
    require_known(records, chosen)
    best = recommend(
        records,
        facts,
        allowed,
        where=lambda configuration: target.space.matches(configuration, where),
        conditions=conditions,
        objective=chosen[0],
    )
    if best is None:
        met = [r for r in records if target.space.matches(r.configuration, where)]
        raise nothing_fits_error(dataclasses.replace(target, gpu=allowed), met, conditions)
    return best
