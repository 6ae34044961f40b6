"""All uses of Ray's private parts, with the reasons: no public part does the same.

Tested with Ray 2.60. If another version has moved them, an import fails here, or a test of
`tests/test_local_ray.py` or `tests/test_tune_search.py`, but no running search.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import ray
import ray.util
from ray._private import ray_constants, services, worker
from ray._private import utils as ray_utils
from ray._private.node import Node
from ray.air.execution.resources import placement_group
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.job_config import JobConfig

from tuner.core.environment import this_python
from tuner.core.errors import TunerError, UnavailableError

RAYLET, GCS_SERVER = ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER

_PRINT_OF_NODES = "print_to_stdstream"

_AUTOSCALER_STATUS = "__autoscaling_status"
"""Key of the status of Ray's first autoscaler; the second autoscaler has a service."""


@contextlib.contextmanager
def nodes_not_printed() -> Iterator[None]:
    """Keep Ray from printing events of its nodes and workers inside the block.

    Ray prints them to this process's stdout, with whole pages of logs, even without
    `log_to_driver`. The result of a search contains what the user needs to know.
    """
    printed = getattr(worker, _PRINT_OF_NODES, None)
    if printed is not None:
        setattr(worker, _PRINT_OF_NODES, lambda *args, **named: None)
    try:
        yield
    finally:
        if printed is not None:
            setattr(worker, _PRINT_OF_NODES, printed)


@contextlib.contextmanager
def on_localhost() -> Iterator[None]:
    """Let processes of a cluster that starts inside listen on the loopback address only.

    Ray does so itself on macOS and Windows. Only a constant controls this, and no argument: Ray
    replaces an address of localhost by the one that other machines see.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def same_modules() -> Iterator[None]:
    """Let workers of a connection that is made inside import from where this process does.

    Ray adds the current folder, before all others, and under `uv run` a copy of it.
    """
    serialized = JobConfig._serialize

    def without_folder(job: JobConfig) -> Any:
        here = Path.cwd()
        if here not in map(Path.absolute, map(Path, sys.path)):
            job._py_driver_sys_path = [p for p in job._py_driver_sys_path if Path(p) != here]
        return serialized(job)

    with (
        mock.patch.object(JobConfig, "_serialize", without_folder),
        mock.patch.object(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False),
    ):
        yield


@contextlib.contextmanager
def placement_groups_left(leaving: Callable[[], bool]) -> Iterator[None]:
    """Keep Ray Tune from removing placement groups inside once `leaving` returns True.

    It calls the GCS for that whenever an actor ends or its own objects are collected. If the GCS is
    lost, the call blocks until Ray ends this process. A cluster that is shut down needs no removal.
    """
    remove = placement_group.remove_placement_group

    def remove_or_leave(group: Any) -> None:
        if not leaving():
            remove(group)

    name = "remove_placement_group"  # Ray calls it by both names
    with (
        mock.patch.object(placement_group, name, remove_or_leave),
        mock.patch.object(ray.util, name, remove_or_leave),
    ):
        yield


class _OwnGroupPopen(services.ConsolePopen):  # type: ignore[misc] # Ray has no types
    def __init__(self, command: Sequence[str], *args: Any, **kwargs: Any) -> None:
        if command[0] == this_python():  # -P: the dashboard's helpers look in the current folder
            command = [command[0], "-P", *command[1:]]
        super().__init__(command, *args, **kwargs, process_group=0)


@contextlib.contextmanager
def in_own_groups() -> Iterator[None]:
    """Give processes of a cluster that starts inside process groups of their own.

    Schedulers, `timeout` and terminals send their signals to whole groups, but only the search
    should receive them, and then end Ray. Ray itself keeps only SIGINT from its processes.
    """
    before = services.ConsolePopen
    services.ConsolePopen = _OwnGroupPopen
    try:
        yield
    finally:
        services.ConsolePopen = before


@contextlib.contextmanager
def few_helpers(*, watched: bool) -> Iterator[None]:
    """Start no autoscaler and log monitor for a cluster that starts inside, which needs none.

    Unless it is `watched`, it gets no dashboard either, and an agent without it. They take as much
    processor time as importing torch, and Ray has no option for that.
    """
    with contextlib.ExitStack() as stack:
        for name in ("start_monitor", "start_log_monitor"):
            stack.enter_context(mock.patch.object(Node, name))
        if not watched:
            stack.enter_context(mock.patch.object(Node, "start_api_server"))
            missing = mock.patch.object(ray_utils, "get_dashboard_dependency_error")
            stack.enter_context(missing).return_value = ImportError("not watched")
        yield


def no_dashboard() -> ImportError | None:
    """The library that Ray's dashboard lacks; None without one."""
    error: ImportError | None = ray_utils.get_dashboard_dependency_error()
    return error


def node_here() -> Node | None:
    """The node that this process started or joined; None without one.

    It is used to check that its processes live: Ray gives no warning before it ends this process.
    """
    return worker._global_node


def use_actor_cache(tune_controller: Any, cache: Any) -> None:
    """Let Ray Tune keep idle workers in `cache`, because its own ends them too early."""
    controller = getattr(tune_controller, "_tune_controller", tune_controller)
    if hasattr(controller, "_actor_cache"):  # else Ray's own cache stays
        controller._actor_cache = cache


