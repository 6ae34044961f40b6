"""What it costs to train with a configuration: time and money of an epoch, and of the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Measurement, Prediction, TrialRecord
from tuner.core.units import format_duration
from tuner.searches.facts import SpaceFacts
from tuner.searches.ranks import paid_gpus
from tuner.searches.stages import seconds_of


@dataclass(frozen=True, slots=True)
class RunCost:
    """Time and money for one pass over the training data, and for the whole run.

    Money is for all `gpus` of a training, `price_usd_per_hour` for one. Pure training: no
    evaluation, no checkpoints, no start-up. Money is None when the price of the GPU is unknown,
    and what concerns the run when the number of epochs is. Of a training in several `stages` an
    epoch is one of each, and `epochs` is None where they differ in it.
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
        """How many epochs a run has, for people."""
        if self.epochs is None:
            return "all epochs of the stages"
        return f"{self.epochs:g} epoch" + ("" if self.epochs == 1 else "s")


def run_cost(record: TrialRecord, space: SpaceFacts, gpu: Gpu) -> RunCost | None:
    """Time and money of an epoch and a run; None without numbers or number of examples."""
    evidence = record.outcome.evidence
    return cost_of(evidence, record.configuration, space, gpu) if evidence else None


def cost_of(
    evidence: Prediction | Measurement,
    configuration: Configuration,
    space: SpaceFacts,
    gpu: Gpu,
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
        steps_per_epoch=sum(math.ceil(n / step) for n in parts) if step else None,
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
    """Seconds of an epoch and of a run (None: unknown); None without what they follow from."""
    if space.stages:
        return seconds_of(evidence.stages, space)
    rate = evidence.speed.samples_per_s
    if space.examples is None or rate <= 0:
        return None
    epoch_s = space.examples / rate
    return epoch_s, epoch_s * space.epochs if space.epochs is not None else None


def cost_dict(cost: RunCost | None) -> dict[str, Any] | None:
    """JSON types."""
    if cost is None:
        return None
    return {
        "examples": cost.examples,
        "epochs": cost.epochs,
        "steps_per_epoch": cost.steps_per_epoch,
        "time_per_epoch": format_duration(cost.epoch_s),
        "time_per_epoch_s": round(cost.epoch_s, 3),
        "time_per_run": format_duration(cost.run_s) if cost.run_s is not None else None,
        "time_per_run_s": round(cost.run_s, 3) if cost.run_s is not None else None,
        "cost_per_epoch_usd": round(cost.epoch_usd, 4) if cost.epoch_usd is not None else None,
        "cost_per_run_usd": round(cost.run_usd, 4) if cost.run_usd is not None else None,
        "gpus": cost.gpus,
        "price_usd_per_hour": cost.price_usd_per_hour,
        "price_date": str(cost.price_date) if cost.price_date is not None else None,
    }
