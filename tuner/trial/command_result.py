"""The measurement of a command, from its reported steps and the memory of its processes."""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import dataclass

from tuner.core.errors import UnavailableError
from tuner.core.host import TreeMemory
from tuner.core.processes import read_pipe
from tuner.core.records import Measurement, Memory, Speed
from tuner.core.supervised import Tail
from tuner.trial.base import MeasureOptions
from tuner.trial.command_progress import CommandProgress


@dataclass(frozen=True, slots=True)
class _Rate:
    """The speed, a note on its source, and the other results of the timed steps."""

    step_s: float
    samples_per_s: float
    tokens_per_s: float = 0.0
    interval: tuple[float, float] | None = None
    steps: int = 0
    note: str = ""


def measurement_of(
    heard: CommandProgress,
    memory: TreeMemory,
    *,
    device: str,
    options: MeasureOptions,
    samples_per_step: float | None,
) -> Measurement:
    """The measurement, with notes on the differences from tuner's own trials.

    Unknown parameter counts are 0, and so is an unknown token rate. Raises `UnavailableError` if
    the number of samples in a step is unknown.
    """
    rate = _rate(heard, samples_per_step)
    allocated = heard.told.get("allocated_bytes", 0) or memory.peak_bytes
    reserved = max(allocated, heard.told.get("reserved_bytes", 0) or memory.peak_bytes)
    notes = [rate.note, _memory_note(heard, memory, options)]
    return Measurement(
        memory=Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            device_bytes=max(memory.peak_bytes, reserved),
            loaded_bytes=0,
            phase_peak_bytes={},
            peak_phase="",
            breakdown={},
        ),
        speed=Speed(
            step_s=rate.step_s,
            it_per_s=1 / rate.step_s,
            samples_per_s=rate.samples_per_s,
            tokens_per_s=rate.tokens_per_s,
            mfu=None,
        ),
        trainable_params=heard.told.get("trainable_params", 0),
        total_params=heard.told.get("total_params", 0),
        device=device,
        steps=rate.steps,
        loss_finite=heard.loss_finite,
        warmup_steps=options.warmup_steps,
        samples_per_s_interval=rate.interval,
        stopped_by=heard.stopped_by or "end",
        nvml_process_bytes=None if options.device == "cpu" else memory.peak_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        notes=tuple(filter(None, notes)),
    )


def _rate(heard: CommandProgress, samples_per_step: float | None) -> _Rate:
    timer, summary = heard.timer, heard.summary
    if timer is not None:
        told = timer.samples / timer.steps if heard.is_tagged else None
        samples = told or required(samples_per_step)
        interval = timer.interval
        return _Rate(
            interval.mean_s,
            samples / interval.mean_s,
            timer.tokens / timer.total_s,
            interval.rates(samples),
            round(timer.steps),
            "" if heard.is_tagged else "steps are those of its progress bar",
        )
    if summary is not None and summary.steps_per_s > 0:
        note = "speed is the Trainer's own mean over the whole run, warm-up included"
        return _Rate(1 / summary.steps_per_s, summary.samples_per_s, note=note)
    assert heard.printed_rate is not None  # the caller has looked
    step_s = 1 / heard.printed_rate
    note = "speed is what its progress bar printed last, warm-up included"
    return _Rate(step_s, required(samples_per_step) / step_s, note=note)


def required(samples_per_step: float | None) -> float:
    """The samples of a step. Raises `UnavailableError` if their number is unknown."""
    if samples_per_step is None:
        raise UnavailableError(
            "the command's progress bar counts steps, but the samples in a step are unknown",
            hint="write samples_per_step into the space, such as samples_per_step: micro_batch, "
            'or have the command print tuner: {"samples": 8} after each step',
        )
    return samples_per_step


def _memory_note(heard: CommandProgress, memory: TreeMemory, options: MeasureOptions) -> str:
    if options.device == "cpu":
        return "memory is that of all processes of the command, libraries included"
    note = "" if "allocated_bytes" in heard.told else (
        "what PyTorch allocates is not known: device memory stands in"
    )  # fmt: skip
    if memory.is_of_device:
        text = "the driver does not name processes: memory is everything added to the GPU"
        return "; ".join(filter(None, (note, text)))
    return note


_TAIL_BYTES = 16 * 1024


class Streams:
    """Several pipes read together; their data is also written to the descriptor `log`.

    `tail` is the end of all streams together.
    """

    def __init__(self, descriptors: tuple[int, ...], *, log: int) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        self.tail = Tail(most=_TAIL_BYTES)

    @property
    def are_open(self) -> bool:
        """True if at least one stream may still send data."""
        return bool(self._selector.get_map())

    def read(self, within_s: float) -> list[tuple[int, bytes, float]]:
        """The data that arrives within the time: (descriptor, bytes, monotonic time of arrival)."""
        if not self.are_open:
            time.sleep(within_s)
            return []
        chunks = []
        for key, _ in self._selector.select(within_s):
            data = read_pipe(key.fd)
            if not data:
                self._selector.unregister(key.fd)
                continue
            chunks.append((key.fd, data, time.monotonic()))
            self.tail.add(data)
            while data:
                data = data[os.write(self._log, data) :]
        return chunks
