"""Options for watching a running search from other programs: plain data, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.core.errors import InputError

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options for watching a search.

    - `metrics`: serve metrics for Prometheus from the search's own cluster, on a port that Ray
      chooses. A joined cluster serves them on the ports of its nodes.
    - `dashboard`: start Ray's dashboard on localhost, with the search's own cluster.
    - `tell` is called with a line for each address to look at.
    """

    metrics: bool = False
    dashboard: bool = False
    tell: Callable[[str], None] = lambda line: None

    @property
    def collects(self) -> bool:
        """True if the search's own cluster collects metrics."""
        return self.metrics or self.dashboard


def check_metrics(address: str | None) -> None:
    """Raise `InputError` for metrics of a cluster that is joined: it serves them itself."""
    if address is not None:
        raise InputError(
            f"--metrics is for a cluster of its own; the one at {address!r} offers the metrics of "
            "searches where it offers Ray's",
            hint="leave --metrics out, and scrape the ports of that cluster's nodes",
        )
