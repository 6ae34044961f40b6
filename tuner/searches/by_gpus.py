"""What an epoch takes and costs on each number of GPUs: the trade that renting them is about.

With the number given, the fastest that fits is the cheapest too: all of its GPUs are paid for all
of its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, TrialRecord
from tuner.core.setup.distributed_knobs import MACHINES, strategy
from tuner.core.units import format_duration, format_size, significant
from tuner.searches.cost import cost_of
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import fastest_first
from tuner.searches.interval import rounded
from tuner.searches.ranks import counted_gpus
from tuner.searches.undecided import PAIR_ERROR


@dataclass(frozen=True, slots=True)
class ByGpus:
    """The fastest that fits of one number of GPUs and one way to share the work.

    `epoch_s` and `epoch_usd` are None where the examples of the space, or the GPU's price, are not
    known. `on_front` says that no other number or way is both faster and cheaper.
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
        """Seconds of GPUs that a sample takes, which its price follows from."""
        return self.gpus / self.samples_per_s

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """JSON types, with the settings of these names."""
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
    """A row for each number of GPUs, and way to share the work, of which one fits.

    From one GPU on; empty where all have the same number.
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
    evidence = record.outcome.evidence
    assert evidence is not None  # without numbers a trial does not fit
    cost = cost_of(evidence, record.configuration, space, gpu)
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
    """What more GPUs buy, in a sentence; and when predictions cannot tell which is cheaper."""
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
