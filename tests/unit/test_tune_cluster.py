"""Connecting to Ray, as far as it goes without one."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tuner.core import files as scratch
from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import OWNER, scratch_folder
from tuner.searches import joining
from tuner.searches.joining import TOKEN_BYTES, checked_address, keep_private
from tuner.searches.options import SearchOptions
from tuner.searches.ray import cluster
from tuner.searches.ray.cluster import connected, cpus_for, quiet


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("127.0.0.1:1", UnavailableError, "at '127.0.0.1:1': nothing answers on port 1 of 127"),
        ("ray://127.0.0.1:1", UnavailableError, "nothing answers on port 1"),
        ("nonsense", InputError, "'nonsense' is not the address"),
        ("host:port", InputError, "'host:port' is not the address"),
        ("ftp://host:21", InputError, "is not the address"),
    ],
)
def test_address_without_a_cluster_is_said_at_once(address, error, message):
    with pytest.raises(error, match=message), connected(SearchOptions(address=address), cpus=1):
        pass


@contextlib.contextmanager
def listening(said: bytes) -> Iterator[str]:
    """The address of a server that sends `said` to each peer, and nothing more."""
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


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 64])
def test_a_server_that_is_no_cluster_is_refused_before_ray_waits_for_it(monkeypatch, said):
    monkeypatch.setattr(joining, "TIMEOUT_S", 0.2)
    with (
        listening(said) as address,
        pytest.raises(UnavailableError, match="no Ray cluster answers"),
    ):
        checked_address(address)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_address_of_a_dashboard_says_how_a_job_is_submitted_there(monkeypatch, scheme):
    monkeypatch.setattr(joining, "TIMEOUT_S", 2.0)
    with (
        listening(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n") as address,
        pytest.raises(UnavailableError, match="Ray's dashboard") as raised,
    ):
        checked_address(f"{scheme}{address}")
    assert f"`ray job submit --address http://{address} --` in front" in raised.value.hint


class Answers(grpc.GenericRpcHandler):
    """A server of gRPC that has one method, and asks for a token."""

    def __init__(self, method: str, token: str) -> None:
        self.method, self.token = f"/ray.rpc.{method}", token

    def service(self, details):
        if details.method != self.method:
            return None

        def answer(request, context):
            if dict(context.invocation_metadata()).get("authorization") != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize(
    ("method", "scheme", "token", "said"),
    [
        ("NodeInfoGcsService/CheckAlive", "", "right", None),
        ("RayletDriver/KVExists", "ray://", "right", None),
        ("NodeInfoGcsService/CheckAlive", "", "wrong", "the token for the Ray cluster at"),
        ("RayletDriver/KVExists", "", "right", "hint: --address ray://127.0.0.1:"),
        ("NodeInfoGcsService/CheckAlive", "ray://", "right", "hint: --address 127.0.0.1:"),
        ("NodeManagerService/Other", "", "right", "is of another server of Ray's"),
    ],
)
def test_each_port_of_ray_is_told_by_its_service(monkeypatch, method, scheme, token, said):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Answers(method, "right")])
    address = f"{scheme}127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        if said is None:
            assert checked_address(address) == address
            return
        with pytest.raises(UnavailableError) as raised:
            checked_address(address)
        assert said in str(raised.value)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("mode", "told"),
    [("token", "dashboard: http://localhost:8265 (`ray get-auth-token` prints the token that"),
     ("disabled", "dashboard: http://localhost:8265")],
)  # fmt: skip
def test_the_dashboard_is_told_with_its_token(monkeypatch, mode, told):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(cluster, "_start", lambda *_: "localhost:8265")
    said = []
    with connected(SearchOptions(dashboard=True), cpus=1, tell=said.append):
        assert len(said) == 1
        assert said[0].startswith(told)
        assert ("token" in said[0]) == (mode == "token")


def test_a_dashboard_that_fails_ends_no_search(monkeypatch):
    def start(folder, cpus, gpus, options, tell) -> str:
        if options.dashboard:
            raise RuntimeError("Failed to start the dashboard\nlog")
        return ""

    monkeypatch.setattr(cluster, "_start", start)
    said = []
    with connected(SearchOptions(dashboard=True), cpus=1, tell=said.append):
        assert said == ["warning: no dashboard: Failed to start the dashboard"]


def test_a_start_that_fails_is_tried_again_and_then_said(monkeypatch):
    tries = []

    def start(*_) -> str:
        tries.append(1)
        raise RuntimeError("Timed out waiting for file gcs_server_port")

    monkeypatch.setattr(cluster, "_start", start)
    with pytest.raises(UnavailableError, match="3 times: Timed out") as raised:
        cluster.connected(SearchOptions(), cpus=1).__enter__()
    assert (len(tries), "--workers" in raised.value.hint) == (cluster.STARTS, True)


def test_what_threads_of_ray_print_is_left_out(capsys):
    with quiet():
        thread = threading.Thread(target=print, args=("pages",), name="ray_listen_error_messages")
        thread.start()
        thread.join()
        print("ours")
    assert capsys.readouterr().out == "ours\n"


def test_silence_ends_with_the_block():
    before = dict(os.environ)
    with quiet():
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert dict(os.environ) == before


def test_scratch_folder_is_private_short_and_removed(tmp_path, monkeypatch):
    (deep := tmp_path / ("d" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with scratch_folder() as folder:
        assert len(str(folder)) < 40
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "log").write_text("x")
    assert not folder.exists()
    assert not list(Path(deep).iterdir())


OWNER_OF_ONE = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from tuner.core import files as scratch
scratch.SOCKET_ROOM = 0
with scratch.scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folder_of_a_killed_search_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "SOCKET_ROOM", 0)
    (tmp_path / "tuner-of-something-else").mkdir()
    (planted := tmp_path / "tuner-planted").mkdir()
    (planted / OWNER).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").touch()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER_OF_ONE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with owner:
        folder = Path(owner.stdout.readline().strip())
        (folder / "log").write_text("x")
        with scratch_folder():
            assert folder.exists()  # its search still runs
        owner.kill()
    with scratch_folder() as own:
        kept = {"tuner-of-something-else", "tuner-planted", "precious", own.name}
        assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(("concurrent", "cpus_each", "cpus"), [(3, 1.0, 3), (3, 0.5, 2), (2, 0, 1)])
def test_cluster_has_room_for_the_trials_asked_for(concurrent, cpus_each, cpus):
    assert cpus_for(concurrent, {"CPU": cpus_each}) == cpus


# -- the token of Ray clusters of this machine ------------------------------------------------


@pytest.fixture
def token(tmp_path, monkeypatch) -> Path:
    """Where it is to be; everything that is made is for all to read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0)
    yield tmp_path / ".ray" / "auth_token"
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat(follow_symlinks=False).st_mode)


def test_it_is_made_before_ray_makes_a_wider_one(token):
    assert keep_private() == ""
    assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    text = token.read_text()
    assert len(bytes.fromhex(text)) == TOKEN_BYTES
    assert keep_private() == ""
    assert token.read_text() == text
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_wider_one_is_narrowed_and_that_is_said(token):
    token.parent.mkdir()
    token.write_text("a" * 64)
    assert "could be read by other users" in keep_private()
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)
    assert keep_private() == ""


def test_a_link_in_its_place_is_refused_and_not_followed(token, tmp_path):
    token.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    token.symlink_to(victim)
    with pytest.raises(UnavailableError, match="no file of yours"):
        keep_private()
    assert (mode(victim), victim.read_text()) == (0o666, "theirs")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "ab"), ("RAY_AUTH_TOKEN_PATH", "/a")],
)
def test_what_the_environment_says_stands(token, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert keep_private() == ""
    assert not token.parent.exists()
