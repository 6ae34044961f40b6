"""Trials whose truth is known: a closed form of a GPU, on nodes that say which GPU they have.

A node's GPU is what its environment says, so that a node can have another one than its
resource is named after, and lose it while trials run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tune_fakes import closed_form

from tuner.core.nvml import DeviceIdentity
from tuner.core.records import (
    Configuration,
    KnobValue,
    Outcome,
    Source,
    Speed,
    TrialRecord,
)
from tuner.core.units import GIB
from tuner.searches.front import pareto_front
from tuner.searches.request import SearchRequest
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import PLAIN, Instructions
from tuner.trial.factories import VerifiedFactory

DEVICE = "TUNER_CHAOS_DEVICE"
"""Environment variable of a node: the id of the GPU type that it really has."""
LOST = "TUNER_CHAOS_LOST"
"""Environment variable of a node: a file; once it exists, the node's GPU has fallen off the bus."""
NODE = "TUNER_CHAOS_NODE"
"""Environment variable of a node: its name."""

SETTINGS: Mapping[str, tuple[object, ...]] = {
    "micro_batch": (1, 2, 4, 8, 16, 32),
    "lora_rank": (16, 128),
    "gradient_checkpointing": (True, False),
}


@dataclass(frozen=True)
class ChaosSpace:
    """All combinations of the knobs at an effective batch of 32."""

    name: str = "chaos"
    values: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: dict(SETTINGS))

    @property
    def knobs(self) -> dict[str, SimpleNamespace]:
        """The knobs by name."""
        return {name: SimpleNamespace(values=values) for name, values in self.values.items()}

    @property
    def memory(self) -> Mapping[str, tuple[KnobValue, ...]]:
        """None is declared."""
        return {}

    def configurations(self, where: Sequence[str] = ()) -> Iterator[Configuration]:
        """All of them, in the same order each time."""
        for combination in itertools.product(*self.values.values()):
            settings = dict(zip(self.values, combination, strict=True))
            yield Configuration({**settings, "grad_accum": 32 // settings["micro_batch"]})  # type: ignore[operator]


def outcome_of(configuration: Configuration, gpu: Gpu) -> Outcome:
    """What a trial comes to. The larger the GPU, the more of the space fits."""
    batch, rank = configuration["micro_batch"], configuration["lora_rank"]
    saves = configuration["gradient_checkpointing"]
    total = int(GIB * (9 + (0.5 if saves else 2.5) * batch + rank / 64))
    rate = 10 * batch / (batch + 4) * (0.75 if saves else 1.0) - rank / 200
    speed = Speed(
        step_s=32 / rate, it_per_s=rate / 32, samples_per_s=rate, tokens_per_s=512 * rate, mfu=None
    )
    return closed_form(total, speed, gpu)


@dataclass(frozen=True)
class ChaosFactory:
    """Makes the runner of one GPU type; picklable.

    Each trial that begins leaves a file in the folder `log`, named after its node and process.
    From the trial number `held_from` of a type on, each waits until `gate` exists.
    """

    gpu_id: str
    log: Path
    sleep_s: float
    gate: Path | None = None
    held_from: int = 0

    def __call__(self) -> ChaosRunner:
        """See `RunnerFactory`."""
        return ChaosRunner(self)


@dataclass
class ChaosRunner:
    """Runs trials by their closed form."""

    factory: ChaosFactory
    source: Source = Source.PREDICTED

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """See `TrialRunner`; raises what NVML raises where the GPU is gone."""
        self._note(configuration)
        time.sleep(self.factory.sleep_s)
        self._wait_at_gate()
        if (lost := os.environ.get(LOST)) and Path(lost).exists():
            import pynvml

            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return outcome_of(configuration, get_gpu(self.factory.gpu_id))

    def _wait_at_gate(self) -> None:
        gate, begun = self.factory.gate, self.factory.log.glob(f"{self.factory.gpu_id}-*")
        if gate is not None and len(list(begun)) >= self.factory.held_from:
            while not gate.exists():
                time.sleep(0.02)

    def _note(self, configuration: Configuration) -> None:
        node = os.environ.get(NODE, "local")
        name = f"{self.factory.gpu_id}-{node}-{os.getpid()}-{time.time_ns()}"
        (self.factory.log / name).write_text(configuration.key)


def device_here() -> DeviceIdentity | None:
    """What NVML would say of the GPU of this node."""
    if DEVICE not in os.environ:
        return None
    gpu = get_gpu(os.environ[DEVICE])
    return DeviceIdentity(gpu.device_names[0], gpu.memory_bytes, (8, 6), "570.0")


def request_of(
    gpu_id: str, folder: Path, *, sleep_s: float, held_from: int | None = None, **changes: object
) -> SearchRequest:
    """A search of the whole space for one GPU type; its trials are noted in `folder`/log.

    Trials from number `held_from` on wait until the file `gate_of(folder, gpu_id)` exists.
    """
    gpu = get_gpu(gpu_id)
    (folder / "log").mkdir(parents=True, exist_ok=True)
    gate = None if held_from is None else gate_of(folder, gpu_id)
    factory = VerifiedFactory(
        ChaosFactory(gpu_id, folder / "log", sleep_s, gate, held_from or 0),
        gpu.device_names,
        (gpu.memory_bytes,),
        identify=device_here,
    )
    settings: dict[str, object] = {
        "space": ChaosSpace(),
        "gpu": gpu,
        "runner_factory": factory,
        "searcher": "random",
        "trials": 1000,
        "versions": {"tuner": "chaos"},
        "resources_per_trial": {"GPU": 1, gpu_id: 1, "CPU": 1},
    }
    return SearchRequest(**(settings | changes))  # type: ignore[arg-type]


def gate_of(folder: Path, gpu_id: str) -> Path:
    """The file that trials of a type may wait for."""
    return folder / f"{gpu_id}-go-on"


def true_front(gpu_id: str) -> set[str]:
    """The keys of the configurations on the front of the whole space."""
    gpu = get_gpu(gpu_id)
    records = [
        TrialRecord(
            trial_id=configuration.key,
            space="chaos",
            gpu=gpu.id,
            gpu_memory_bytes=gpu.memory_bytes,
            configuration=configuration,
            outcome=outcome_of(configuration, gpu),
            seed=0,
            started_at="2026-01-01T00:00:00+00:00",
            versions={},
            searcher="grid",
        )
        for configuration in ChaosSpace().configurations()
    ]
    return front_of(records)


def front_of(records: Sequence[TrialRecord]) -> set[str]:
    """The keys of the configurations on the front of these records."""
    return {record.configuration.key for record in pareto_front(records)}
