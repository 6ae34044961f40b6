"""The training data of a space, and the token lengths in a JSONL file."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.files import open_file
from tuner.core.setup.schemas import KnobSchema
from tuner.space.document import Entry, Place
from tuner.space.knobs import read_value
from tuner.space.lengths import TokenLengths

PADDING = ("longest", "max_length")


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Facts about the training data; None is unknown.

    `padding` is "longest" (to the longest example of each micro-batch) or "max_length".
    """

    examples: int | None = None
    epochs: float | None = None
    token_lengths: TokenLengths | None = None
    padding: str | None = None


_COUNT = KnobSchema("examples", "int", "training examples", default=1, minimum=1)
_EPOCHS = KnobSchema("epochs", "float", "passes over the data", default=1, minimum=0)
_PADDING = KnobSchema(
    "padding", "word", "what a batch is padded to", default="longest", allowed=PADDING
)
_TOKENS = KnobSchema("token_lengths", "float", "tokens of an example", default=0, minimum=0)
_FRACTION = KnobSchema(
    "quantile", "float", "fraction of examples", default=0, minimum=0, below=1 + 1e-9
)
_WHOLE = KnobSchema("count", "int", "examples in a bin", default=0, minimum=0)


def read_data(entry: Entry) -> DataFacts:
    """The `data` mapping of a space."""
    entries = entry.mapping(allowed=("examples", "epochs", "token_lengths", "padding"))
    facts = {
        name: read_value(entries[name], term)
        for name, term in (("examples", _COUNT), ("epochs", _EPOCHS), ("padding", _PADDING))
        if name in entries
    }
    lengths = entries.get("token_lengths")
    return DataFacts(
        **facts,  # type: ignore[arg-type]  # each was read by the term of its type
        token_lengths=_read_lengths(lengths) if lengths else None,
    )


def _read_lengths(entry: Entry) -> TokenLengths | None:
    """Lengths from {mean, max}, {quantiles: {0.5: 129, ...}} or {histogram: {edges, counts}}."""
    entries = entry.mapping(allowed=("mean", "max", "quantiles", "histogram"))
    given = set(entries)
    with entry.noting():
        if given == {"mean", "max"}:
            mean, top = _numbers([entries["mean"]], _TOKENS), _numbers([entries["max"]], _WHOLE)
            if not mean or not top:
                return None
            return TokenLengths.from_summary(mean=mean[0], longest=int(top[0]))
        if given == {"quantiles"}:
            points = _quantile_points(entries["quantiles"])
            return TokenLengths.from_points(points) if points else None
        if given == {"histogram"}:
            return TokenLengths.from_points(_histogram_points(entries["histogram"]))
        raise InputError(
            "token_lengths needs {mean, max}, {quantiles: {0.5: 129, 1: 933}} or "
            "{histogram: {edges: [0, 128, 512], counts: [10, 3]}}"
        )
    return None


def _quantile_points(entry: Entry) -> list[tuple[float, float]]:
    pairs = entry.mapping()
    fractions = _numbers([pair.key for pair in pairs.values()], _FRACTION)
    tokens = _numbers([replace(pair, at=entry.at) for pair in pairs.values()], _TOKENS)
    if len(fractions) != len(pairs) or len(tokens) != len(pairs):
        return []
    by_fraction = sorted(zip(fractions, tokens, strict=True))
    points = [(length, fraction) for fraction, length in by_fraction]
    if not points or points[-1][1] != 1:
        raise InputError("the quantiles must include 1, the longest example")
    return points if points[0][1] == 0 else [(0.0, 0.0), *points]


def _histogram_points(entry: Entry) -> list[tuple[float, float]]:
    lists = entry.mapping(allowed=("edges", "counts"))
    if set(lists) != {"edges", "counts"}:
        raise InputError("a histogram needs edges and counts")
    edges, counts = (
        _numbers(lists[name].sequence() or [], term)
        for name, term in (("edges", _TOKENS), ("counts", _WHOLE))
    )
    if len(edges) != len(counts) + 1:
        raise InputError(f"{len(edges)} edges need {max(len(edges) - 1, 0)} counts")
    total = sum(counts)
    if not total:
        raise InputError("the histogram counts no example")
    cumulative = [sum(counts[:i]) / total for i in range(len(edges))]
    return list(zip(edges, cumulative, strict=True))


def _numbers(places: Sequence[Place], term: KnobSchema) -> list[float]:
    values = [read_value(place, term) for place in places[:1000]]
    return [value for value in values if isinstance(value, int | float)]


MAX_TOKENS = 2**31 - 1
"""A length above this is no number of tokens."""


def read_lengths(path: Path | str, length_column: str | None) -> TokenLengths:
    """The token lengths of the examples of a JSONL file, which is read line by line.

    `length_column` holds whole numbers of tokens. Raises `InputError` without one, and with the
    file, line and reason of every malformed line (up to `MAX_PROBLEMS`).
    """
    path = Path(path)
    problems = _LineProblems(path)
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
    numbered: Iterator[tuple[int, Mapping[str, Any]]], column: str, problems: _LineProblems
) -> Counter[int]:
    counts: Counter[int] = Counter()
    for line, record in numbered:
        if column not in record:
            close = nearest(column, record)
            meant = f"; did you mean {close!r}?" if close else ""
            problems.add(line, f"no column {column!r} (there are: {_names(record)}){meant}")
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


class _LineProblems:
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


def records(path: Path, problems: _LineProblems) -> Iterator[tuple[int, Mapping[str, Any]]]:
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


def _lines(file: IO[bytes], problems: _LineProblems) -> Iterator[tuple[int, bytes]]:
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


def _parse(line: bytes, number: int, problems: _LineProblems) -> Mapping[str, Any] | None:
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
