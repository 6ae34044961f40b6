"""Compares a training with its prediction, and says once what is off and why.

Nothing here raises into the training, which waits at most 2 % of its time: a failure is one line on
standard error, and then silence.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from tuner.core import nvml
from tuner.core.errors import TunerError
from tuner.core.records.trial import PROCESSOR
from tuner.core.units import format_duration, format_size
from tuner.integrations.expected import Asked, Expected, Numbers, Prediction, expected_of
from tuner.program.edit.place import is_same
from tuner.space.gpus import match_device

STEPS, WARMUP = 10, 2
"""Steps after which the comparison is made, and those of them that are not timed."""

WAITING = 0.10
"""A training that waits for data for this share of its time is input-bound."""
IDLE = 0.70
"""A training whose GPU computes for less than this share of its time is input-bound."""
DEFAULT_FACTOR = 1.1
"""Allowed ratio of measured to predicted where a prediction has no interval."""
GAP, LEAST_GAP_BYTES = 0.10, 256 << 20
"""Memory is fragmented if this share of it, and these bytes over the prediction, are gaps."""
OTHER_BYTES, OTHER_SHARE = 1 << 30, 0.02
"""Memory of the driver (half a GiB of 80) and of a display, which no training uses."""
BUSY_LOAD = 1.5
"""Others use a processor, too, whose load is this many times its cores; a training's own is one."""
SLOW = frozenset(
    ("hardware slowdown", "temperature (driver)", "temperature (hardware)", "power brake")
)
"""Reasons for low clocks that say something is wrong; a power limit is a normal one."""
MOST_WAIT = 0.01
"""A training that ends before its prediction waits for it at most this share of its time."""

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A training as its objects describe it; what they do not tell is empty.

    `knobs` are settings by tuner's names. `is_shorter` is true of data whose examples may be
    shorter than `max_length`. `ask` starts the prediction of the run's own objects, and raises a
    `TunerError` where they do not suffice.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    is_shorter: bool = False
    ask: Callable[[], Asked] | None = None


@dataclass(frozen=True, slots=True)
class _DeviceNumbers:
    """The memory of this process on its GPU, in bytes, and what else the driver tells of it."""

    numbers: Mapping[str, int]
    gpu: str | None = None
    total_bytes: int = 0
    others_bytes: int | None = None
    others: tuple[str, ...] = ()
    retries: int = 0
    slowdowns: tuple[str, ...] = ()