STARTS = 2
"""Number of attempts to start Ray: a machine that is too busy is often free a minute later."""

LOOK_PERIOD_S = 0.5
"""Time between two checks that Ray's processes live."""
LAST_WORD_S = 8.0
"""Time after a loss when this process ends: a search that can react has ended by then, and Ray
has not yet ended this process."""

_TOO_SLOW = re.compile(r"timed out|failed to connect to gcs", re.IGNORECASE)
"""Texts of the errors of `ray.init` if a process of its cluster does not answer in time; they have
no class of their own (ray/_private/node.py, and the core worker's `RaySystemError`)."""

Started = TypeVar("Started")


def started(start: Callable[[], Started]) -> Started:
    """Start a cluster with `start` and return its result; try once more if Ray is too slow.

    Processes of a failed start are ended. Raises `UnavailableError` if Ray is too slow again.
    """
    for _ in range(STARTS):
        try:
            return start()
        except Exception as error:
            _end_rest(error)
            if not _TOO_SLOW.search(str(error)):
                raise
            said = str(error).strip().splitlines()[0]
    raise UnavailableError(
        f"Ray did not start on this machine within its time, {STARTS} times: {said}",
        hint="the machine is likely overloaded or short of memory: try again with fewer --workers "
        "or when it is less busy; --address uses a running cluster",
    )


def lost_process() -> str | None:
    """The kind of a Ray process on this machine that has ended; None without one.

    Checks the raylet and the GCS of a cluster that this process started, or the raylet of this node
    in a cluster that it joined.
    """
    node = node_here()
    if node is None:
        return None
    for kind in (RAYLET, GCS_SERVER):
        for entry in node.all_processes.get(kind, ()):
            if entry.process.poll() is not None:
                return str(kind)
    return str(RAYLET) if not is_own() and _refuses(node.raylet_socket_name) else None


def is_own() -> bool:
    """True if this process has started the Ray that it uses."""
    node = node_here()
    return node is not None and bool(node.all_processes)


class RayLostError(BaseException):
    """A Ray process is lost. It is no `Exception`, after which Ray Tune asks Ray to end its trials.

    Ending them would take longer than Ray leaves this process, or block until Ray ends it.
    """


def require_alive() -> None:
    """Raise `RayLostError` if a process that Ray needs is lost."""
    lost = lost_process()
    if lost is not None:
        raise RayLostError(f"its process {lost} has ended")


@contextlib.contextmanager
def losses_said() -> Iterator[None]:
    """Turn errors inside the block into `UnavailableError` if Ray itself is lost.

    A Ray call that waits for a lost process never returns. This process is then ended, as Ray would
    do, but with the error message and its exit code.
    """
    over = threading.Event()
    threading.Thread(target=_last_word, args=(over,), daemon=True).start()
    try:
        yield
    except RayLostError as error:
        raise lost_ray(str(error)) from error
    except TunerError:
        raise
    except Exception as error:
        lost = lost_process()
        if lost is not None:
            raise lost_ray(f"its process {lost} has ended") from error
        if isinstance(error, RayError | ConnectionError):
            raise lost_ray(str(error).strip().splitlines()[0]) from error
        raise
    finally:
        over.set()


def _last_word(over: threading.Event) -> None:
    """End this process if the search goes on for `LAST_WORD_S` after a loss."""
    seen_s: float | None = None
    while not over.wait(LOOK_PERIOD_S):
        lost = lost_process()
        if lost is None:
            seen_s = None
            continue
        now_s = time.monotonic()
        seen_s = now_s if seen_s is None else seen_s
        if now_s - seen_s >= LAST_WORD_S:
            error = lost_ray(f"its process {lost} has ended")
            os.write(2, f"error: {error}\n".encode())
            os._exit(error.exit_code)


def lost_ray(what: str) -> UnavailableError:
    """The error for the loss of Ray during a search."""
    return UnavailableError(
        f"Ray on this machine was lost during the search: {what}",
        hint="every finished trial is in the journal, and the same command goes on from there; if "
        "this happens again, check whether memory ran out (`dmesg`), and use fewer --workers",
    )


def _refuses(path: str) -> bool:
    """True if the Unix socket refuses connections; a slow listener does not refuse."""
    if not path.startswith("/"):  # no Unix socket
        return False
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def _end_rest(error: Exception) -> None:
    """End the processes of nodes that failed to start: Ray keeps these only in the traceback."""
    ray.shutdown()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, wait=True)


NODE_AS_TYPE = re.compile("node_[0-9a-f]{20,}")


def grows() -> bool:
    """True if the connected cluster starts nodes on demand.

    Ray's monitor reports the types of the running nodes. Without an autoscaler, each node has its
    own type, named after its id.
    """
    status = _internal_kv_get(_AUTOSCALER_STATUS)
    if status is not None:
        report = json.loads(status).get("autoscaler_report") or {}
        types = {*(report.get("active_nodes") or ()), *(report.get("idle_nodes") or ())}
    else:
        found = get_cluster_status(ray.get_runtime_context().gcs_address)
        nodes = [*found.active_nodes, *found.idle_nodes]
        types = {node.ray_node_type_name for node in nodes if node.ray_node_type_name}
    return any(not NODE_AS_TYPE.fullmatch(name) for name in types)
