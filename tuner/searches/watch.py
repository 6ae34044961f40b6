"""What a search shows of itself to other programs while it runs: plain data, no Ray."""

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
"""To import into Grafana: panels over the metrics of searches."""


class Tracker(StrEnum):
    """A tool for looking at training runs that trials can be written to."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"


@dataclass(frozen=True, slots=True)
class Tracking:
    """One tracker, and where it keeps what it gets: a folder, or a URI for MLflow."""

    tracker: Tracker
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How others can watch a search.

    - `metrics_port`: a cluster of its own offers metrics for Prometheus there, on localhost; 0 is
      any free port. A cluster that is joined offers them by itself, where its nodes do.
    - `dashboard`: a cluster of its own has Ray's dashboard, on localhost.
    - `track`: each trial becomes a run of these.
    - `tell` is called with a line for each place where there is something to see.
    """

    metrics_port: int | None = None
    dashboard: bool = False
    track: tuple[Tracking, ...] = ()
    tell: Callable[[str], None] = lambda line: None

    @property
    def metrics(self) -> bool:
        """Whether a cluster of its own collects metrics."""
        return self.metrics_port is not None or self.dashboard


def parse_tracking(text: str) -> Tracking:
    """The tracking that "tensorboard:FOLDER", "mlflow:FOLDER" or "mlflow:URI" asks for.

    Raises `InputError`, and `UnavailableError` where MLflow is not installed.
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
    """Raise `InputError` where metrics cannot be offered at this port of localhost."""
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
