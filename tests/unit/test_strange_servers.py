"""Servers that are none, or mean ill: an answer comes in time, and it is an error for people."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tuner.errors import UnavailableError
from tuner.tune import bounded_answer, cluster
from tuner.tune.cluster import connected
from tuner.tune.jobs import connect

VERSION = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}
JOB = {
    "type": "SUBMISSION", "submission_id": "x-1", "job_id": None, "entrypoint": "x",
    "status": "SUCCEEDED", "message": "", "metadata": {"tuner": "search"}, "start_time": 1,
    "end_time": 2, "runtime_env": {}, "driver_exit_code": 0,
}  # fmt: skip


@contextlib.contextmanager
def serving(answer: Callable[[str], bytes], over: threading.Event | None = None) -> Iterator[str]:
    """The URL of a server that answers with this; it then waits for `over`, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer(self.path))
            self.wfile.flush()
            if over is not None:
                over.wait(60)

        def log_message(self, *words: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        if over is not None:
            over.set()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def listening(said: bytes = b"") -> Iterator[str]:
    """The address of what says this to everybody who connects, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    peer, _ = server.accept()
                    kept.append(peer)
                    peer.sendall(said)

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for peer in kept:
            peer.close()


@pytest.fixture
def impatient(monkeypatch):
    """All waiting is short."""
    monkeypatch.setitem(bounded_answer.OPTIONS, "timeout", (5.0, 0.2))
    monkeypatch.setattr(bounded_answer, "SILENCE_S", 0.2)
    monkeypatch.setattr(cluster, "JOIN_TIMEOUT_S", 0.2)


def test_a_silent_port_is_no_job_server(impatient):
    with listening() as address, pytest.raises(UnavailableError, match="no Ray job server"):
        connect(address)


def test_an_answer_that_never_ends_is_given_up(impatient):
    over = threading.Event()
    with (
        serving(lambda path: b" ", over) as url,
        pytest.raises(UnavailableError, match="no Ray job server"),
    ):
        connect(url)


def test_an_answer_without_a_limit_is_given_up(monkeypatch):
    monkeypatch.setattr(bounded_answer, "MAX_ANSWER_BYTES", 1 << 20)
    with (
        serving(lambda path: b"[" * (3 << 20)) as url,
        pytest.raises(UnavailableError, match="more than 1 MiB"),
    ):
        connect(url)


@pytest.mark.parametrize("said", [b"null", b"[]", b"7", b"<html>", b"", b"[" * 100_000, b"\xff"])
def test_what_is_no_version_is_one_error(said):
    with serving(lambda path: said) as url, pytest.raises(UnavailableError):
        connect(url)


@pytest.mark.parametrize(
    "jobs",
    [
        {"a": 1}, [7], [{}], [JOB | {"status": "EVIL"}], [JOB | {"start_time": 10**30}],
        [JOB | {"start_time": "soon"}], [JOB | {"metadata": ["tuner"]}], None,
    ],
)  # fmt: skip
def test_what_are_no_jobs_is_one_error(jobs):
    def answer(path: str) -> bytes:
        return json.dumps(VERSION if path.endswith("version") else jobs).encode()

    with serving(answer) as url:
        server = connect(url)
        with pytest.raises(UnavailableError, match="is no job server of Ray"):
            server.jobs()


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 64])
def test_what_is_no_cluster_is_said_before_ray_waits_for_it(impatient, said):
    with (
        listening(said) as address,
        pytest.raises(UnavailableError, match="no Ray cluster answers"),
        connected(address, cpus=1),
    ):
        pass
