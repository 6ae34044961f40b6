"""The process that reads foreign tokenizers: it has little memory and no secrets.

A tokenizer's pattern can backtrack for years, its normalizer make terabytes of a word, and its chat
template count for ever. Nothing in Python stops a library that does so; another process can.

Run as `python -m tuner.space.models.tokenizer_process DESCRIPTOR`, with one end of a socket. It
carries JSON, so that whoever takes this process over has no way into the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from tuner.core.errors import InputError, TunerError, UnavailableError
from tuner.space.models.tokenizer import count, load_here, render

MAX_MEMORY_BYTES = 4 << 30
"""Limit for the whole process; the largest published tokenizers take half a GiB."""


def main() -> int:
    """Answer one process until it goes away."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    _limit_memory()
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - seconds, of no tokenizer

    loaded: dict[int, Any] = {}
    _say(connection, {"value": "ready"})
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            asked = json.loads(connection.recv_bytes())
            try:
                answer = {"value": _answer(loaded, **asked)}
            except TunerError as error:
                kind = "input" if isinstance(error, InputError) else "unavailable"
                answer = {"error": kind, "message": error.message, "hint": error.hint}
            except ValueError as error:  # of one text
                answer = {"error": "value", "message": str(error)}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is of the tokenizer
                answer = {
                    "error": "input",
                    "message": f"{type(error).__name__}: {str(error)[:200]}",
                }
            _say(connection, answer)
    return 0


def raised(answer: dict[str, Any]) -> Exception:
    """The exception that an answer with an error stands for."""
    if answer["error"] == "value":
        return ValueError(answer["message"])
    cls = InputError if answer["error"] == "input" else UnavailableError
    return cls(answer["message"], hint=answer.get("hint"))


def _answer(loaded: dict[int, Any], *, do: str, number: int, **how: Any) -> Any:
    if do == "load":
        os.chdir(how["folder"])  # names of folders are relative to the other's
        loaded[number] = load_here(how["name"])
        found = loaded[number]
        return {"has_chat_template": bool(found.chat_template), "tokens": len(found)}
    if do == "forget":
        loaded.pop(number, None)
        return None
    if do == "render":
        return render(loaded[number], **how)
    return count(loaded[number], **how)


def _say(connection: Connection[Any, Any], answer: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode("ascii"))


def _limit_memory() -> None:
    if sys.platform == "win32":
        return  # the limits of time hold there alone
    import resource  # POSIX only

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
