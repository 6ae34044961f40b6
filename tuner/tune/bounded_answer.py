"""Answers of an HTTP server that may be anybody's: neither without end nor for ever."""

from __future__ import annotations

import io
import time
from typing import Any

import requests
import urllib3

from tuner.errors import UnavailableError

CONNECT_TIMEOUT_S = 5.0

SILENCE_S = 15.0
"""Between two pieces of an answer, and before the first; the head node may be busy."""

LEAST_BYTES_PER_S = 20_000
"""Of an answer that takes longer than `SILENCE_S`: one byte now and then is none."""

MAX_ANSWER_BYTES = 400 << 20
"""The files of a job as text (`tuner.engine.job_files.MAX_BYTES`) and what is around them."""

_PIECE_BYTES = 1 << 20


def read_bounded(response: requests.Response, *_: object, **__: object) -> None:
    """Read the body of `response`. Raises `UnavailableError` where it is too slow or too long."""
    began_s, size = time.monotonic(), 0
    body = io.BytesIO()
    try:
        while piece := response.raw.read1(_PIECE_BYTES, decode_content=True):
            size += body.write(piece)
            if size > MAX_ANSWER_BYTES:
                raise _unusable(response, f"more than {MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() - began_s > SILENCE_S + size / LEAST_BYTES_PER_S:
                raise _unusable(response, f"{size} bytes in {time.monotonic() - began_s:.0f} s")
    except urllib3.exceptions.HTTPError as error:
        raise requests.exceptions.ConnectionError(str(error)) from error
    finally:
        response.raw.close()
    body.seek(0)
    response.raw = body
    response.encoding = "utf-8"  # guessing takes minutes for a long one


OPTIONS: dict[str, Any] = {
    "timeout": (CONNECT_TIMEOUT_S, SILENCE_S),
    "stream": True,
    "hooks": {"response": read_bounded},
}
"""What `requests.request` is told for such an answer."""


def _unusable(response: requests.Response, what: str) -> UnavailableError:
    return UnavailableError(
        f"{response.url} answers with {what}, which no job server does",
        hint="is this the address of the cluster's dashboard?",
    )
