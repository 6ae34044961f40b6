"""Time and price of a training run, by the number of GPUs, and intervals as results show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Measurement, Prediction, TrialRecord
from tuner.core.setup.distributed_knobs import MACHINES, strategy
from tuner.core.units import format_duration, format_range, format_size, significant
from tuner.searches.facts import SpaceFacts, counted_gpus, paid_gpus, rounded, seconds_of
from tuner.searches.front import PAIR_ERROR, evidence_of, fastest_first
from tuner.space.lengths import steps_per_epoch

PREDICTED_PERCENT = 90
"""Percent of runs that lie within a prediction's interval (benchmarks/accuracy/coverage.csv)."""
MEASURED_PERCENT = 95
"""Confidence in percent of the interval of the mean rate over the timed steps of one trial."""


@dataclass(frozen=True, slots=True)
class ShownInterval:
    """An interval that holds the true number in `percent` of 100 cases."""

    low: float
    high: float
    percent: int

    def text(self, shown: Callable[[float], str]) -> str:
        """For people: "90 %: 0.21 to 0.33"."""
        return f"{self.percent} %: {format_range(self.low, self.high, shown)}"

    def to_dict(self) -> dict[str, float | int]:
        """JSON types."""
        return {"low": rounded(self.low), "high": rounded(self.high), "percent": self.percent}


def interval_dict(name: str, interval: ShownInterval | None) -> dict[str, Any]:
    """The interval under the key `<name>_interval`; an empty dict without one."""
    return {f"{name}_interval": interval.to_dict()} if interval else {}


@dataclass(frozen=True, slots=True)
class RunCost:
    """Time and money for one pass over the training data, and for the whole run.

    Money is for all `gpus` of a training, `price_usd_per_hour` for one. Only training counts: no
    evaluation, no checkpoints, no start-up. Money is None if the GPU's price is unknown; `run_s`
    and `run_usd` are None if the number of epochs is. With several `stages`, an epoch is one epoch
    of each stage, and `epochs` is None if the stages differ in it.
    """

    examples: int
    epochs: float | None
    steps_per_epoch: int | None
    epoch_s: float
    run_s: float | None
    epoch_usd: float | None
    run_usd: float | None
    price_usd_per_hour: float | None
    price_date: str | None
    stages: int = 0
    gpus: int = 1

    @property
    def epochs_text(self) -> str:
        """The number of epochs of a run, for people."""
        if self.epochs is None:
            return "all epochs of the stages"
        return f"{self.epochs:g} epoch" + ("" if self.epochs == 1 else "s")

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "examples": self.examples,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "time_per_epoch": format_duration(self.epoch_s),
            "time_per_epoch_s": round(self.epoch_s, 3),
            "time_per_run": format_duration(self.run_s) if self.run_s is not None else None,
            "time_per_run_s": round(self.run_s, 3) if self.run_s is not None else None,
            "cost_per_epoch_usd": round(self.epoch_usd, 4) if self.epoch_usd is not None else None,
            "cost_per_run_usd": round(self.run_usd, 4) if self.run_usd is not None else None,
            "gpus": self.gpus,
            "price_usd_per_hour": self.price_usd_per_hour,
            "price_date": str(self.price_date) if self.price_date is not None else None,
        }


def run_cost(record: TrialRecord, space: SpaceFacts, gpu: Gpu) -> RunCost | None:
    """Time and money of an epoch and a run; None without numbers or the number of examples."""
    evidence = record.outcome.evidence
    return cost_of(evidence, record.configuration, space, gpu) if evidence else None


def cost_of(
    evidence: Prediction | Measurement, configuration: Configuration, space: SpaceFacts, gpu: Gpu
) -> RunCost | None:
    """Time and money at a speed; None without a rate or the number of examples."""
    times = _seconds(evidence, space)
    if times is None:
        return None
    epoch_s, run_s = times
    price = gpu.price_usd_per_hour
    gpus = paid_gpus(configuration, gpu)
    hourly = None if price is None else price * gpus
    batch = configuration.get("effective_batch")
    parts = [s.examples or 0 for s in space.stages] or [space.examples or 0]
    epochs = {stage.epochs for stage in space.stages} or {space.epochs}
    step = batch if isinstance(batch, int) and batch > 0 else None
    return RunCost(
        examples=sum(parts),
        epochs=epochs.pop() if len(epochs) == 1 else None,
        steps_per_epoch=sum(steps_per_epoch(n, step) for n in parts) if step else None,
        epoch_s=epoch_s,
        run_s=run_s,
        epoch_usd=epoch_s / 3600 * hourly if hourly is not None else None,
        run_usd=run_s / 3600 * hourly if hourly is not None and run_s is not None else None,
        price_usd_per_hour=price,
        price_date=gpu.price_date,
        stages=len(space.stages),
        gpus=gpus,
    )


def _seconds(
    evidence: Prediction | Measurement, space: SpaceFacts
) -> tuple[float, float | None] | None:
    """Seconds of an epoch and of a run (None: unknown); None without a rate or examples."""
    if space.stages:
        return seconds_of(evidence.stages, space)
    rate = evidence.speed.samples_per_s
    if space.examples is None or rate <= 0:
        return None
    epoch_s = space.examples / rate
    return epoch_s, epoch_s * space.epochs if space.epochs is not None else None


