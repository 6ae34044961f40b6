"""All of Ray's private parts that are used, and why: nothing public does the same.

Tested with Ray 2.60. Another version may have moved them: then an import fails here, or a test of
`tests/test_local_ray.py` or `tests/test_tune_search.py`, and no search that runs already.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import ray.util
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray.air.execution.resources import placement_group
from ray.experimental.internal_kv import _internal_kv_get

RAYLET, GCS_SERVER = ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER

_PRINT_OF_NODES = "print_to_stdstream"

_AUTOSCALER_STATUS = "__autoscaling_status"
"""Key under which the monitor of Ray's first autoscaler reports; the second has a service."""


@contextlib.contextmanager
def nodes_not_printed() -> Iterator[None]:
    """What befalls Ray's nodes and workers is not printed inside.

    Ray prints it on this process's stdout, with whole pages of their logs, and `log_to_driver` does
    not keep it from that. A search says in its answer what matters.
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
    """The processes of a cluster that is started inside listen on the loopback address alone.

    So Ray does by itself on macOS and Windows. It asks a constant of its own for that, and has no
    argument for it: an address of localhost is replaced by the one that other machines see.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def placement_groups_left(leaving: Callable[[], bool]) -> Iterator[None]:
    """Ray Tune removes no placement group inside once `leaving` says so.

    It asks the GCS to, wherever an actor ends or its own objects are collected. With the GCS gone
    that call waits until Ray ends this process, and a cluster that is shut down has none left.
    """
    remove = placement_group.remove_placement_group

    def remove_or_leave(group: Any) -> None:
        if not leaving():
            remove(group)

    name = "remove_placement_group"  # it is called by both of its names
    with (
        mock.patch.object(placement_group, name, remove_or_leave),
        mock.patch.object(ray.util, name, remove_or_leave),
    ):
        yield


class _OwnGroupPopen(services.ConsolePopen):  # type: ignore[misc] # Ray has no types
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, process_group=0)


@contextlib.contextmanager
def in_own_groups() -> Iterator[None]:
    """The processes of a cluster that is started inside have process groups of their own.

    Schedulers, `timeout` and terminals send their signals to whole groups: the search is to hear
    them, and to end Ray afterwards. Ray itself only keeps SIGINT from its processes.
    """
    before = services.ConsolePopen
    services.ConsolePopen = _OwnGroupPopen
    try:
        yield
    finally:
        services.ConsolePopen = before


def node_here() -> Node | None:
    """The node that this process started or joined; None without one.

    Its processes are asked whether they live: Ray says nothing before it ends this process.
    """
    return worker._global_node


def nodes_in(error: BaseException) -> Iterator[Node]:
    """The nodes that did not come up: Ray keeps them nowhere but in the error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            yield node


def use_actor_cache(tune_controller: Any, cache: Any) -> None:
    """Let Ray Tune keep idle workers in `cache`; its own ends them too early. See `WorkerCache`."""
    controller = getattr(tune_controller, "_tune_controller", tune_controller)
    if hasattr(controller, "_actor_cache"):  # else Ray's own will do
        controller._actor_cache = cache


def autoscaler_status() -> bytes | None:
    """What the monitor of Ray's first autoscaler reports, as JSON; None where none runs."""
    return _internal_kv_get(_AUTOSCALER_STATUS)  # type: ignore[no-any-return]
