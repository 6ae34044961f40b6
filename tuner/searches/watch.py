"""Options for watching a running search from other programs: plain data, no Ray."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError

LOCALHOST = "127.0.0.1"

GRAFANA_DASHBOARD = Path(__file__).parent / "dashboards" / "grafana.json"
"""Dashboard to import into Grafana, with panels for the metrics of searches."""


class Tracker(StrEnum):
    """A tool for tracking training runs, to which trials can be written."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"


@dataclass(frozen=True, slots=True)
class Tracking:
    """One tracker and its destination: a folder, or a URI for MLflow."""

    tracker: Tracker
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options for watching a search.

    - `metrics_port`: port of localhost on which the search's own cluster serves metrics for
      Prometheus; 0 is any free port. A joined cluster serves them on the ports of its nodes.
    - `dashboard`: start Ray's dashboard on localhost, with the search's own cluster.
    - `track`: trackers that get a run for each trial.
    - `tell` is called with a line for each address to look at.
    """

    metrics_port: int | None = None
    dashboard: bool = False
    track: tuple[Tracking, ...] = ()
    tell: Callable[[str], None] = lambda line: None

    @property
    def metrics(self) -> bool:
        """True if the search's own cluster collects metrics."""
        return self.metrics_port is not None or self.dashboard


def parse_tracking(text: str) -> Tracking:
    """The tracking described by "tensorboard:FOLDER", "mlflow:FOLDER" or "mlflow:URI".

    Raises `InputError` for other texts, and `UnavailableError` if MLflow is not installed.
    """
    name, _, where = text.partition(":")
    if name not in list(Tracker) or not where:
        raise InputError(
            f"{text!r} cannot track trials",
            hint="write tensorboard:FOLDER, mlflow:FOLDER or mlflow:URI",
        )
    tracking = Tracking(Tracker(name), where)
    if tracking.tracker is Tracker.MLFLOW and importlib.util.find_spec("mlflow") is None:
        raise UnavailableError(
            f"{text!r} needs MLflow, which is not installed",
            hint="run `pip install mlflow`, or mlflow-skinny where trials go to a server",
        )
    if "://" not in where and Path(where).exists() and not Path(where).is_dir():
        raise InputError(f"{where!r} is a file", hint=f"name a folder: {name}:FOLDER")
    return tracking


def check_metrics_port(port: int | None, address: str | None) -> None:
    """Raise `InputError` if metrics cannot be served on this port of localhost."""
    if port is None:
        return
    if address is not None:
        raise InputError(
            f"a metrics port of its own, {port}, is for a cluster of its own; the one at "
            f"{address!r} offers the metrics of searches where it offers Ray's",
            hint="leave the port out, and scrape the ports of that cluster's nodes",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            raise InputError(
                f"port {port} of {LOCALHOST} cannot be used for metrics: {error.strerror}",
                hint="name another port, or 0 for any that is free",
            ) from error
