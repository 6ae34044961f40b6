"""Follows the steps of a command by its output, and decides when enough were timed."""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.trial.base import MeasureOptions
from tuner.trial.stop_rule import STEP_SCATTER, Amounts, StepTimer

TAG = "tuner:"
"""The start of a tagged line; a JSON object follows."""

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
"""Only this many characters around a bar's times are searched: a bar fits on a terminal line."""
_NOT_FINITE = re.compile(r"\bloss['\"]?\s*[:= ]\s*['\"]?-?(?:nan|inf)\b", re.IGNORECASE)
# The dictionary that transformers' Trainer prints at the end of training.
_SUMMARY = re.compile(r"\{['\"]train_runtime['\"]: .*\}")

PREPARING = re.compile(
    r"load|download|fetch|map\b|filter|token|generat|cast|sav|eval|valid|test|shard|pack|truncat"
    r"|prepar|prediction|sanity",
    re.IGNORECASE,
)
"""Names of progress bars that don't show training: loading, converting, evaluating, saving."""


@dataclass(frozen=True, slots=True)
class _TaggedLine:
    """A tagged line."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Counted:
    """A progress bar, or a line with the number of steps that have ended.

    `rate` is the printed rate in counts per second; None if it prints none.
    """

    name: str
    count: int
    total: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class _Summary:
    """The summary that transformers' Trainer prints after training; it includes the warm-up."""

    samples_per_s: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class _NotFinite:
    """A loss printed as nan or inf."""


Event = _TaggedLine | _Counted | _Summary | _NotFinite


@dataclass(slots=True)
class _OutputReader:
    """Turns the bytes of one stream into progress events as they arrive.

    A progress bar is overwritten without ending its line, so unfinished lines are read too.
    """

    _rest: bytes = b""
    _seen: list[Event] = field(default_factory=list)
    """Events already reported from the unfinished line."""

    def feed(self, data: bytes) -> list[Event]:
        """The new events after `data`."""
        *whole, rest = _BREAK.split(self._rest + data)
        new: list[Event] = []
        for line in whole:
            new += [event for event in events_of(line) if event not in self._seen]
            self._seen = []
        self._rest = rest[-_MAX_LINE_BYTES:]
        # Only a bar is complete before its line is.
        for event in events_of(self._rest):
            if isinstance(event, _Counted) and event.rate is not None and event not in self._seen:
                new.append(event)
                self._seen = [event]
        return new


def events_of(line: bytes) -> Iterator[Event]:
    """The events of one line; there may be none."""
    if not line.strip():
        return
    text = line[:_MAX_LINE_BYTES].decode(errors="replace")
    if tagged := _TAGGED.search(text):
        try:
            values = json.loads(tagged[1])
        except ValueError:
            values = None
        if isinstance(values, dict):
            yield _TaggedLine(values)
            return
    if _NOT_FINITE.search(text):
        yield _NotFinite()
    if summary := _SUMMARY.search(text):
        yield from _summary(summary[0])
    bar = _newest_bar(text)
    if bar is not None:
        yield bar
    elif counted := _COUNTED.match(text[:_NEAR_CHARS]):
        yield _Counted(counted["name"].lower(), int(counted["count"]), _int(counted["total"]))


def _newest_bar(text: str) -> _Counted | None:
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
    return _Counted(found["name"].strip(" :"), int(found["count"]), _int(found["total"]), rate)


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _summary(text: str) -> Iterator[_Summary]:
    try:
        values = ast.literal_eval(text)  # Python's own notation
        samples = float(values["train_samples_per_second"])
        steps = float(values["train_steps_per_second"])
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return
    if math.isfinite(samples) and samples > 0 and math.isfinite(steps):
        yield _Summary(samples, steps)


_NUMBERS = re.compile(r"\d+")
_NAMES = ("allocated_bytes", "reserved_bytes", "trainable_params", "total_params")
_MAX_CLOCK_S = 3600.0


