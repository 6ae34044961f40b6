"""Token lengths of a JSONL file, from a column that holds them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.files import open_file
from tuner.space.lengths import TokenLengths

MAX_TOKENS = 2**31 - 1
"""A length above this is no number of tokens."""


def read_lengths(path: Path | str, length_column: str | None) -> TokenLengths:
    """The token lengths of the examples of a JSONL file, which is read line by line.

    `length_column` holds whole numbers of tokens. Raises `InputError` without one, and with the
    file, line and reason of every malformed line (up to `MAX_PROBLEMS`).
    """
    path = Path(path)
    problems = LineProblems(path)
    found = records(path, problems)
    first = next(found, None)
    if first is None:
        problems.raise_any()
        raise InputError(f"data file {str(path)!r} holds no examples")
    if length_column is None:
        numbers = [name for name, value in first[1].items() if type(value) is int]
        raise InputError(
            f"the number of tokens of the examples in {str(path)!r} is unknown",
            hint="name a column of token counts with --length-column "
            f"(whole numbers on the first line: {_names(numbers)})",
        )
    counts = _read_column(itertools.chain((first,), found), length_column, problems)
    problems.raise_any()
    return TokenLengths.from_counts(counts)


def _read_column(
    numbered: Iterator[tuple[int, Mapping[str, Any]]], column: str, problems: LineProblems
) -> Counter[int]:
    counts: Counter[int] = Counter()
    for line, record in numbered:
        if column not in record:
            problems.add(line, _missing(column, record))
            continue
        value = record[column]
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas writes a column with gaps as 129.0
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            shown = repr(value)[:40] if isinstance(value, int | float) else _type_name(value)
            problems.add(line, f"{column} is {shown}, and not a whole number of tokens")
            continue
        counts[value] += 1
    return counts


def _missing(column: str, record: Mapping[str, Any]) -> str:
    close = nearest(column, record)
    meant = f"; did you mean {close!r}?" if close else ""
    return f"no column {column!r} (there are: {_names(record)}){meant}"


def _names(columns: Iterable[str]) -> str:
    """Some column names, safe to print: they come from a file that may be anything."""
    short = [name if len(name) <= 40 else name[:40] + "..." for name in list(columns)[:12]]
    return ", ".join(n if n.isprintable() else repr(n) for n in short) or "none"


MAX_LINE_BYTES = 64 * 2**20
"""A line above this is no training example but a file without line breaks; it is skipped in
pieces, so that memory stays bounded."""

MAX_PROBLEMS = 20
"""Reading stops at this many malformed lines: the rest is likely wrong in the same way."""

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
        with open_file(path) as file:
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
        kind = _type_name(record)
        problems.add(number, f"{kind} where an object is needed", hint=_hint(line))
        return None
    return record


def _hint(line: bytes) -> str:
    if line.lstrip().startswith(b"["):
        return "JSONL has one object per line; `jq -c '.[]'` converts a JSON array"
    return 'JSONL has one object a line, such as {"n_tokens": 512}'


def _type_name(value: object) -> str:
    """JSON's name for the type of `value`, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
