"""A space of 17,280 configurations that all fit, and a runner that answers at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from tuner.core.records import (
    Configuration,
    KnobValue,
    Measurement,
    Memory,
    MemoryBudget,
    Outcome,
    Prediction,
    Source,
    Speed,
    Status,
)
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import PLAIN, Instructions

GPU: Gpu = get_gpu("a100_80gb")
DEVICE = "Simulated GPU"

KNOBS: Mapping[str, tuple[int | bool | str, ...]] = {
    "micro_batch": (1, 2, 4, 8, 16),
    "lora_rank": (8, 16, 32, 64, 128, 192, 256, 384),
    "max_length": (512, 768, 1024, 1536, 2048, 3072, 4096, 8192),
    "precision": ("bf16", "int8", "nf4"),
    "gradient_checkpointing": (True, False),
    "optimizer": ("paged_adamw_8bit", "adamw_8bit", "adamw_torch"),
    "attention": ("eager", "sdpa", "flash"),
}
"""The knobs of the space qlora27b, with as many values as 10,000 different trials take."""


class ScaleSpace:
    """All combinations of `KNOBS`."""

    name = "scale"

    @property
    def knobs(self) -> Mapping[str, SimpleNamespace]:
        """By name, with their values."""
        return {name: SimpleNamespace(values=values) for name, values in KNOBS.items()}

    @property
    def memory(self) -> Mapping[str, tuple[KnobValue, ...]]:
        """None is declared."""
        return {}

    def configurations(self, where: Sequence[str] = ()) -> Iterator[Configuration]:
        """In a fixed order; there are no conditions."""
        for values in itertools.product(*KNOBS.values()):
            yield Configuration(dict(zip(KNOBS, values, strict=True)))


def predicted(configuration: Configuration) -> Prediction:
    """Memory and speed by a formula, in which everything fits."""
    batch, length, rank = (
        int(str(configuration[name])) for name in ("micro_batch", "max_length", "lora_rank")
    )
    weights = {"bf16": 0.3, "int8": 0.2, "nf4": 0.1}[str(configuration["precision"])]
    activations = 0.4 * batch * length / (16 * 8192)
    if configuration["gradient_checkpointing"]:
        activations /= 3
    states = {"adamw_torch": 2e-4, "adamw_8bit": 1e-4}.get(str(configuration["optimizer"]), 0.0)
    size = int(GPU.memory_bytes * (weights + activations + states * rank))
    rate = 10.0 * batch / (batch + 2) * 1024 / length
    rate *= {"eager": 0.8, "sdpa": 1.0, "flash": 1.1}[str(configuration["attention"])]
    rate *= 0.75 if configuration["gradient_checkpointing"] else 1.0
    step_s = 32 / rate
    loaded = int(GPU.memory_bytes * weights)
    memory = Memory(size, size, size, loaded, {}, "backward", {})
    speed = Speed(step_s, 1 / step_s, rate, rate * length, None, {"matmul": step_s})
    return Prediction(MemoryBudget(GPU.memory_bytes), memory, speed, 1, 2, GPU.id, "formula")


def scattered(configuration: Configuration, prediction: Prediction) -> Outcome:
    """What a real trial might measure: the prediction, with 3 % that the configuration decides."""
    speed, memory = prediction.speed, prediction.memory
    factor = 1.05 + 0.06 * (int(configuration.key[:4], 16) / 65535 - 0.5)
    rate = speed.samples_per_s / factor
    measurement = Measurement(
        memory=memory,
        speed=Speed(speed.step_s * factor, 1 / (speed.step_s * factor), rate,
                    speed.tokens_per_s / factor, None),
        trainable_params=1,
        total_params=2,
        device=DEVICE,
        steps=5,
        loss_finite=True,
        samples_per_s_interval=(0.998 * rate, 1.002 * rate),
    )  # fmt: skip
    return Outcome(Status.OK, measurement=measurement, duration_s=1.0)


@dataclass(frozen=True)
class Instant:
    """A runner, and the factory of it: a trial is over after `trial_s` of doing nothing."""

    trial_s: float = 0.0
    source: Source = Source.MEASURED

    def __call__(self) -> Instant:
        """Itself."""
        return self

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """What a formula says."""
        if self.trial_s:
            time.sleep(self.trial_s)
        return scattered(configuration, predicted(configuration))
