"""The way to a cluster's job server: its address, the token that it asks for, who answers.

A client of what Ray opens already, its dashboard's HTTP port: nothing listens here. Where Ray asks
for a token, the one that Ray itself would use is sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from tuner.errors import InputError, UnavailableError
from tuner.meanwhile import environment, log_level
from tuner.tune.bounded_answer import CONNECT_TIMEOUT_S
from tuner.tune.ray_private import PACKAGING_LOGGER, BoundedJobClient
from tuner.tune.ray_token import default_path

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
"""Where `ray start --head` puts its dashboard, and where a tunnel to one usually ends."""

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"

_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    PACKAGING_LOGGER,
)


def client_of(address: str | None) -> tuple[JobSubmissionClient, str]:
    """A client of the job server at `address`, and its URL; without an address, of the usual one.

    Raises `InputError` for what is no address, `UnavailableError` where no job server answers, and
    where it asks for a token and there is none, or another one.
    """
    url = url_of(address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS)
    _check_answer(url)
    token = auth_token(urlsplit(url).hostname)
    headers = {"Authorization": f"Bearer {token}"} if token else None
    with said(url), _address_variable(url), silent():
        return BoundedJobClient(url, headers=headers), url


def url_of(address: str) -> str:
    """`address` as a URL. Raises `InputError` for what is none."""
    text = DEFAULT_ADDRESS if address == "auto" else address
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:  # the port is not a number
        usable = False
    if not usable or parts.username or parts.query or parts.fragment:
        raise InputError(
            f"{address!r} is not the address of a Ray job server",
            hint="write http://HOST:8265, where the dashboard of the cluster is",
        )
    return text


def auth_token(host: str | None) -> str | None:
    """The token to send to `host`; None where there is none, or RAY_AUTH_MODE is "disabled".

    Looked for where Ray's documentation says: RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH
    names, ~/.ray/auth_token. The last one Ray makes by itself for clusters of this machine: it goes
    to this machine only (a tunnel begins there), and elsewhere where RAY_AUTH_MODE is "token".

    Raises `UnavailableError` where RAY_AUTH_MODE is "token" and there is none, and for a named file
    that cannot be read or is empty.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return _token_in(Path(named))
    usual = default_path()
    if usual is not None and usual.is_file() and (mode == "token" or _is_here(host)):
        return _token_in(usual)
    if mode == "token":
        raise UnavailableError("RAY_AUTH_MODE is token, and there is no token", hint=_WHERE)
    return None


def _is_here(host: str | None) -> bool:
    """Whether a host's name or address is this machine's own, which no other machine can be."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        return False


_WHERE = (
    "put the cluster's token (`ray get-auth-token` on its head node) into RAY_AUTH_TOKEN, or into "
    "~/.ray/auth_token; with RAY_AUTH_MODE=token it goes to other machines too"
)


def _token_in(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnavailableError(f"cannot read the token in {str(path)!r}", hint=_WHERE) from error
    if not token:
        raise UnavailableError(f"the file of the token, {str(path)!r}, is empty", hint=_WHERE)
    return token


def _check_answer(url: str) -> None:
    """Raise unless something listens there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    assert parts.hostname is not None
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        raise _no_server(url) from error


@contextlib.contextmanager
def said(url: str) -> Iterator[None]:
    """What the client raises of the connection, and of answers of no kind, said to the user."""
    try:
        yield
    except AuthenticationError as error:
        if "required" in str(error):
            raise UnavailableError(
                f"the cluster at {url} asks for a token, and there is none here", hint=_WHERE
            ) from error
        raise UnavailableError(
            f"the cluster at {url} has another token than this machine", hint=_WHERE
        ) from error
    except (TimeoutError, ConnectionError, requests.exceptions.RequestException) as error:
        raise _no_server(url) from error
    except ODD_ANSWERS as error:
        problem = " ".join(str(error).split())[:200]
        raise UnavailableError(
            f"what answers at {url} is no job server of Ray: {type(error).__name__}: {problem}",
            hint="is this the address of the cluster's dashboard, and its Ray the same as here?",
        ) from error


ODD_ANSWERS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What Ray's client raises where JSON has another form than a job server's; RecursionError is a
RuntimeError."""


def _no_server(url: str) -> UnavailableError:
    return UnavailableError(
        f"no Ray job server answers at {url}",
        hint="is the cluster running, and the way to its dashboard open? "
        "`ray dashboard cluster.yaml` or `kubectl port-forward` open one (docs/cluster.md)",
    )


def _address_variable(url: str) -> AbstractContextManager[None]:
    """RAY_API_SERVER_ADDRESS is `url` inside; Ray takes it before the address it is given."""
    return environment({ADDRESS_VARIABLE: url})


def silent() -> AbstractContextManager[None]:
    """Ray's client says nothing but errors inside."""
    return log_level(logging.ERROR, _LOGGERS)
