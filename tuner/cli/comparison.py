"""What was predicted of a trial beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tuner.cli.render import count, print_rows
from tuner.records import Measurement, Prediction
from tuner.units import format_duration, format_size, significant

Evidence = Prediction | Measurement


def print_comparison(predicted: Prediction, measured: Measurement | None) -> None:
    """A table of every number that is predicted or measured, with predicted over measured."""
    print_rows(
        ["", "predicted", "measured", "ratio"],
        _rows(predicted, measured),
        right=("predicted", "measured", "ratio"),
    )


def print_measured(measured: Measurement) -> None:
    """A table of every number that is measured, where nothing was predicted."""
    rows = [
        [label, text(value(measured) or 0)]
        for label, value, text in _numbers(None, measured)
        if value(measured)
    ]
    print_rows(["", "measured"], rows, right=("measured",))


def _rows(predicted: Prediction, measured: Measurement | None) -> Iterator[list[str]]:
    for label, value, text in _numbers(predicted, measured):
        said, seen = value(predicted), value(measured) if measured else None
        if said is None and seen is None:
            continue
        ratio = f"{said / seen:.3f}" if said and seen else ""
        yield [label, _text(said, text), _text(seen, text), ratio]


def _text(number: float | None, text: Callable[[float], str]) -> str:
    return "" if number is None else text(number)


def _numbers(
    predicted: Prediction | None, measured: Measurement | None
) -> Iterator[tuple[str, Callable[[Evidence], float | None], Callable[[float], str]]]:
    """Each number: its label, where it is found, and how it is written."""
    yield "device memory", lambda e: e.memory.device_bytes, format_size
    yield "peak reserved", lambda e: e.memory.peak_reserved_bytes, format_size
    yield "peak allocated", lambda e: e.memory.peak_allocated_bytes, format_size
    yield "loaded", lambda e: e.memory.loaded_bytes, format_size
    phases = [*predicted.memory.phase_peak_bytes] if predicted else []
    phases += [p for p in (measured.memory.phase_peak_bytes if measured else ()) if p not in phases]
    for phase in phases:

        def peak(evidence: Evidence, phase: str = phase) -> float | None:
            return evidence.memory.phase_peak_bytes.get(phase)

        yield f"  peak in {phase}", peak, format_size
    yield "paged", lambda e: e.memory.paged_bytes or None, format_size
    yield "optimizer step", lambda e: e.speed.step_s, format_duration
    yield "samples/s", lambda e: e.speed.samples_per_s, significant
    yield "tokens/s", lambda e: e.speed.tokens_per_s, significant
    yield "micro-steps/s", lambda e: e.speed.it_per_s, significant
    yield "MFU", lambda e: e.speed.mfu, lambda share: f"{share:.1%}"


def params_text(measured: Measurement) -> str:
    """How many parameters are trained; empty where code of the user's own does not tell."""
    if not measured.total_params:
        return ""
    return f"{count(measured.trainable_params)} trainable of {count(measured.total_params)}"


def more_text(measured: Measurement) -> str:
    """What only a measurement knows, where it is known."""
    values: Mapping[str, Any] = measured.to_dict()
    interval = values.get("samples_per_s_interval")
    parts = [f"{measured.steps} steps timed"]
    if interval:
        parts.append(f"95 %: {significant(interval[0])} to {significant(interval[1])} samples/s")
    for name, text in _ONLY_MEASURED.items():
        if values.get(name) is not None:
            parts.append(text(values[name]))
    if not measured.loss_finite:
        parts.append("loss not finite")
    return ", ".join(parts)


_ONLY_MEASURED: Mapping[str, Callable[[Any], str]] = {
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
