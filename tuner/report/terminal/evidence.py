"""The numbers of one configuration, their breakdown, and predicted beside measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tuner.core.records import (
    Measurement,
    Memory,
    MemoryBudget,
    Prediction,
    Source,
    TrialRecord,
    Verdict,
)
from tuner.core.units import format_duration, format_range, format_size, significant
from tuner.report.terminal.render import count, echo, print_fields
from tuner.report.terminal.tables import print_rows
from tuner.report.terminal.verdict import UNKNOWN_SPEED, Answer, Field, room_text, versions_text
from tuner.searches.facts import SpaceFacts, StageRow, ranks_text, rows_of

Evidence = Prediction | Measurement
NO_VERSIONS: Mapping[str, str] = MappingProxyType({})


def print_evidence(evidence: Evidence, budget: MemoryBudget) -> None:
    """The numbers of `evidence_fields`, and the parts of memory and time."""
    print_fields(evidence_fields(evidence, budget))
    print_parts(evidence.source, evidence.memory, _breakdown_s(evidence))


def evidence_fields(
    evidence: Evidence, budget: MemoryBudget, versions: Mapping[str, str] = NO_VERSIONS
) -> list[Field]:
    """The verdict, memory, speed and parameters.

    `budget` is the memory that there is, of a rank where there are several, and the margin;
    `versions` are the releases that a prediction stands for.
    """
    size = _interval_text(evidence, "device_bytes", format_size)
    return [
        ("source", str(evidence.source)),
        ("releases", versions_text(versions)),
        ("verdict", verdict_text(evidence, budget)),
        ("memory", peak_text(evidence.memory, size)),
        ("ranks", ranks_text(evidence)),
        ("speed", UNKNOWN_SPEED if evidence.is_compiled else _speed_text(evidence)),
        ("limited by", limit_text(_breakdown_s(evidence))),
        (
            "parameters",
            f"{count(evidence.trainable_params)} trainable of {count(evidence.total_params)}",
        ),
        # It ends with the settings and the layers that the numbers know nothing of.
        ("method", evidence.method),
    ]


def print_parts(source: str, memory: Memory, breakdown_s: Mapping[str, float]) -> None:
    """Tables of the memory at the peak and of the time of a step, by purpose."""
    if memory.breakdown:
        echo()
        print_breakdown(f"device memory at the peak ({source})", memory.breakdown, format_size)
    if breakdown_s:
        echo()
        print_breakdown(
            f"time of one optimizer step ({source})",
            {_IN_WORDS.get(name, name): seconds for name, seconds in breakdown_s.items()},
            format_duration,
        )


def _breakdown_s(evidence: Evidence) -> Mapping[str, float]:
    return {} if evidence.is_compiled else evidence.speed.breakdown_s


_IN_WORDS = {
    "launch": "launch: the GPU waits for the host",
    "recompute": "recompute: forward again, checkpointed",
    "dequantise": "dequantise: unpack weights",
    "elementwise": "elementwise: norms, copies, masks",
}
"""Parts of a step's time that need a word more."""


def verdict_text(evidence: Evidence, budget: MemoryBudget) -> str:
    """The verdict on numbers, with the arithmetic behind it."""
    used_bytes, ends = evidence.memory.device_bytes, evidence.intervals.get("device_bytes")
    is_bound = isinstance(evidence, Prediction) and evidence.verdict is Verdict.UNKNOWN
    verdict = Verdict.UNKNOWN if is_bound else budget.verdict(used_bytes, ends)
    return room_text(Answer(verdict, used_bytes, budget, ""))


def peak_text(memory: Memory, interval: str = "") -> str:
    """Device memory, and what PyTorch's allocator has of it."""
    text = (
        f"device memory {format_size(memory.device_bytes)}{interval}, "
        f"peak of {format_size(memory.peak_allocated_bytes)} allocated and "
        f"{format_size(memory.peak_reserved_bytes)} reserved, in the {memory.peak_phase} phase"
    )
    if memory.paged_bytes:
        text += f"; {format_size(memory.paged_bytes)} more in managed memory of the optimizer"
    return text


