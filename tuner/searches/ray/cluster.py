"""Ray itself: a quiet private cluster for one search, or a connection to an existing one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError

from tuner.core.environment import DEVICE_ORDER
from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import RAY_FOLDER, scratch_folder
from tuner.core.meanwhile import environment, log_level
from tuner.searches.ray.private import (
    few_helpers,
    grows,
    in_own_groups,
    no_dashboard,
    nodes_not_printed,
    on_localhost,
    same_modules,
    started,
)
from tuner.searches.watch import LOCALHOST, Watch

OBJECT_STORE_BYTES = 100_000_000
"""Size of Ray's object store. Trials exchange a few kilobytes, and Ray's default is 30 % of the
host's memory."""

JOIN_TIMEOUT_S = 5.0

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

NOT_WATCHED = Watch()

METRICS_PERIOD_MS = 2000
"""Period at which processes of a private cluster report metrics; Ray's default is 10 s."""

QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A trial that exhausts the host's memory ends by itself; Ray would kill its supervisor.
    "RAY_memory_monitor_refresh_ms": "0",
    **DEVICE_ORDER,
    # The search has its own journal, progress and handling of Ctrl-C.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    # An actor that does not end, on a silent node, is killed after this time. Ray Tune then waits
    # 10 seconds for it; with a shorter time, it would do nothing else until they are over.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "11",
    # The states decide how many trials wait for a worker.
    "TUNE_MAX_PENDING_TRIALS_PG": "100000",
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Ray and Ray Tune from printing and from usage statistics inside the block."""
    with (
        nodes_not_printed(),
        environment(QUIET_ENVIRONMENT),
        log_level(logging.CRITICAL, ["ray.tune"]),
    ):
        yield


@contextlib.contextmanager
def connected(
    address: str | None,
    *,
    cpus: int,
    gpus: Sequence[int] = (),
    undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    watch: Watch = NOT_WATCHED,
) -> Iterator[None]:
    """Initialise Ray for the block, with the metrics and dashboard of `watch`.

    Uses the connection of this process if there is one; else joins the cluster at `address`;
    else starts a cluster with `cpus` CPUs and the GPUs of these indices, and at the end stops all
    its processes and removes its files. Ray starts and stops within `undisturbed()`. Raises
    `UnavailableError` if there is no cluster at `address` or Ray does not start in time, and
    `InputError` for an invalid address.
    """
    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        if address is None:
            folder = stack.enter_context(scratch_folder())
        stack.callback(_shut_down, undisturbed)
        with undisturbed(), same_modules():
            url = _started(folder, cpus, gpus, watch) if address is None else _join(address)
        _tell(watch, url)
        yield


def cpus_for(max_concurrent: int | None, resources_per_trial: Mapping[str, float]) -> int:
    """CPUs of a new cluster: those that concurrent trials need, else those of this process."""
    if max_concurrent is not None:
        return max(1, math.ceil(max_concurrent * resources_per_trial.get("CPU", 1.0)))
    # In a container, these are fewer than the machine's.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Offer:
    """The `resources` of a cluster by name, including the types of its GPUs.

    `grows` is True if it starts nodes for resources that no node has.
    """

    resources: Mapping[str, float]
    grows: bool = False


def offer(address: str) -> Offer:
    """The offer of the cluster at `address`.

    Raises `UnavailableError` if there is no cluster, and `InputError` for an invalid address.
    """
    with quiet(), connected(address, cpus=1):
        return Offer(dict(ray.cluster_resources()), grows())


def _started(folder: Path, cpus: int, gpus: Sequence[int], watch: Watch) -> str:
    """Start a cluster as `_start` does, without its dashboard if that fails."""
    try:
        return started(lambda: _start(folder, cpus, gpus, watch))
    except Exception as error:
        if not watch.dashboard:
            raise
        missing = no_dashboard()
        reason = f"{missing}; `pip install 'ray[default]'`" if missing else error
        watch.tell(f"warning: no dashboard: {str(reason).strip().splitlines()[0]}")
    return started(lambda: _start(folder, cpus, gpus, replace(watch, dashboard=False)))


def _start(folder: Path, cpus: int, gpus: Sequence[int], watch: Watch) -> str:
    """Start a cluster on this machine; return the address of its dashboard, or ""."""
    if said := keep_private():
        watch.tell(said)
    watched = watch.dashboard or watch.metrics
    with _visible(gpus), on_localhost(), in_own_groups(), few_helpers(watched=watched):
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=len(gpus),
            include_dashboard=watch.dashboard,
            dashboard_host=LOCALHOST,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Ray makes its folder writable for all users, so it is inside a private folder.
            _temp_dir=str(folder / RAY_FOLDER),
            _metrics_export_port=watch.metrics_port or None,
            # Collecting metrics takes processor time from trials.
            _system_config={
                "enable_metrics_collection": watch.metrics,
                "metrics_report_interval_ms": METRICS_PERIOD_MS,
            },
        )
    return str(context.dashboard_url or "")


def _tell(watch: Watch, dashboard: str) -> None:
    """Tell the addresses of the dashboard and the metrics of the connected cluster."""
    if watch.dashboard and dashboard:
        has_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
        token = " (`ray get-auth-token` prints the token that it asks for)" if has_token else ""
        watch.tell(f"dashboard: http://{dashboard}{token}")
    if watch.metrics_port is not None:
        (node,) = ray.nodes()
        watch.tell(f"metrics: http://{LOCALHOST}:{node['MetricsExportPort']}/metrics")


@contextlib.contextmanager
def _visible(gpus: Sequence[int]) -> Iterator[None]:
    """Let processes started inside see only these GPUs, indexed among those of this process."""
    before = os.environ.get(VISIBLE_DEVICES)
    if gpus:
        seen = before.split(",") if before else None
        names = [seen[index] if seen else str(index) for index in gpus]
        os.environ[VISIBLE_DEVICES] = ",".join(names)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE_DEVICES] = before
        elif gpus:
            del os.environ[VISIBLE_DEVICES]


def _shut_down(undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
    with undisturbed():
        ray.shutdown()


def _join(address: str) -> str:
    """Join the cluster; return the address of its dashboard, or ""."""
    if address != "auto":
        _check_answer(address)
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise UnavailableError(
            f"the token for the Ray cluster at {address!r} is missing or wrong",
            hint=_HOW_TO_ENTER,
        ) from error
    except ConnectionError as error:
        # Something listens there. Ray does not tell whether the token was refused.
        raise _no_cluster(
            address, more=f"; for a cluster that asks for a token, {_HOW_TO_ENTER}"
        ) from error
    return str(context.dashboard_url or "")


def _check_answer(address: str) -> None:
    """Raise unless a server at the address speaks Ray's protocol; Ray would try for minutes."""
    target = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = target.hostname, target.port
    except ValueError:  # the port is not a number
        host, port = None, None
    if host is None or port is None:
        raise InputError(
            f"{address!r} is not the address of a Ray cluster",
            hint='write "HOST:PORT", or "auto" for the cluster of this machine',
        )
    try:
        with socket.create_connection((host, port), timeout=JOIN_TIMEOUT_S) as peer:
            # With TLS, the server sends nothing before the handshake.
            is_known = os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_http2(peer)
    except OSError as error:
        raise _no_cluster(address) from error
    if not is_known:
        raise _no_cluster(address)


