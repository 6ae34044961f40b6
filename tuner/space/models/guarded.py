"""Counts tokens in another process, which has limits of memory and time."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tuner.core.environment import search_path
from tuner.core.errors import InputError, UnavailableError
from tuner.space.models.tokenizer_process import MAX_MEMORY_BYTES, raised

START_WITHIN_S = 900.0
"""Importing transformers takes seconds; from a cold disk beside other work 300 were too few."""

ANSWER_WITHIN_S = 25.0

SLOWEST_CHARACTERS_PER_S = 20_000
"""Beyond `ANSWER_WITHIN_S`; tokenizers written in Python make 100,000."""


class TokenCounter:
    """Counts the tokens of texts and conversations with one tokenizer; a context manager.

    `tokens` is how many it knows. Every method raises `InputError` where the tokenizer takes too
    long, too much memory, or ends the process that it is read in.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._number = next(_numbers)
        self._process = _process()
        loaded = self._ask("load", name=name, folder=str(Path.cwd()))
        self.has_chat_template: bool = loaded["has_chat_template"]
        self.tokens: int = loaded["tokens"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.is_alive:
            with contextlib.suppress(InputError):
                self._ask("forget")

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> str:
        """The text that the chat template makes of messages and, where it is a list, `tools`.

        Raises `ValueError` with the reason when the template refuses them.
        """
        return str(self._ask("render", messages=list(messages), tools=tools))

    def count(self, texts: Sequence[str], *, special: bool) -> list[int]:
        """Tokens of each text; `special` adds those that the tokenizer puts around a text."""
        if not texts:
            return []
        more_s = sum(map(len, texts)) / SLOWEST_CHARACTERS_PER_S
        return list(self._ask("count", more_s, texts=list(texts), special=special))

    def _ask(self, do: str, more_s: float = 0.0, **how: Any) -> Any:
        limit_s = ANSWER_WITHIN_S + more_s
        asked = {"do": do, "number": self._number, **how}
        try:
            answer = self._process.ask(asked, limit_s)
        except TimeoutError:
            self._process.end()
            raise InputError(
                f"tokenizer {self.name!r} took more than {limit_s:.0f} s to {do}",
                hint="one that somebody else made may do so on purpose",
            ) from None
        except (EOFError, OSError):
            raise InputError(
                f"tokenizer {self.name!r} ended the process that was to {do} ({self._process.end()}"
                f"); it may take {MAX_MEMORY_BYTES >> 30} GiB",
                hint="one that somebody else made may do so on purpose",
            ) from None
        if "error" in answer:
            raise raised(answer)
        return answer["value"]


class _Process:
    """The other process, as seen from here."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 - this program itself
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "tuner.space.models.tokenizer_process",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this one, and the other ends with it
                env=_environment(),
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        atexit.register(self.end)
        try:
            self._receive(START_WITHIN_S)
        except (EOFError, OSError) as error:
            raise UnavailableError(
                f"the process that reads tokenizers does not start ({self.end()})",
                hint="`python -c 'import transformers'` may say why",
            ) from error

    @property
    def is_alive(self) -> bool:
        """True while it answers."""
        return self.owner == os.getpid() and self._child.poll() is None

    def ask(self, asked: Mapping[str, Any], limit_s: float) -> Any:
        """Its answer. Raises TimeoutError, and EOFError or OSError where it ended."""
        self._connection.send_bytes(json.dumps(asked).encode("ascii"))
        return self._receive(limit_s)

    def end(self) -> str:
        """End it; how it ended, for people."""
        atexit.unregister(self.end)
        if self.owner != os.getpid():
            return "it is of another process"
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.5)  # what broke by itself says how
        self._child.kill()
        code = self._child.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _receive(self, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            raise TimeoutError
        return json.loads(self._connection.recv_bytes(MAX_MEMORY_BYTES))


_numbers = itertools.count()
_kept: list[_Process] = []


def _process() -> _Process:
    """The process that runs, else a new one: one for all, as starting takes seconds."""
    if not _kept or not _kept[0].is_alive:
        _kept[:] = [_Process()]
    return _kept[0]


_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "ACCESS_KEY")


def _environment() -> dict[str, str]:
    """The environment of this process, with its modules and without its credentials."""
    kept = {n: v for n, v in os.environ.items() if not any(s in n.upper() for s in _SECRETS)}
    return {**kept, "PYTHONPATH": search_path(), "TOKENIZERS_PARALLELISM": "true"}
