"""Records of a JSONL file, one at a time, with every malformed line reported by its number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tuner.core.errors import InputError, Problem

MAX_LINE_BYTES = 64 * 2**20
"""A line above this is no training example but a file without line breaks; it is skipped in
pieces, so that memory stays bounded."""

MAX_PROBLEMS = 20
"""Reading stops at so many malformed lines: the rest is most likely wrong in the same way."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


class LineProblems:
    """Collects what is wrong with the lines of a file, and raises it all together."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[Problem] = []
        self._hint: str | None = None

    def add(self, line: int, message: str, *, hint: str | None = None) -> None:
        """Note a problem. Raises `InputError` with all of them when there are many."""
        self._found.append(Problem(message, where=f"{self._path}:{line}"))
        self._hint = self._hint or hint
        if len(self._found) >= MAX_PROBLEMS:
            self._found.append(Problem("reading stopped here; later lines were not checked"))
            self.raise_any()

    def raise_any(self) -> None:
        """Raise `InputError` if anything was noted."""
        if self._found:
            raise InputError(
                f"{str(self._path)!r} cannot be used as training data",
                problems=self._found,
                hint=self._hint,
            )


def records(path: Path, problems: LineProblems) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The line number (from 1) and the object of each line; blank lines are passed over.

    A malformed line is noted in `problems` and left out. Raises `InputError` when the file
    cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, problems):
                record = _parse(line, number, problems)
                if record is not None:
                    yield number, record
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"data file {str(path)!r} cannot be read: {reason}") from error


def _lines(file: IO[bytes], problems: LineProblems) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
            if line.startswith(_GZIP):
                problems.add(1, "the file is compressed", hint="decompress it with gunzip first")
                return
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            problems.add(number, f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            continue
        if line.strip():
            yield number, line


def _parse(line: bytes, number: int, problems: LineProblems) -> Mapping[str, Any] | None:
    """The object on a line, or None after noting what is wrong with it."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        problems.add(number, f"not UTF-8 at byte {error.start + 1} of the line")
        return None
    except json.JSONDecodeError as error:
        problems.add(number, f"not JSON at column {error.colno}: {error.msg}", hint=_hint(line))
        return None
    except RecursionError:
        problems.add(number, "JSON nested too deeply")
        return None
    except ValueError as error:  # an integer of thousands of digits
        problems.add(number, f"not readable as JSON: {str(error).split(';', maxsplit=1)[0]}")
        return None
    if not isinstance(record, dict):
        kind = type_name(record)
        problems.add(number, f"{kind} where an object is needed", hint=_hint(line))
        return None
    return record


def _hint(line: bytes) -> str:
    if line.lstrip().startswith(b"["):
        return "JSONL has one object per line; `jq -c '.[]'` converts a JSON array"
    return 'JSONL has one object a line, such as {"text": "..."}'


def type_name(value: object) -> str:
    """What JSON calls the type of `value`, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
