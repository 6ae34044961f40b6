"""How the numbers of one configuration are printed, with their breakdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tuner.core.records import Measurement, Prediction
from tuner.core.units import format_duration, format_range, format_size, significant
from tuner.report.terminal.render import count, echo, print_fields
from tuner.report.terminal.tables import print_rows
from tuner.searches.facts import ranks_text


def print_evidence(
    evidence: Prediction | Measurement,
    *,
    fits: bool,
    limit_bytes: int,
    margin_bytes: int | None = None,
) -> None:
    """Whether it fits, the memory and the time by what they are used for, and the speed.

    `limit_bytes` is the memory that there is, of a rank where there are several, and
    `margin_bytes` what to keep free of it where the evidence does not say it.
    """
    print_fields(
        [
            ("source", str(evidence.source)),
            (
                "fits",
                fits_text(evidence, fits=fits, limit_bytes=limit_bytes, margin_bytes=margin_bytes),
            ),
            ("memory", _memory_text(evidence)),
            ("ranks", ranks_text(evidence)),
            ("speed", _speed_text(evidence)),
            ("limited by", _limit_text(evidence.speed.breakdown_s)),
            (
                "parameters",
                f"{count(evidence.trainable_params)} trainable of {count(evidence.total_params)}",
            ),
            # It ends with the settings and the layers that the numbers know nothing of.
            ("method", evidence.method if isinstance(evidence, Prediction) else ""),
        ]
    )
    if evidence.memory.breakdown:
        echo()
        _print_breakdown(
            f"device memory at the peak ({evidence.source})", evidence.memory.breakdown, format_size
        )
    if evidence.speed.breakdown_s:
        echo()
        _print_breakdown(
            f"time of one optimizer step ({evidence.source})",
            evidence.speed.breakdown_s,
            format_duration,
        )


def fits_text(
    evidence: Prediction | Measurement,
    *,
    fits: bool,
    limit_bytes: int,
    margin_bytes: int | None = None,
) -> str:
    """The answer with the arithmetic behind it; see `print_evidence`."""
    used_bytes = evidence.memory.device_bytes
    if margin_bytes is None:
        margin_bytes = evidence.budget.margin_bytes if isinstance(evidence, Prediction) else 0
    free_bytes = limit_bytes - used_bytes
    numbers = f"{format_size(used_bytes)} of {format_size(limit_bytes)}"
    if free_bytes < 0:
        return f"no: {numbers}, {format_size(-free_bytes)} too much"
    margin = f"margin {format_size(margin_bytes)}" if margin_bytes else "no margin asked"
    text = f"{'yes' if fits else 'no'}: {numbers}, {format_size(free_bytes)} free, {margin}"
    _, high_bytes = evidence.intervals.get("device_bytes", (0.0, 0.0))
    if fits and high_bytes > limit_bytes:
        text += f"; at the upper end of its interval, {format_size(int(high_bytes))}, it does not"
    return text


def _memory_text(evidence: Prediction | Measurement) -> str:
    memory = evidence.memory
    text = (
        f"device memory {format_size(memory.device_bytes)}"
        f"{_interval_text(evidence, 'device_bytes', format_size)}, "
        f"peak of {format_size(memory.peak_allocated_bytes)} allocated and "
        f"{format_size(memory.peak_reserved_bytes)} reserved, in the {memory.peak_phase} phase"
    )
    if memory.paged_bytes:
        text += f"; {format_size(memory.paged_bytes)} more in managed memory of the optimizer"
    return text


def _speed_text(evidence: Prediction | Measurement) -> str:
    speed = evidence.speed
    micro_steps = f"{significant(speed.it_per_s)} micro-steps/s, "
    mfu = f", MFU {speed.mfu:.0%}" if speed.mfu is not None else ""
    return (
        f"{significant(speed.samples_per_s)} samples/s, {significant(speed.tokens_per_s)} "
        f"tokens/s{_interval_text(evidence, 'tokens_per_s', significant)}, "
        f"{micro_steps if speed.counts_micro_steps else ''}"
        f"{format_duration(speed.step_s)} an optimizer step{mfu}"
    )


def _interval_text(
    evidence: Prediction | Measurement, name: str, text: Callable[[float], str]
) -> str:
    """The 90 % interval of a quantity that is estimated, after the quantity itself."""
    if name not in evidence.intervals:
        return ""
    low, high = evidence.intervals[name]
    return f" (90 %: {format_range(low, high, text)})"


def _limit_text(breakdown_s: Mapping[str, float]) -> str:
    total_s = sum(breakdown_s.values())
    if total_s <= 0:
        return ""
    name, seconds = max(breakdown_s.items(), key=lambda item: item[1])
    return f"{name} ({seconds / total_s:.0%} of the time)"


def _print_breakdown(title: str, parts: Mapping[str, float], text: object) -> None:
    assert callable(text)
    total = sum(parts.values())
    rows = [
        (str(name).replace("_", " "), text(value), f"{value / total:.1%}")
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value
    ]
    print_rows([title, "", "share"], [*rows, ("total", text(total), "")], right=("", "share"))
