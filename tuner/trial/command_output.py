"""What a command prints of its progress: tagged JSON lines, progress bars, a Trainer's summary.

The code that trains knows nothing of this program, or one line of it. Everything else that it
prints is passed over.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TAG = "tuner:"
"""What a tagged line begins with; a JSON object follows."""

_BREAK = re.compile(rb"[\r\n]")
_MAX_LINE_BYTES = 64 * 1024
_TAGGED = re.compile(rf"{TAG} ?(\{{.*\}})\s*$")
# tqdm's own format: "desc:  12%|...| 3/25 [00:01<00:09, 2.31it/s, loss=2.1]".
_BAR = re.compile(
    r"(?P<name>[^|\r\n]*?)(?:\s*\d+%\|[^|]*\||: )?\s*(?P<count>\d+)(?:/(?P<total>\d+|\?))?"
    r"(?P<unit>[A-Za-z]*) ?"
    r"\[(?:\d+:)?\d+:\d+(?:<[^,\]]+)?,\s*(?P<rate>[\d.]+|\?)\s*(?P<per>[^\]/,]*/[^\],]+)"
)
# "step 12/100 loss 2.3", "iter 12: ...", "[train] Step: 12", as hand-written loops print it.
_COUNTED = re.compile(
    r"^\W*(?:\w+\W+)?(?P<name>global_step|steps?|iter(?:ation)?s?|batch(?:es)?)\b\W{0,3}"
    r"(?P<count>\d+)\b(?:\s*/\s*(?P<total>\d+))?",
    re.IGNORECASE,
)
_TIMES = re.compile(r"\[(?:\d+:)?\d+:\d+[<,]")
_NEAR_CHARS = 300
"""A progress bar is a line of a terminal; long lines are not searched for one as a whole."""
_NOT_FINITE = re.compile(r"\bloss['\"]?\s*[:= ]\s*['\"]?-?(?:nan|inf)\b", re.IGNORECASE)
# The dictionary that transformers' Trainer prints at the end of training.
_SUMMARY = re.compile(r"\{['\"]train_runtime['\"]: .*\}")

PREPARING = re.compile(
    r"load|download|fetch|map\b|filter|token|generat|cast|sav|eval|valid|test|shard|pack|truncat"
    r"|prepar|prediction|sanity",
    re.IGNORECASE,
)
"""Progress bars that do not train: of libraries that load, convert, evaluate or save."""


@dataclass(frozen=True, slots=True)
class TaggedLine:
    """A tagged line."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Counted:
    """A progress bar, or a line with a number of steps: so many have ended.

    `rate` is what it prints itself, in counts per second; None where it does not.
    """

    name: str
    count: int
    total: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What transformers' Trainer prints when training has ended, warm-up included."""

    samples_per_s: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A loss that is printed as nan or inf."""


Event = TaggedLine | Counted | Summary | NotFinite


@dataclass(slots=True)
class OutputReader:
    """Takes the bytes of one stream as they come, and gives what they say of progress.

    A bar is overwritten and not ended, so what is not yet a whole line is looked at too.
    """

    _rest: bytes = b""
    _seen: list[Event] = field(default_factory=list)
    """What the unfinished line has said already."""

    def feed(self, data: bytes) -> list[Event]:
        """What is new after `data`."""
        *whole, rest = _BREAK.split(self._rest + data)
        new: list[Event] = []
        for line in whole:
            new += [event for event in events_of(line) if event not in self._seen]
            self._seen = []
        self._rest = rest[-_MAX_LINE_BYTES:]
        # Only a bar is complete before its line is.
        for event in events_of(self._rest):
            if isinstance(event, Counted) and event.rate is not None and event not in self._seen:
                new.append(event)
                self._seen = [event]
        return new


def events_of(line: bytes) -> Iterator[Event]:
    """What one line says, perhaps nothing."""
    if not line.strip():
        return
    text = line[:_MAX_LINE_BYTES].decode(errors="replace")
    if tagged := _TAGGED.search(text):
        values = _object(tagged[1])
        if values is not None:
            yield TaggedLine(values)
            return
    if _NOT_FINITE.search(text):
        yield NotFinite()
    if summary := _SUMMARY.search(text):
        yield from _summary(summary[0])
    bar = _newest_bar(text)
    if bar is not None:
        yield bar
    elif counted := _COUNTED.match(text[:_NEAR_CHARS]):
        yield Counted(counted["name"].lower(), int(counted["count"]), _int(counted["total"]))


def _object(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _newest_bar(text: str) -> Counted | None:
    """The last progress bar in the text. tqdm prints seconds per count from one second on."""
    *_, times = (None, *_TIMES.finditer(text))
    if times is None:
        return None
    near = text[max(0, times.start() - _NEAR_CHARS) : times.end() + _NEAR_CHARS]
    found = _BAR.search(near)
    if found is None:
        return None
    rate = None
    if found["rate"] != "?" and float(found["rate"]) > 0:
        number = float(found["rate"])
        rate = 1 / number if found["per"].startswith("s/") else number
    return Counted(found["name"].strip(" :"), int(found["count"]), _int(found["total"]), rate)


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _summary(text: str) -> Iterator[Summary]:
    try:
        values = ast.literal_eval(text)  # Python's own notation
        samples = float(values["train_samples_per_second"])
        steps = float(values["train_steps_per_second"])
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return
    if math.isfinite(samples) and samples > 0 and math.isfinite(steps):
        yield Summary(samples, steps)
