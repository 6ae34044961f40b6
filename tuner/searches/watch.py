"""Options for watching a running search from other programs: plain data, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.core.errors import InputError

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options for watching a search.

    - `metrics_port`: 0 if the search's own cluster serves metrics for Prometheus, on a port that
      Ray chooses. A joined cluster serves them on the ports of its nodes.
    - `dashboard`: start Ray's dashboard on localhost, with the search's own cluster.
    - `tell` is called with a line for each address to look at.
    """

    metrics_port: int | None = None
    dashboard: bool = False
    tell: Callable[[str], None] = lambda line: None

    @property
    def metrics(self) -> bool:
        """True if the search's own cluster collects metrics."""
        return self.metrics_port is not None or self.dashboard


def check_metrics_port(port: int | None, address: str | None) -> None:
    """Raise `InputError` unless Ray can serve metrics so: a cluster of its own chooses the port."""
    if port is None:
        return
    if address is not None:
        raise InputError(
            f"a metrics port of its own, {port}, is for a cluster of its own; the one at "
            f"{address!r} offers the metrics of searches where it offers Ray's",
            hint="leave the port out, and scrape the ports of that cluster's nodes",
        )
    if port:
        raise InputError(
            f"--metrics-port {port}: Ray chooses the port of its metrics",
            hint="--metrics-port 0 serves them, and prints their address",
        )
