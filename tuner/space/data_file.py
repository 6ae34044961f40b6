"""Token lengths of a JSONL file: from a column that holds them, or counted with a tokenizer."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from tuner.core.errors import InputError, Problem, nearest
from tuner.space.lengths import TokenLengths
from tuner.space.models.guarded import TokenCounter

CHAT_COLUMN = "messages"
TEXT_COLUMNS = (("text",), ("prompt", "completion"))
"""Columns looked for after `messages`, in this order, when none is named: the names that
TRL's trainers give to conversations, plain text, and a prompt with its completion."""

MAX_TOKENS = 2**31 - 1
"""A length above this is no number of tokens."""

GROUP_EXAMPLES = 512
GROUP_CHARACTERS = 4 * 2**20
"""Texts are counted in groups of at most about this size: enough to keep the threads of a fast
tokenizer busy, little to hold in memory."""

_Numbered: TypeAlias = Iterator[tuple[int, Mapping[str, Any]]]


def read_lengths(
    path: Path | str,
    *,
    tokenizer: str | None = None,
    length_column: str | None = None,
    text_column: str | Sequence[str] | None = None,
) -> TokenLengths:
    """The token lengths of the examples of a JSONL file, which is read line by line.

    With `length_column`, that column holds whole numbers of tokens. Otherwise `tokenizer`
    (a folder, or a model in the local Hugging Face cache) counts them: of the texts of
    `text_column`, joined as they are when there are several; without it of `messages` rendered
    by the tokenizer's chat template, of `text`, or of `prompt` and `completion`, whichever the
    first line has. Columns that hold messages are joined and rendered, too. An end-of-text
    token that a trainer appends itself is not counted.

    Raises `InputError` for contradicting arguments, and with the file, line and reason of every
    malformed line (up to `MAX_PROBLEMS`).
    """
    path = Path(path)
    columns = (text_column,) if isinstance(text_column, str) else tuple(text_column or ())
    _check_arguments(tokenizer, length_column, columns)
    problems = LineProblems(path)
    found = records(path, problems)
    first = next(found, None)
    if first is None:
        problems.raise_any()
        raise InputError(f"data file {str(path)!r} holds no examples")
    numbered = itertools.chain((first,), found)
    counts: Counter[int]
    if length_column is not None:
        counts = _read_column(numbered, length_column, problems)
    elif tokenizer is not None:
        counts = _count_texts(numbered, _layout(first, columns, path), tokenizer, problems)
    else:
        raise _nothing_counts(first[1], path)
    problems.raise_any()
    return TokenLengths.from_counts(counts)


def _check_arguments(
    tokenizer: str | None, length_column: str | None, columns: Sequence[str]
) -> None:
    if length_column is not None and (tokenizer is not None or columns):
        raise InputError(
            f"the length column {length_column!r} already holds the number of tokens",
            hint="leave the tokenizer and the text column out, or the length column",
        )
    if columns and tokenizer is None:
        raise InputError(
            f"the texts of {', '.join(columns)} need a tokenizer to be counted",
            hint="name one with --tokenizer",
        )


def _nothing_counts(record: Mapping[str, Any], path: Path) -> InputError:
    numbers = [name for name, value in record.items() if type(value) is int]
    column = f" (whole numbers on the first line: {_names(numbers)})" if numbers else ""
    return InputError(
        f"the number of tokens of the examples in {str(path)!r} is unknown",
        hint="name a tokenizer with --tokenizer, or a column of token counts with "
        f"--length-column{column}",
    )


# --- lengths that are given ------------------------------------------------------------------


def _read_column(numbered: _Numbered, column: str, problems: LineProblems) -> Counter[int]:
    counts: Counter[int] = Counter()
    for line, record in numbered:
        if column not in record:
            problems.add(line, _missing(column, record))
            continue
        value = record[column]
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas writes a column with gaps as 129.0
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            shown = repr(value)[:40] if isinstance(value, int | float) else type_name(value)
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


# --- lengths that are counted ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns that hold the text of an example, or its conversation."""

    columns: tuple[str, ...]
    chat: bool


def _layout(first: tuple[int, Mapping[str, Any]], columns: tuple[str, ...], path: Path) -> _Layout:
    """The layout of a file by its first record; every other line must have the same."""
    line, record = first
    if not columns:
        candidates = ((CHAT_COLUMN,), *TEXT_COLUMNS)
        columns = next((c for c in candidates if all(n in record for n in c)), ())
    if not columns:
        raise InputError(
            f"{path}:{line}: no column messages, text, or prompt and completion "
            f"(there are: {_names(record)})",
            hint="say which column holds the text with --text-column",
        )
    chat = all(isinstance(record.get(column), list) for column in columns)
    return _Layout(columns, chat or columns == (CHAT_COLUMN,))


def _count_texts(
    numbered: _Numbered, layout: _Layout, tokenizer: str, problems: LineProblems
) -> Counter[int]:
    counts: Counter[int] = Counter()
    with TokenCounter(tokenizer) as counter:
        if layout.chat and not counter.has_chat_template:
            raise InputError(
                f"tokenizer {tokenizer!r} has no chat template, and {layout.columns[0]} holds "
                "conversations",
                hint="use the tokenizer of an instruction-tuned model, or a column of text with "
                "--text-column",
            )
        for texts in _groups(_texts(numbered, layout, counter, problems)):
            # A chat template writes the special tokens itself; a plain text is given them.
            counts.update(counter.count(texts, special=not layout.chat))
    return counts


def _texts(
    numbered: _Numbered, layout: _Layout, counter: TokenCounter, problems: LineProblems
) -> Iterator[str]:
    for line, record in numbered:
        missing = [column for column in layout.columns if column not in record]
        if missing:
            problems.add(line, _missing(missing[0], record))
            continue
        try:
            if layout.chat:
                parts = [_messages(record[column], column) for column in layout.columns]
                text = counter.render([m for part in parts for m in part], record.get("tools"))
            else:
                text = "".join(_text(record[column], column) for column in layout.columns)
            text.encode()  # half of a surrogate pair is JSON, but no text
        except UnicodeEncodeError:
            problems.add(line, "the text has half of a surrogate pair, which is no character")
        except ValueError as error:
            problems.add(line, str(error))
        else:
            yield text


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} is {type_name(value)}, and not a string")
    return value


def _messages(value: object, column: str) -> list[dict[str, Any]]:
    """`value`, if it is a list of messages with role and content. Raises `ValueError`."""
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else type_name(value)
        raise ValueError(f"{column} is {shown}, and not a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{column}[{i}] is {type_name(message)}, and not a message")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{column}[{i}] has no role")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"{column}[{i}] has no content")
    return value


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if len(group) >= GROUP_EXAMPLES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


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
    """JSON's name for the type of `value`, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