class CommandProgress:
    """Reads the output of a command and keeps what it says about its steps.

    Tagged lines take precedence over progress bars: they say when a step ended and what it
    contained. `progress` is the start of the right bar's line, if there are several bars. `told`
    holds the last value of each other number in tagged lines.
    """

    def __init__(self, options: MeasureOptions, progress: str | None) -> None:
        self._options = options
        self._progress = progress
        self._readers: dict[int, _OutputReader] = {}
        self._told_steps = 0.0
        self._amounts = Amounts()
        self._tagged = StepTimer(options.warmup_steps)
        self._bars: dict[tuple[str, int | None], StepTimer] = {}
        self._last_rate: float | None = None
        self._verdict: str | None = None
        self.told: dict[str, int] = {}
        self.summary: _Summary | None = None
        self.loss_finite = True

    @property
    def is_tagged(self) -> bool:
        """True if tagged lines report the steps."""
        return self._told_steps > 0

    @property
    def samples_per_line(self) -> float | None:
        """Mean samples per step in tagged lines; None without such lines."""
        return self._amounts.samples / self._told_steps if self.is_tagged else None

    @property
    def timer(self) -> StepTimer | None:
        """The timer that counts: of tagged lines, else of the bar with most steps timed."""
        if self.is_tagged:
            return self._tagged if self._tagged.steps else None
        timed = [timer for timer in self._bars.values() if timer.steps]
        return max(timed, key=lambda timer: timer.interval.count, default=None)

    @property
    def printed_rate(self) -> float | None:
        """Steps per second as the last bar printed them, the warm-up included."""
        return None if self.is_tagged else self._last_rate

    @property
    def has_rate(self) -> bool:
        """True if the speed is known."""
        return bool(self.timer or self.summary or self.printed_rate)

    @property
    def stopped_by(self) -> str | None:
        """The reason why the command can be stopped; None if it must go on.

        "interval", "budget" or "loss", or the finding of `judge`: "memory" or "dominated".
        """
        timer = self.timer
        if timer is None:
            return None
        if not self.loss_finite:
            return "loss"
        return self._verdict or timer.reason_to_stop(self._options)

    @property
    def needed_s(self) -> float | None:
        """Seconds that timing may take, by the reports so far; None before the first timed one."""
        timer = self.timer
        if timer is None:
            return None
        report_s = timer.total_s / timer.interval.count
        return self._options.budget_s + self._options.min_steps * report_s

    def judge(self, device_bytes: int, samples_per_step: float | None) -> None:
        """Decide whether the trial can still win, given the command's memory so far.

        The warm-up must be over, so that a trial that ends early has a speed too. A single
        report may be slower than the next ones by a factor of `STEP_SCATTER`; for several, their
        interval says by how much.
        """
        give_up, timer = self._options.instructions.give_up, self.timer
        if give_up is None or timer is None or self._verdict is not None:
            return
        if give_up.is_too_large(device_bytes):
            self._verdict = "memory"
            return
        samples = timer.samples / timer.steps if self.is_tagged else samples_per_step
        if samples is None:
            return
        found = timer.interval
        rates = found.rates(samples)
        if found.count == 1:
            rates = (0.0, samples / found.mean_s * STEP_SCATTER)
        if rates is not None and give_up.is_dominated(device_bytes, rates[1]):
            self._verdict = "dominated"

    def take(self, stream: int, data: bytes, at_s: float | None = None) -> None:
        """Take data of a stream, received at `at_s` (`time.monotonic`, now by default)."""
        at_s = time.monotonic() if at_s is None else at_s
        for event in self._readers.setdefault(stream, _OutputReader()).feed(data):
            match event:
                case _TaggedLine(values):
                    self._take_told(values, at_s)
                case _Counted():
                    self._take_bar(event, at_s)
                case _Summary():
                    self.summary = event
                case _NotFinite():
                    self.loss_finite = False

    def _take_told(self, values: Mapping[str, Any], at_s: float) -> None:
        self.told |= {n: int(values[n]) for n in _NAMES if _amount(values.get(n)) is not None}
        loss = values.get("loss")
        if isinstance(loss, int | float) and not math.isfinite(loss):
            self.loss_finite = False
        samples = _amount(values.get("samples"))
        if samples is None:
            return
        self._told_steps += _amount(values.get("steps")) or 1.0
        tokens = _amount(values.get("tokens")) or 0.0
        self._amounts = Amounts(self._amounts.samples + samples, self._amounts.tokens + tokens)
        said_s = _amount(values.get("time_s"))
        # The clock of another machine is not this one's.
        ended_s = said_s if said_s is not None and abs(said_s - at_s) < _MAX_CLOCK_S else at_s
        self._tagged.report(self._told_steps, ended_s, self._amounts)

    def _take_bar(self, bar: _Counted, at_s: float) -> None:
        if self._progress is not None:
            if not bar.name.startswith(self._progress):
                return
        elif PREPARING.search(bar.name):
            return
        # "Epoch 1/3" and "Epoch 2/3" are one bar that begins anew.
        key = (_NUMBERS.sub("#", bar.name), bar.total)
        timer = self._bars.setdefault(key, StepTimer(self._options.warmup_steps))
        timer.report(bar.count, at_s)
        self._last_rate = bar.rate or self._last_rate


def _amount(value: object) -> float | None:
    """A number of at least 0; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
