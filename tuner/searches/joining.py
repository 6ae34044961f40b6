"""The address of a Ray cluster and its token, as far as they are checked without Ray.

Ray tries for up to a minute to reach an address, and says little about why it can't.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from tuner.core.errors import InputError, UnavailableError

TIMEOUT_S = 2.0
"""A server that is silent for this long is none of Ray's."""

AT_IMPORT_OF_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its own cluster listens on loopback only
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers import from where this process does
}
"""Settings that Ray reads while it is imported, for a cluster of its own."""

GCS_PORT, CLIENT_PORT, DASHBOARD_PORT = 6379, 10001, 8265
"""Ports on which a head node listens by default (Ray, "Configuring Ray", ports)."""

AUTO = "auto"

_PORTS = {"": None, "ray": CLIENT_PORT, "http": 80, "https": 443}
"""The default ports of schemes of addresses."""

_GCS, _CLIENT = "NodeInfoGcsService/CheckAlive", "RayletDriver/KVExists"
"""Methods of Ray's services for nodes and for clients. They are asked without arguments."""


def checked_address(address: str) -> str:
    """The address, if a server of Ray that a search can join answers there.

    "auto" is the address that RAY_ADDRESS names, or stays what Ray finds on this machine. Raises
    `UnavailableError` with what answers there and what to do, and `InputError` for no address.
    """
    if address == AUTO and (address := os.environ.get("RAY_ADDRESS", AUTO)) == AUTO:
        return address
    target = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = target.hostname, target.port or _PORTS.get(target.scheme)
    except ValueError:  # the port is not a number
        host, port = None, None
    if host is None or port is None or target.scheme not in _PORTS:
        raise InputError(
            f"{address!r} is not the address of a Ray cluster",
            hint=f"write HOST:{GCS_PORT}, ray://HOST:{CLIENT_PORT}, or auto for the cluster of "
            "this machine",
        )
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        why = f"nothing answers on port {port} of {host} ({error.strerror or error})"
        raise _no_cluster(address, why) from error
    secure = os.environ.get("RAY_USE_TLS", "0") != "0"  # then only Ray itself can ask
    if target.scheme in ("http", "https") or (not secure and _speaks_http(host, port)):
        base = f"{target.scheme or 'http'}://{host}:{port}"
        text = f"{address!r} is the address of a web server, such as Ray's dashboard"
        raise UnavailableError(text, hint=_job(base))
    if not secure:
        _check_service(address, host, port)
    return address


def _check_service(address: str, host: str, port: int) -> None:
    """Raise unless the server has the service for nodes, or for clients of Ray."""
    wanted, other = (_CLIENT, _GCS) if address.startswith("ray:") else (_GCS, _CLIENT)
    said = _answer(host, port, wanted)
    if said == "UNAUTHENTICATED":
        raise no_token(address)
    if said != "UNIMPLEMENTED":
        if said in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            why = f"what answers on port {port} of {host} is no server of Ray"
            raise _no_cluster(address, why)
        return
    if _answer(host, port, other) != "UNIMPLEMENTED":
        right = f"{host}:{port}" if other == _GCS else f"ray://{host}:{port}"
        of = "nodes" if other == _GCS else "clients"
        raise UnavailableError(
            f"port {port} of {host} is that of Ray for {of}, and {address!r} is no address of it",
            hint=f"--address {right}",
        )
    raise _no_cluster(address, f"port {port} of {host} is of another server of Ray's")


def _answer(host: str, port: int, method: str) -> str:
    """The name of the gRPC status of the answer to an empty request; OK if it cannot be asked."""
    try:
        import grpc  # comes with ray[default]
    except ImportError:
        return "OK"
    token = _token()
    with grpc.insecure_channel(
        f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        call = channel.unary_unary(f"/ray.rpc.{method}")
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            call(b"", timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _speaks_http(host: str, port: int) -> bool:
    """True for a server of HTTP/1, as Ray's dashboard is and its other servers are not."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/api/version")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def not_joined(address: str, why: str) -> UnavailableError:
    """The error where Ray does not join the cluster at an address that answers."""
    if address == AUTO:
        return UnavailableError(
            "no Ray cluster runs on this machine",
            hint=f"start one with `ray start --head`, name another with --address HOST:{GCS_PORT}, "
            "or leave --address out",
        )
    host = urlsplit(address if "://" in address else f"//{address}").hostname
    return UnavailableError(
        f"the Ray cluster at {address!r} can't be joined from this machine: {why}",
        hint=f"a machine that is no node of it uses --address ray://{host}:{CLIENT_PORT}, or "
        f"{_job(f'http://{host}:{DASHBOARD_PORT}')}",
    )


def no_token(address: str) -> UnavailableError:
    """The error where the cluster asks for another token."""
    return UnavailableError(
        f"the token for the Ray cluster at {address!r} is missing or wrong",
        # With an address, Ray looks for a token only in these ways (docs/cluster.md).
        hint="set RAY_AUTH_MODE=token, and put its token into ~/.ray/auth_token or "
        "RAY_AUTH_TOKEN; `ray get-auth-token` on its head node prints it",
    )


def _job(dashboard: str) -> str:
    return (
        f"`ray job submit --address {dashboard} --` in front of this command, with --address "
        "auto, runs the search on its cluster"
    )


def _no_cluster(address: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"no Ray cluster answers at {address!r}: {why}",
        hint=f"`ray status` on the head node says whether it runs; usual addresses are "
        f"HOST:{GCS_PORT}, ray://HOST:{CLIENT_PORT}, and http://HOST:{DASHBOARD_PORT} for "
        "`ray job submit`",
    )


# -- tokens -----------------------------------------------------------------------------------

TOKEN_BYTES = 32
"""Length of a token; Ray uses the same."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def _token() -> str:
    """The token with which Ray enters clusters; empty without one, or if it uses none."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if named := os.environ.get("RAY_AUTH_TOKEN"):
        return named
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or default_path()
    try:
        return Path(path).read_text().strip() if path else ""
    except (OSError, ValueError):
        return ""


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
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if path is None or named or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
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