def _speaks_http2(peer: socket.socket) -> bool:
    """True if the server begins with a SETTINGS frame, as every gRPC server does (RFC 9113)."""
    peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0]))
    peer.settimeout(JOIN_TIMEOUT_S)
    head = b""
    while len(head) < _FRAME_HEAD_BYTES:
        piece = peer.recv(_FRAME_HEAD_BYTES - len(head))
        if not piece:
            return False
        head += piece
    return head[3] == _SETTINGS and not any(head[5:])  # stream 0


_SETTINGS, _FRAME_HEAD_BYTES = 4, 9

_HOW_TO_ENTER = (
    "set RAY_AUTH_MODE=token, and put its token into ~/.ray/auth_token or RAY_AUTH_TOKEN"
)
"""With an address, Ray looks for a token only in these ways (docs/cluster.md)."""


def _no_cluster(address: str, *, more: str = "") -> UnavailableError:
    return UnavailableError(
        f"no Ray cluster answers at {address!r}",
        hint=f"start one with `ray start --head`, or leave the address out{more}",
    )


TOKEN_BYTES = 32
"""Length of a token; Ray uses the same."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def default_path() -> Path | None:
    """The file in which Ray keeps its token; None without a home directory."""
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:  # as in some containers
        return None


def keep_private() -> str:
    """Make the token if there is none; return a warning if others could read it, else "".

    Does nothing if the environment names another token or turns tokens off. Raises
    `UnavailableError` if the file is not the user's own.
    """
    path = default_path()
    if path is None or _is_settled():
        return ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
        found = path.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise UnavailableError(
                f"{str(path)!r} is no file of yours, and is to be the token of your Ray clusters",
                hint="move it away: a new one is made then",
            )
        if not found.st_mode & _OTHERS:
            return ""
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        raise UnavailableError(
            f"Ray needs a token in {str(path)!r}: {error.strerror or error}",
            hint="make it with `ray get-auth-token --generate`, or set RAY_AUTH_TOKEN",
        ) from error
    return (
        f"{path} could be read by other users of this machine, and no longer can: where they may "
        "have read it, remove it, and a new one is made"
    )


def _is_settled() -> bool:
    """True if the environment names a token, or turns tokens off."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"


def _make(path: Path) -> None:
    """Create a token at `path` atomically, unless something is there."""
    if os.path.lexists(path):
        return
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        with contextlib.suppress(FileExistsError):  # another search was first
            os.link(draft, path)
    finally:
        Path(draft).unlink()
