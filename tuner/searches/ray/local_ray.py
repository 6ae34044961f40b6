"""Ray's own processes on this machine: started once more where that took too long, and watched.

A raylet or a GCS that is gone takes its driver along: Ray ends the process itself, with code 1 and
without a word, some 14 s after a raylet was lost and 60 s after the GCS was (Ray 2.60).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import ray
from ray.exceptions import RayError

from tuner.core.errors import TunerError, UnavailableError
from tuner.searches.ray.ray_private import GCS_SERVER, RAYLET, node_here, nodes_in

STARTS = 2
"""A machine that was too busy once is often not so a minute later."""

LOOK_PERIOD_S = 0.5
"""Between two looks at whether Ray's processes live."""
LAST_WORD_S = 8.0
"""A search that could notice has long ended then, and Ray has not yet ended this process."""

_TOO_SLOW = re.compile(r"timed out|failed to connect to gcs", re.IGNORECASE)
"""In what `ray.init` raises where a process of its cluster does not answer in time: exceptions of
no class of their own (ray/_private/node.py, and the core worker's `RaySystemError`)."""

Started = TypeVar("Started")


def started(start: Callable[[], Started]) -> Started:
    """What `start` returns, which starts a cluster; tried once more where Ray was too slow.

    What a failed start left is ended. Raises `UnavailableError` where Ray is too slow again.
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
    """Which of Ray's processes on this machine has ended; None where none has, or none is known.

    Of a cluster of this process, raylet and GCS; of one that was joined, the raylet of this node.
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
    """Whether this process has started the Ray that it uses."""
    node = node_here()
    return node is not None and bool(node.all_processes)


class RayLostError(BaseException):
    """A process of Ray's is lost. No `Exception`: after one, Ray Tune asks Ray to end its trials.

    That takes longer than Ray leaves this process, or blocks until Ray ends it.
    """


def require_alive() -> None:
    """Raise `RayLostError` where a process is lost without which Ray cannot go on."""
    lost = lost_process()
    if lost is not None:
        raise RayLostError(f"its process {lost} has ended")


@contextlib.contextmanager
def losses_said() -> Iterator[None]:
    """What is raised inside is an `UnavailableError` where Ray itself is lost.

    A call of Ray's that waits for what is gone never returns: then the process ends here, as it
    would by Ray, but with the answer and its exit code.
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
    """End this process where a loss has not ended the search within `LAST_WORD_S`."""
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
    """The answer where Ray itself is lost under a search."""
    return UnavailableError(
        f"Ray on this machine was lost during the search: {what}",
        hint="every finished trial is in the journal, and the same command goes on from there; if "
        "this happens again, check whether memory ran out (`dmesg`), and use fewer --workers",
    )


def _refuses(path: str) -> bool:
    """Whether nobody listens at this socket any more; what is only slow does not refuse."""
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
    """End the processes of a node that did not come up."""
    ray.shutdown()
    for node in nodes_in(error):
        node.kill_all_processes(check_alive=False, wait=True)