def _speed_text(evidence: Evidence) -> str:
    speed = evidence.speed
    micro_steps = f"{significant(speed.it_per_s)} micro-steps/s, "
    mfu = f", MFU {speed.mfu:.0%}" if speed.mfu is not None else ""
    return (
        f"{significant(speed.samples_per_s)} samples/s, {significant(speed.tokens_per_s)} "
        f"tokens/s{_interval_text(evidence, 'tokens_per_s', significant)}, "
        f"{micro_steps if speed.counts_micro_steps else ''}"
        f"{format_duration(speed.step_s)} an optimizer step{mfu}"
    )


def _interval_text(evidence: Evidence, name: str, text: Callable[[float], str]) -> str:
    """The 90 % interval of a quantity that is estimated, after the quantity itself."""
    if name not in evidence.intervals:
        return ""
    low, high = evidence.intervals[name]
    return f" (90 %: {format_range(low, high, text)})"


def limit_text(breakdown_s: Mapping[str, float]) -> str:
    """The kind of work that takes most of a step; empty when unknown."""
    total_s = sum(breakdown_s.values())
    if total_s <= 0:
        return ""
    name, seconds = max(breakdown_s.items(), key=lambda item: item[1])
    return f"{name} ({seconds / total_s:.0%} of the time)"


_NOTHING = 1e-6
"""Parts of less than this share of the whole are not shown."""


def print_breakdown(title: str, parts: Mapping[str, float], text: Callable[[float], str]) -> None:
    """A table of the parts of a whole, the largest first, with their shares."""
    total = sum(parts.values())
    rows = [
        (name.replace("_", " "), text(value), f"{value / total:.1%}")
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value > _NOTHING * total
    ]
    print_rows([title, "", "share"], [*rows, ("total", text(total), "")], right=("", "share"))


def print_comparison(
    predicted: Prediction, ran: Measurement | None, source: Source = Source.MEASURED
) -> None:
    """A table of every number that is predicted or of a trial that ran, with their ratio.

    `source` says of what kind the numbers of the trial are, or would have been.
    """
    rows = []
    for label, value, text in _compared_numbers(predicted, ran):
        said, seen = value(predicted), value(ran) if ran else None
        if said is not None or seen is not None:
            ratio = f"{said / seen:.3f}" if said and seen else ""
            rows.append([label, *("" if n is None else text(n) for n in (said, seen)), ratio])
    columns = ("predicted", str(source), "ratio")
    print_rows(["", *columns], rows, right=columns)


def print_ran(ran: Measurement) -> None:
    """A table of every number of a trial that ran, where nothing was predicted."""
    source = str(ran.source)
    numbers = ((label, value(ran), text) for label, value, text in _compared_numbers(None, ran))
    print_rows(["", source], [(label, text(n)) for label, n, text in numbers if n], right=[source])


def _compared_numbers(
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
    yield (
        "micro-steps/s",
        lambda e: e.speed.it_per_s if e.speed.counts_micro_steps else None,
        significant,
    )
    yield "MFU", lambda e: e.speed.mfu, lambda share: f"{share:.1%}"


def params_text(ran: Measurement) -> str:
    """The number of trained parameters; empty if your own code doesn't report it."""
    if not ran.total_params:
        return ""
    return f"{count(ran.trainable_params)} trainable of {count(ran.total_params)}"


def more_text(ran: Measurement) -> str:
    """Numbers that only trials have."""
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
    "cpu_threads": lambda n: f"{n} processor threads",
    "weights": lambda which: f"weights {which}",
    "lengths": lambda which: f"lengths {which}",
}


_STAGE_NUMBERS = ("memory", "samples/s", "step", "time")


def print_stages(record: TrialRecord, space: SpaceFacts) -> None:
    """Every stage of a trial with its memory, speed and time; nothing where there are none."""
    evidence = record.outcome.evidence
    if evidence is not None:
        print_rows_of_stages(rows_of(record, space), str(evidence.source))


def print_rows_of_stages(rows: Sequence[StageRow], source: str) -> None:
    """The stages as a table."""
    if not rows:
        return
    echo(f"\nStages ({source})")
    print_rows(
        ["", "stage", *_STAGE_NUMBERS, "sets"],
        [
            (
                "!" if not row.fits else "*" if row.hardest else "",
                row.label,
                format_size(row.numbers.device_bytes),
                significant(row.numbers.samples_per_s),
                format_duration(row.numbers.step_s),
                row.time_text,
                row.settings,
            )
            for row in rows
        ],
        right=_STAGE_NUMBERS,
    )
    echo("* needs the most memory and decides what fits")
    if not all(row.fits for row in rows):
        echo("! does not fit")
