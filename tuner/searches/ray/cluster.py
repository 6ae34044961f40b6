"""Ray itself: a quiet private cluster for one search, or a connection to an existing one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.exceptions import AuthenticationError

from tuner.core.environment import DEVICE_ORDER
from tuner.core.errors import UnavailableError
from tuner.core.files import scratch_folder
from tuner.core.host import usable_cpus
from tuner.core.meanwhile import environment
from tuner.searches.joining import checked_address, keep_private, no_token, not_joined
from tuner.searches.options import SearchOptions

OBJECT_STORE_BYTES = 100_000_000
"""Size of Ray's object store. Trials exchange a few kilobytes, and Ray's default is 30 % of the
host's memory."""

STARTS = 3
"""Number of attempts to start Ray, which gives itself 30 s: a machine that is too busy is often
free a minute later. The last one is without the dashboard."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

LOCALHOST = "127.0.0.1"

Tell = Callable[[str], None]

METRICS_PERIOD_MS = "2000"
"""Period at which processes of a private cluster report metrics; Ray's default is 10 s."""

QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A trial that exhausts the host's memory ends by itself; Ray would kill its supervisor.
    "RAY_memory_monitor_refresh_ms": "0",
    **DEVICE_ORDER,
}


class _OwnOutput:
    """Standard output without the pages that Ray's threads print about lost nodes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, unless a thread of Ray does."""
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Ray from printing and from usage statistics inside the block."""
    with environment(QUIET_ENVIRONMENT), contextlib.redirect_stdout(_OwnOutput(sys.stdout)):
        yield


@contextlib.contextmanager
def connected(
    options: SearchOptions,
    *,
    cpus: int = 1,
    gpus: Sequence[int] = (),
    undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    tell: Tell = lambda line: None,
) -> Iterator[None]:
    """Initialise Ray for the block, with the metrics and dashboard that `options` ask for.

    Uses the connection of this process if there is one; else joins the cluster at their address;
    else starts a cluster with `cpus` CPUs and the GPUs of these indices, and at the end stops all
    its processes and removes its files. Ray starts and stops within `undisturbed()`. `tell` is
    called with a line for each address to look at. Raises `UnavailableError` if there is no cluster
    at the address or Ray does not start in time, and `InputError` for an invalid address.
    """
    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        stack.callback(_shut_down, undisturbed)
        # Ray's workers import from the current folder before all others; this one is empty.
        with undisturbed(), contextlib.chdir(folder):
            if options.address is None:
                url = _started(folder, cpus, gpus, options, tell)
            else:
                url = _join(options.address)
        _tell(options, url, tell)
        yield


def cpus_for(workers: int | None, resources_per_trial: Mapping[str, float]) -> int:
    """CPUs of a new cluster: those that concurrent trials need, else those of this process."""
    if workers is not None:
        return max(1, math.ceil(workers * resources_per_trial.get("CPU", 1.0)))
    return usable_cpus()


def _started(
    folder: Path, cpus: int, gpus: Sequence[int], options: SearchOptions, tell: Tell
) -> str:
    """Start a cluster as `_start` does: again if that fails, and at last without its dashboard."""
    for left in reversed(range(STARTS)):
        try:
            return _start(folder, cpus, gpus, options, tell)
        except UnavailableError:
            raise
        except Exception as error:
            ray.shutdown()
            said = str(error).strip().splitlines()[0]
            if not left:
                raise UnavailableError(
                    f"Ray did not start on this machine, {STARTS} times: {said}",
                    hint="the machine is likely overloaded or short of memory: try again with "
                    "fewer --workers or when it is less busy; --address uses a running cluster",
                ) from error
            if options.dashboard and left == 1:
                tell(f"warning: no dashboard: {said}")
                options = replace(options, dashboard=False)
    raise AssertionError  # unreachable: the last attempt returns or raises


def _start(folder: Path, cpus: int, gpus: Sequence[int], options: SearchOptions, tell: Tell) -> str:
    """Start a cluster on this machine; return the address of its dashboard, or ""."""
    if said := keep_private():
        tell(said)
    own = {
        # Ray makes its folder writable for all users, so it is inside a private folder.
        "RAY_TMPDIR": str(folder),
        # Collecting metrics takes processor time from trials.
        "RAY_enable_metrics_collection": str(int(options.metrics or options.dashboard)),
        "RAY_metrics_report_interval_ms": METRICS_PERIOD_MS,
        **_visible(gpus),
    }
    with environment(own):
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=len(gpus),
            include_dashboard=options.dashboard,
            dashboard_host=LOCALHOST,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    return str(context.dashboard_url or "")


def _tell(options: SearchOptions, dashboard: str, tell: Tell) -> None:
    """Tell the addresses of the dashboard and the metrics of the connected cluster."""
    if options.dashboard and dashboard:
        has_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
        token = " (`ray get-auth-token` prints the token that it asks for)" if has_token else ""
        tell(f"dashboard: http://{dashboard}{token}")
    if options.metrics:
        (node,) = ray.nodes()
        host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
        tell(f"metrics: http://{host}:{port}/metrics")


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that shows processes only these GPUs, indexed among those of this process."""
    if not gpus:
        return {}
    before = os.environ.get(VISIBLE_DEVICES)
    seen = before.split(",") if before else None
    return {VISIBLE_DEVICES: ",".join(seen[index] if seen else str(index) for index in gpus)}


def _shut_down(undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
    with undisturbed():
        ray.shutdown()


def _join(address: str) -> str:
    """Join the cluster; return the address of its dashboard, or ""."""
    wanted = checked_address(address)
    try:
        context = ray.init(address=wanted, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise no_token(wanted) from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()
        raise not_joined(wanted, str(error).strip().splitlines()[0]) from error
    return str(context.dashboard_url or "")