@dataclass(frozen=True, slots=True)
class ByGpus:
    """The fastest configuration that fits with one number of GPUs and one way to share the work.

    `epoch_s` and `epoch_usd` are None if the number of examples or the GPU's price is unknown.
    `on_front` is True if no other row dominates this one in speed and cost.
    """

    record: TrialRecord
    gpus: int
    way: str
    machines: int
    samples_per_s: float
    device_bytes: int
    source: str
    epoch_s: float | None
    epoch_usd: float | None
    on_front: bool = False

    @property
    def gpu_s_per_sample(self) -> float:
        """GPU-seconds per sample, which determine its cost."""
        return self.gpus / self.samples_per_s

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """JSON types, with the settings in `names`."""
        configuration = self.record.configuration
        return {
            "gpus": self.gpus,
            "distributed": self.way or None,
            "machines": self.machines,
            "source": self.source,
            "peak_device_bytes": self.device_bytes,
            "samples_per_s": rounded(self.samples_per_s),
            "time_per_epoch_s": None if self.epoch_s is None else round(self.epoch_s, 3),
            "cost_per_epoch_usd": None if self.epoch_usd is None else round(self.epoch_usd, 4),
            "on_front": self.on_front,
            "settings": {n: v for n, v in configuration.to_dict().items() if n in names},
        }


def by_gpus(fitting: Iterable[TrialRecord], space: SpaceFacts, gpu: Gpu) -> tuple[ByGpus, ...]:
    """A row for each number of GPUs and way to share the work that has a fitting configuration.

    Sorted by the number of GPUs; empty if all configurations use the same number.
    """
    fastest: dict[tuple[int, int, str], TrialRecord] = {}
    for record in sorted(fitting, key=fastest_first):
        fastest.setdefault(_key(record.configuration), record)
    if len({gpus for gpus, _, _ in fastest}) < 2:
        return ()
    rows = [_row(key, fastest[key], space, gpu) for key in sorted(fastest)]
    return tuple(_with_front(row, rows) for row in rows)


def _key(configuration: Configuration) -> tuple[int, int, str]:
    gpus = counted_gpus(configuration)
    number: KnobValue = configuration.get(MACHINES, 1)
    way = strategy(configuration) if gpus > 1 else ""
    return gpus, number if isinstance(number, int) else 1, way


def _row(key: tuple[int, int, str], record: TrialRecord, space: SpaceFacts, gpu: Gpu) -> ByGpus:
    evidence, cost = evidence_of(record), run_cost(record, space, gpu)
    gpus, number, way = key
    return ByGpus(
        record,
        gpus,
        way,
        number,
        evidence.speed.samples_per_s,
        evidence.memory.device_bytes,
        str(evidence.source),
        cost.epoch_s if cost else None,
        cost.epoch_usd if cost else None,
    )


def _with_front(row: ByGpus, rows: Sequence[ByGpus]) -> ByGpus:
    beaten = any(
        other.samples_per_s >= row.samples_per_s
        and other.gpu_s_per_sample <= row.gpu_s_per_sample
        and (other.samples_per_s, other.gpu_s_per_sample)
        != (row.samples_per_s, row.gpu_s_per_sample)
        for other in rows
    )
    return replace(row, on_front=not beaten)


COLUMNS = ("", "GPUs", "memory", "samples/s", "epoch", "USD/epoch")


def row_texts(row: ByGpus) -> tuple[str, ...]:
    """The cells of `COLUMNS`, for people."""
    many = f" in {row.machines} machines" if row.machines > 1 else ""
    return (
        "<" if row.on_front else "",
        f"{row.gpus} {row.way}".strip() + many,
        format_size(row.device_bytes),
        significant(row.samples_per_s),
        "?" if row.epoch_s is None else format_duration(row.epoch_s),
        "?" if row.epoch_usd is None else f"{row.epoch_usd:,.2f}",
    )


def trade_text(rows: Sequence[ByGpus]) -> str:
    """The gain from more GPUs in a sentence, with a warning if the costs are too close to tell."""
    front = [row for row in rows if row.on_front]
    cheapest = min(front, key=lambda row: row.gpu_s_per_sample)
    fastest = max(front, key=lambda row: row.samples_per_s)
    if cheapest is fastest:
        return f"{_named(fastest)} is both the fastest and the cheapest"
    faster = fastest.samples_per_s / cheapest.samples_per_s
    dearer = fastest.gpu_s_per_sample / cheapest.gpu_s_per_sample - 1
    text = (
        f"{_named(cheapest)} is the cheapest, {_named(fastest)} {faster:.2f} x as fast for "
        f"{dearer:.1%} more money"
    )
    if dearer < PAIR_ERROR and cheapest.source == "predicted":
        text += f" (predictions do not tell costs within {PAIR_ERROR:.0%} apart)"
    return text


def _named(row: ByGpus) -> str:
    count = "1 GPU" if row.gpus == 1 else f"{row.gpus} GPUs"
    return f"{count} with {row.way}" if row.way else count
