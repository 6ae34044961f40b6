"""What was predicted of a trial beside what was measured, or emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tuner.core.records import Measurement, Prediction, Source
from tuner.core.units import format_duration, format_range, format_size, significant
from tuner.report.terminal.render import count
from tuner.report.terminal.tables import print_rows

Evidence = Prediction | Measurement


def print_comparison(
    predicted: Prediction, ran: Measurement | None, source: Source = Source.MEASURED
) -> None:
    """A table of every number that is predicted or of a trial that ran, with their ratio.

    `source` says of what kind the numbers of the trial are, or would have been.
    """
    print_rows(
        ["", "predicted", str(source), "ratio"],
        _rows(predicted, ran),
        right=("predicted", str(source), "ratio"),
    )


def print_ran(ran: Measurement) -> None:
    """A table of every number of a trial that ran, where nothing was predicted."""
    rows = [
        [label, text(value(ran) or 0)] for label, value, text in _numbers(None, ran) if value(ran)
    ]
    print_rows(["", str(ran.source)], rows, right=(str(ran.source),))


def _rows(predicted: Prediction, ran: Measurement | None) -> Iterator[list[str]]:
    for label, value, text in _numbers(predicted, ran):
        said, seen = value(predicted), value(ran) if ran else None
        if said is None and seen is None:
            continue
        ratio = f"{said / seen:.3f}" if said and seen else ""
        yield [label, _text(said, text), _text(seen, text), ratio]


def _text(number: float | None, text: Callable[[float], str]) -> str:
    return "" if number is None else text(number)


def _numbers(
    predicted: Prediction | None, ran: Measurement | None
) -> Iterator[tuple[str, Callable[[Evidence], float | None], Callable[[float], str]]]:
    """Each number: its label, where it is found, and how it is written."""
    yield "device memory", lambda e: e.memory.device_bytes, format_size
    yield "peak reserved", lambda e: e.memory.peak_reserved_bytes, format_size
    yield "peak allocated", lambda e: e.memory.peak_allocated_bytes, format_size
    yield "loaded", lambda e: e.memory.loaded_bytes, format_size
    phases = [*predicted.memory.phase_peak_bytes] if predicted else []
    phases += [p for p in (ran.memory.phase_peak_bytes if ran else ()) if p not in phases]
    for phase in phases:

        def peak(evidence: Evidence, phase: str = phase) -> float | None:
            return evidence.memory.phase_peak_bytes.get(phase)

        yield f"  peak in {phase}", peak, format_size
    yield "paged", lambda e: e.memory.paged_bytes or None, format_size
    yield "optimizer step", lambda e: e.speed.step_s, format_duration
    yield "samples/s", lambda e: e.speed.samples_per_s, significant
    yield "tokens/s", lambda e: e.speed.tokens_per_s, significant
    yield "micro-steps/s", _micro_steps_per_s, significant
    yield "MFU", lambda e: e.speed.mfu, lambda share: f"{share:.1%}"


def _micro_steps_per_s(evidence: Evidence) -> float | None:
    return evidence.speed.it_per_s if evidence.speed.counts_micro_steps else None


def params_text(ran: Measurement) -> str:
    """How many parameters are trained; empty where code of the user's own does not tell."""
    if not ran.total_params:
        return ""
    return f"{count(ran.trainable_params)} trainable of {count(ran.total_params)}"


def more_text(ran: Measurement) -> str:
    """What only a trial that ran knows, where it is known."""
    values: Mapping[str, Any] = ran.to_dict()
    interval = values.get("samples_per_s_interval")
    parts = [f"{ran.steps} step{'s' * (ran.steps != 1)} timed"]
    if around := ran.intervals.get("step_s"):
        ends = format_range(*around, format_duration)
        parts.append(f"90 %: {ends} an optimizer step")
    if interval:
        parts.append(f"95 %: {significant(interval[0])} to {significant(interval[1])} samples/s")
    for name, text in _ONLY_OF_TRIALS.items():
        if values.get(name) is not None:
            parts.append(text(values[name]))
    if ran.source is Source.MEASURED and not ran.loss_finite:
        parts.append("loss not finite")
    return ", ".join(parts)


_ONLY_OF_TRIALS: Mapping[str, Callable[[Any], str]] = {
    "load_s": lambda s: f"loaded in {format_duration(s)}",
    "first_step_s": lambda s: f"first step {format_duration(s)}",
    "data_wait_fraction": lambda share: f"{share:.1%} of the time waiting for data",
    "num_alloc_retries": lambda n: f"{n} allocator retries",
    "nvml_device_bytes": lambda size: f"{format_size(size)} in use on the device (NVML)",
    "gpu_utilization": lambda share: f"{share:.0%} GPU utilisation",
    "power_w": lambda watts: f"{watts:.0f} W",
    "energy_j_per_sample": lambda joule: f"{significant(joule)} J a sample",
    "cpu_threads": lambda n: f"{n} processor threads",
    "weights": lambda which: f"weights {which}",
    "lengths": lambda which: f"lengths {which}",
}
