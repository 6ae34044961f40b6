"""A closed-form GPU for tests of the search: real signatures, no model, milliseconds a trial."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from device_fakes import measurement_of

from tuner.core.errors import UnavailableError
from tuner.core.nvml import DeviceLostError
from tuner.core.records import (
    Configuration,
    Memory,
    MemoryBudget,
    MemoryCategory,
    Outcome,
    Phase,
    Prediction,
    Source,
    Speed,
    Status,
    TrialRecord,
)
from tuner.core.units import GIB
from tuner.searches.options import SearchOptions
from tuner.searches.progress import Progress
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import PLAIN, Instructions

GPU: Gpu = get_gpu("a6000")


def request_of(**values) -> SearchRequest:
    """A request without a verification; its options are given beside its own fields."""
    own, options = ({e.name for e in dataclasses.fields(c)} for c in (SearchRequest, SearchOptions))
    given = {name: values.pop(name) for name in values.keys() & options - own}
    return SearchRequest(options=SearchOptions(**{"verify": False, **given}), **values)


KNOBS = {
    "micro_batch": (1, 2, 4, 8, 16, 32),
    "lora_rank": (16, 32, 64, 128),
    "precision": ("nf4", "bf16"),
    "gradient_checkpointing": (True, False),
}


@dataclass(frozen=True)
class FakeSpace:
    """All combinations of the knobs but for one corner, at an effective batch of 32."""

    name: str = "fake"
    workload: str = ""
    values: dict[str, tuple[object, ...]] = field(default_factory=lambda: dict(KNOBS))
    memory: dict[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def knobs(self) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(values=values) for name, values in self.values.items()}

    def configurations(self, where: Sequence[str] = ()) -> Iterator[Configuration]:
        for combination in itertools.product(*self.values.values()):
            settings = dict(zip(self.values, combination, strict=True))
            if settings["precision"] == "bf16" and settings["micro_batch"] > 8:
                continue  # a hole that samplers fall into
            settings["grad_accum"] = 32 // settings["micro_batch"]
            yield Configuration(settings)


SMALL_SPACE = FakeSpace(
    name="small",
    values={
        "micro_batch": (1, 2, 4),
        "lora_rank": (16,),
        "precision": ("nf4",),
        "gradient_checkpointing": (True, False),
    },
)


def device_bytes(configuration: Configuration) -> int:
    base = {"nf4": 16, "bf16": 38}[configuration["precision"]]
    per_sample = 0.6 if configuration["gradient_checkpointing"] else 3.0
    return int(
        GIB * (base + per_sample * configuration["micro_batch"] + configuration["lora_rank"] / 64)
    )


def samples_per_s(configuration: Configuration) -> float:
    return tokens_per_s(configuration) / sample_tokens(configuration)


def sample_tokens(configuration: Configuration) -> int:
    """Without padding: different ones, so that tokens/s and samples/s have another order."""
    return 512 if configuration["micro_batch"] <= 4 else 2048


def tokens_per_s(configuration: Configuration) -> float:
    batch = configuration["micro_batch"]
    speed = 1000 * batch / (batch + 2) * (0.75 if configuration["gradient_checkpointing"] else 1)
    return speed * (1.2 if configuration["precision"] == "bf16" else 1) - configuration["lora_rank"]


def outcome_of(configuration: Configuration, gpu: Gpu = GPU) -> Outcome:
    speed = Speed(
        step_s=1.0,
        it_per_s=1.0,
        samples_per_s=samples_per_s(configuration),
        tokens_per_s=tokens_per_s(configuration),
        mfu=None,
    )
    return closed_form(device_bytes(configuration), speed, gpu)


def closed_form(total: int, speed: Speed, gpu: Gpu) -> Outcome:
    """The outcome of a trial that needs `total` bytes: out of memory above those of `gpu`."""
    prediction = Prediction(
        budget=MemoryBudget(gpu.memory_bytes, gpu.memory_bytes // 50),
        memory=Memory(
            peak_allocated_bytes=total,
            peak_reserved_bytes=total,
            device_bytes=total,
            loaded_bytes=total // 2,
            phase_peak_bytes={Phase.BACKWARD: total},
            peak_phase=Phase.BACKWARD,
            breakdown={MemoryCategory.WEIGHTS: total},
        ),
        speed=speed,
        trainable_params=1,
        total_params=2,
        gpu=gpu.id,
        method="closed form",
    )
    return Outcome(
        status=Status.OOM if total > gpu.memory_bytes else Status.OK,
        prediction=prediction,
        phase=Phase.BACKWARD if total > gpu.memory_bytes else None,
    )


@dataclass
class FakeRunner:
    """Notes each start in a file of its own, and does what the factory says."""

    factory: FakeFactory
    source: Source = Source.PREDICTED

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        if self.factory.log:
            note = self.factory.log / f"{time.time_ns()}-{os.getpid()}"
            note.write_text(configuration.key)
        time.sleep(self.factory.sleep_s)
        if self._is_lost():
            raise DeviceLostError("GPU 0 does not answer its driver")
        if configuration.key in self.factory.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if configuration.key in self.factory.raises:
            raise RuntimeError("a bug in the runner")
        outcome = outcome_of(configuration)
        threads = os.environ["OMP_NUM_THREADS"]
        return Outcome(outcome.status, outcome.prediction, message=f"threads={threads}")

    def _is_lost(self) -> bool:
        log, after = self.factory.log, self.factory.lost_after
        return log is not None and after is not None and len(list(log.iterdir())) > after


@dataclass(frozen=True)
class FakeFactory:
    """Picklable. Each trial leaves a file with its key in the folder `log`.

    `kills` are keys of configurations that end their worker, `raises` of those that meet a
    bug of the runner. After `lost_after` trials the GPU is lost.
    """

    log: Path | None = None
    sleep_s: float = 0.0
    kills: frozenset[str] = frozenset()
    raises: frozenset[str] = frozenset()
    unavailable: bool = False
    lost_after: int | None = None

    def __call__(self) -> FakeRunner:
        if self.unavailable:
            raise UnavailableError("no torch on this worker", hint="install it")
        return FakeRunner(self)


@dataclass(frozen=True)
class MeasuredFakes:
    """Measures what `outcome_of` predicts; leaves a file in `log` when it is closed."""

    log: Path | None = None

    source = Source.MEASURED

    def __call__(self) -> MeasuredFakes:
        return self

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        prediction = outcome_of(configuration).prediction
        assert prediction is not None
        return Outcome(Status.OK, measurement=measurement_of(prediction, device="Testium 9"))

    def close(self) -> None:
        if self.log is not None:
            (self.log / f"closed-{os.getpid()}").touch()


def state_of(
    asked: SearchRequest,
    *,
    on_record: Callable[[TrialRecord], None] = lambda record: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> SearchState:
    """A search without Ray."""
    from tuner.searches.ray.driver import proposer_of

    return SearchState(asked, proposer_of(asked), on_record=on_record, on_progress=on_progress)


def drive(
    state: SearchState, run: Callable[[Configuration, Instructions], Outcome]
) -> list[Configuration]:
    """Run the trials of a search one after another; returns what was tried."""
    tried: list[Configuration] = []
    while (configuration := state.propose(name := f"t{len(tried)}")) is not None:
        state.start(name)
        state.end(name, run(configuration, state.instructions(name)))
        tried.append(configuration)
        assert len(tried) < 5000, "it goes on and on"
    return tried


def record_of(
    configuration: Configuration,
    outcome: Outcome | None = None,
    *,
    space: str = "fake",
    gpu: Gpu = GPU,
    versions: dict[str, str] | None = None,
) -> TrialRecord:
    return TrialRecord(
        trial_id=f"old-{configuration.key[:4]}",
        space=space,
        gpu=gpu.id,
        gpu_memory_bytes=gpu.memory_bytes,
        configuration=configuration,
        outcome=outcome or outcome_of(configuration, gpu),
        seed=0,
        started_at="2026-01-01T00:00:00+00:00",
        versions=versions or {"tuner": "1"},
        searcher="tpe",
    )