def guarded(
    function: Callable[Concatenate[RunWatch, P], None],
) -> Callable[Concatenate[RunWatch, P], None]:
    """A method of `RunWatch` whose failure is said once, and ends the watch."""

    def safe(self: RunWatch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_over:
            return
        try:
            function(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training goes on, whatever failed here
            with contextlib.suppress(Exception):
                self.stop()
            say(f"warning: this run isn't compared with its prediction: {error}")

    return functools.update_wrapper(safe, function)


class RunWatch:
    """Watches one training from `begin` to its comparison after `STEPS` steps, or to its `end`."""

    def __init__(self, prediction: Prediction = None) -> None:
        self.is_over = False
        self.given = prediction
        self._expected: Expected | None = None
        self._why_not = "give one by prediction="
        self._asked: Asked | None = None
        self._facts: RunFacts | None = None
        self._began = self._start = self._mark = self._waited_s = 0.0
        self._steps_s: list[float] = []
        self._waits_s: list[float] = []
        self._busy: list[float] = []
        self._reader: nvml.DeviceReader | None = None

    @guarded
    def begin(self, facts: Callable[[], RunFacts] = RunFacts) -> None:
        """The training begins; `facts` are read here, so that their failure is no other's."""
        if self._facts is not None:
            return
        self._facts = facts()
        if self.given is not None:
            self._expected = expected_of(self.given)
        elif self._facts.ask is not None:
            try:
                self._asked = self._facts.ask()
            except TunerError as error:
                self._why_not = f"{error.message}; {error.hint or self._why_not}"
        if (index := _cuda_index()) is not None:
            self._reader = nvml.open_reader(index)
        self._began = self._start = self._mark = time.perf_counter()

    @guarded
    def began(self) -> None:
        """A batch has come: the time since the last event was spent waiting for it."""
        now = time.perf_counter()
        self._waited_s += now - self._mark
        self._mark = now

    @guarded
    def idle(self) -> None:
        """Something else than training took the time since the last event: evaluation, saving."""
        now = time.perf_counter()
        self._start += now - self._mark
        self._mark = now

    @guarded
    def waited(self, seconds: float) -> None:
        """A batch came after this time."""
        self._waited_s += seconds

    @guarded
    def ended(self, *, is_step: bool = True) -> None:
        """A batch was trained on, and with it (`is_step`) an optimizer step is complete."""
        if self._facts is None:
            return
        if len(self._steps_s) < STEPS:
            self._time(is_step=is_step)
        if len(self._steps_s) >= STEPS and (self._asked is None or self._asked.ready()):
            self._compare()
            self.stop()

    def _time(self, *, is_step: bool) -> None:
        if is_step and _cuda_index() is not None:
            sys.modules["torch"].cuda.synchronize()
        now = self._mark = time.perf_counter()
        if not is_step:
            return
        self._steps_s.append(now - self._start - self._waited_s)
        self._waits_s.append(self._waited_s)
        self._start, self._waited_s = now, 0.0
        if self._reader is not None and (busy := self._reader.utilization()) is not None:
            self._busy.append(busy)

    @guarded
    def end(self) -> None:
        """The training has ended; what ran so far is compared, if it was enough."""
        if len(self._steps_s) > WARMUP:
            wait_s = MOST_WAIT * (time.perf_counter() - self._began)
            if self._asked is not None and not self._asked.ready(wait_s):
                self._asked.close()
                self._asked, self._why_not = None, "the training ended before it"
            self._compare()
        self.stop()

    def stop(self) -> None:
        """Watch no more."""
        self.is_over = True
        asked, reader, self._asked, self._reader = self._asked, self._reader, None, None
        if asked is not None:
            asked.close()
        if reader is not None:
            reader.close()

    def _compare(self) -> None:
        assert self._facts is not None
        if self._asked is not None:
            try:
                self._expected = self._asked.result()
            except TunerError as error:
                self._why_not = error.message
        device = device_numbers(self._reader)
        planned_gpu = self._expected.gpu if self._expected is not None else None
        if planned_gpu is not None and device.gpu not in (None, planned_gpu):
            self._expected = None
            self._why_not = f"it is for {planned_gpu}, and this is {device.gpu}"
        timed, waits = self._steps_s[WARMUP:], self._waits_s[WARMUP:]
        measured = Numbers(statistics.median(timed), **device.numbers)
        waiting = sum(waits) / (sum(waits) + sum(timed))
        causes = dict(self._causes(measured, device, waiting))
        lines = [f"after {len(self._steps_s)} steps, measured beside predicted:"]
        lines += self._numbers(measured)
        lines += [f"  {cause}: {text}" for cause, text in causes.items()]
        if not causes and self._expected is not None:
            is_off = any(line.endswith("(off)") for line in lines)
            lines.append(f"  {_UNEXPLAINED if is_off else 'nothing is off'}")
        say("\n".join(lines))

    def _numbers(self, measured: Numbers) -> Iterator[str]:
        """A line for memory and for time; "(off)" marks one outside of its 90 % interval."""
        shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
            ("memory", "device_bytes", lambda value: format_size(round(value))),
            ("step", "step_s", format_duration),
        )
        assert self._facts is not None
        if self._expected is None:
            step = format_duration(measured.step_s or 0)
            yield f"  step    {step}; no prediction: {self._why_not}"
            return
        for label, name, text in shown:
            value, predicted = getattr(measured, name), getattr(self._expected.numbers, name)
            if value is None or predicted is None:
                continue
            ends = self._expected.intervals.get(name)
            low, high = ends or (predicted / DEFAULT_FACTOR, predicted * DEFAULT_FACTOR)
            shown_ends = f" (90 %: {text(low)} to {text(high)})" if ends else ""
            # Shorter rows take less, of which nothing is predicted.
            is_off = value > high or (value < low and not self._facts.is_shorter)
            longest = ", of the longest rows" if self._facts.is_shorter else ""
            source = f"{self._expected.source}{longest}"
            off = " (off)" if is_off else ""
            yield f"  {label:<7} {text(value)}, {text(predicted)} {source}{shown_ends}{off}"

    def _causes(
        self, measured: Numbers, device: _DeviceNumbers, waiting: float
    ) -> Iterator[tuple[str, str]]:
        expected = self._expected
        if differing := self._differing():
            own = expected.own_words if expected is not None else {}
            texts = [f"{n} is {v}, predicted for {own.get(n)}" for n, v in differing.items()]
            yield "settings", f"{'; '.join(texts)}: the prediction is of another training"
        reserved, allocated = measured.peak_reserved_bytes, measured.peak_allocated_bytes
        if reserved is not None and allocated is not None:
            gap, expected_gap = reserved - allocated, 0
            if expected is not None:
                expected_gap = (expected.numbers.peak_reserved_bytes or 0) - (
                    expected.numbers.peak_allocated_bytes or 0
                )
            if gap > GAP * reserved and gap - expected_gap > max(LEAST_GAP_BYTES, GAP * reserved):
                times = f", and freed its cache {device.retries} times" if device.retries else ""
                yield (
                    "fragmentation",
                    f"{format_size(reserved)} are reserved for {format_size(allocated)} allocated"
                    f"{times}: set PYTORCH_ALLOC_CONF=expandable_segments:True, or pad to few "
                    "lengths",
                )
        allowed = max(OTHER_BYTES, OTHER_SHARE * device.total_bytes)
        if device.others_bytes is not None and device.others_bytes > allowed:
            names = f" ({'; '.join(device.others)})" if device.others else ""
            yield (
                "another process",
                f"{format_size(device.others_bytes)} of the GPU are used by others{names}: "
                "`nvidia-smi` shows them",
            )
        cores = os.cpu_count() or 1
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if device.gpu == PROCESSOR and load > BUSY_LOAD * cores:
            yield "another process", f"{load:.0f} processes and threads want {cores} processors"
        busy = statistics.fmean(self._busy[WARMUP:]) if self._busy[WARMUP:] else None
        if waiting > WAITING:
            yield (
                "input-bound",
                f"{waiting:.0%} of the time goes into waiting for the next batch: raise "
                "dataloader_num_workers, or prepare the data before",
            )
        elif busy is not None and busy < IDLE:
            yield (
                "input-bound",
                f"the GPU computes {busy:.0%} of the time: data or Python hold it up",
            )
        if reasons := SLOW.intersection(device.slowdowns):
            yield "slow clocks", f"{', '.join(sorted(reasons))}: `nvidia-smi -q` shows them"

    def _differing(self) -> dict[str, Any]:
        """The settings that are known of both the training and its prediction, and differ."""
        assert self._facts is not None
        planned = self._expected.own_words if self._expected else {}
        return {
            name: value
            for name, value in self._facts.knobs.items()
            if name in planned and name not in _NOT_COMPARED and not is_same(planned[name], value)
        }


_UNEXPLAINED = "cause unknown: neither gaps in memory, nor another process, nor waiting for data"

_NOT_COMPARED = frozenset(("precision", "loss", "lora_targets", "mixed_precision"))
"""Settings whose words differ between a run's objects and a prediction that is of the same run."""


def say(text: str) -> None:
    """One text on standard error, below a progress bar; lost where nothing can be written there."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"\ntuner: {text}\n")
        sys.stderr.flush()


def _cuda_index() -> int | None:
    """The CUDA device of this process; None before it has touched one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def device_numbers(reader: nvml.DeviceReader | None) -> _DeviceNumbers:
    """The numbers of the GPU of this process, or the name of its processor, without memory."""
    index = _cuda_index()
    if index is None:
        return _DeviceNumbers({}, PROCESSOR)
    cuda = sys.modules["torch"].cuda
    name, total = cuda.get_device_name(index), cuda.get_device_properties(index).total_memory
    reserved = cuda.max_memory_reserved(index)
    gpu = match_device(name, total)
    context = 0 if gpu is None else gpu.context_bytes
    use = nvml.device_use(index)
    processes = reader.processes() if reader is not None else None
    others: int | None = None
    names: tuple[str, ...] = ()
    if use is not None and use.process_bytes is not None:
        context = max(0, use.process_bytes - cuda.memory_reserved(index))
        others = use.used_bytes - use.process_bytes
        names = tuple(f"{p.name}, pid {p.pid}" for p in processes or () if p.pid != os.getpid())
    elif use is not None:
        # The driver doesn't tell processes apart, as in most containers.
        others = use.used_bytes - cuda.memory_reserved(index) - context
    return _DeviceNumbers(
        {
            "device_bytes": reserved + context,
            "peak_reserved_bytes": reserved,
            "peak_allocated_bytes": cuda.max_memory_allocated(index),
        },
        None if gpu is None else gpu.id,
        total,
        others,
        names,
        int(cuda.memory_stats(index).get("num_alloc_retries", 0)),
        (reader.slowdowns() or ()) if reader is not None else (),
    )
