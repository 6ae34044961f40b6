"""Values of knobs with which nothing is predicted to fit: which trial would tell if that is true.

The regression learns how far predictions are off from trials that are near. Of a value with which
nothing is tried, as nothing would fit, it learns nothing, and a mechanism that was misjudged
(activations that are not kept, a kernel that needs no copy) is never found out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.searches.guided.experience import Experience
from tuner.searches.guided.model import Floats
from tuner.searches.guided.pool import Pool

HIGHEST_RISK = 0.30
"""Of running out of memory, above which nothing is proposed for its expected gain."""

MOVES = 0.02
"""The share of throughput that a probe must be able to gain."""

LEAST_SHARE, MISJUDGED = 0.4, 0.25
"""Of what comes and goes in a step, the share that is believed to be what it takes in truth at the
least, and the chance that a value just beyond the limit has been misjudged. It falls with the
square of the share that would have to be true."""


@dataclass(frozen=True, slots=True)
class DarkProbe:
    """A candidate that is predicted not to fit, and the gain that is expected of trying it."""

    place: int
    worth: float


def unordered_values(pool: Pool) -> list[NDArray[np.bool_]]:
    """Which candidates have each value of the knobs without an order.

    Numbers are not probed: what is learned of one holds for the next.
    """
    columns = [pool.column(name) for name in pool.distributions if name not in pool.coordinates]
    return [
        np.array([other == value for other in column])
        for column in columns
        for value in dict.fromkeys(column)
    ]


def darkest(
    experience: Experience,
    values: Sequence[NDArray[np.bool_]],
    open_: NDArray[np.intp],
    fastest: float,
) -> DarkProbe | None:
    """The probe that is worth most; None where no value of a knob is all dark, or none would gain.

    A value is dark if none of its candidates was tried and all are predicted not to fit. Its probe
    is the one closest to the limit. `values` are those of `unordered_values`.
    """
    tried = experience.tried()
    risky = experience.risk_of_all()[open_] > HIGHEST_RISK
    dark = [has[open_] for has in values if not (has & tried).any()]
    dark = [own for own in dark if own.any() and risky[own].all()]
    if not dark or fastest <= 0:
        return None
    speed, size = experience.quantities(open_)
    fits = _share_to_fit(experience.pool, np.exp(size.mean), open_)
    gain = speed.expected / fastest - 1.0
    best: DarkProbe | None = None
    for own in dark:
        hopeful = own & (fits >= LEAST_SHARE)
        most = float(gain[hopeful].max(initial=0.0))
        closest = int(np.argmax(np.where(hopeful, fits, 0.0)))
        worth = MISJUDGED * float(fits[closest]) ** 2 * most
        if most >= MOVES and (best is None or worth > best.worth):
            best = DarkProbe(int(open_[closest]), worth)
    return best


def never_tried(
    experience: Experience, open_: NDArray[np.intp], fastest: float
) -> tuple[int, int | None]:
    """How many are predicted not to fit, and the place of the one that would tell if that is so.

    That is of those that would be faster than `fastest` the one that takes least memory; None
    where there is none.
    """
    places = open_[experience.risk_of_all()[open_] > HIGHEST_RISK]
    speed, size = experience.quantities(places)
    faster = speed.expected > fastest * (1 + MOVES)
    least = np.where(faster, size.mean, np.inf)
    return len(places), int(places[np.argmin(least)]) if faster.any() else None


def never_fitted(pool: Pool, experience: Experience) -> list[str]:
    """Values, of knobs without an order, that ran out of memory where another value fitted."""
    if not experience.known:
        return []
    found = []
    for name in pool.distributions:
        if name in pool.coordinates:
            continue
        column = pool.column(name)
        fitted = {column[place] for place in experience.known}
        times = Counter(column[place] for place in experience.oom)
        found += [
            f"{name}={value} ran out of memory in each of its trials ({number})"
            for value, number in times.items()
            if value not in fitted
        ]
    return sorted(found)


def _share_to_fit(pool: Pool, device_bytes: Floats, places: NDArray[np.intp]) -> Floats:
    """What share of its moving memory each may take to fit; none for weights that do not."""
    loaded = np.minimum(pool.loaded_bytes[places], device_bytes)
    return (pool.usable_bytes - loaded) / np.maximum(device_bytes - loaded, 1.0)
