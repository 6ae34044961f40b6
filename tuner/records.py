"""The frozen values that travel between the layers, and nothing else.

Sizes are in bytes and times in seconds; every physical quantity carries its unit in its
name. A `Prediction` comes from a model of a GPU, a `Measurement` from a device; a
`TrialRecord` holds either or both and says which.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KnobValue = bool | int | float | str | tuple[str, ...]

JOURNAL_SCHEMA = 1
"""Version of the record that `TrialRecord.to_dict` writes."""


class Configuration(Mapping[str, KnobValue]):
    """One complete setting of every knob, fixed and derived value: an immutable mapping.

    Lists become tuples, so that a configuration can be hashed. Equality and `key` do not
    depend on the order of the names.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[str, KnobValue] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in sorted(values.items())
        }
        text = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify these values, the same in every process."""
        return self._key

    def replace(self, **changes: Any) -> Configuration:
        """A copy with some values changed or added."""
        return Configuration({**self._values, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types (tuples become lists)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._values.items()}

    def __getitem__(self, name: str) -> KnobValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._key == other._key

    def __repr__(self) -> str:
        return f"Configuration({self._values!r})"


class Source(enum.StrEnum):
    """Where a number comes from."""

    PREDICTED = "predicted"
    MEASURED = "measured"


class Status(enum.StrEnum):
    """How a trial ended. Out of memory is an outcome, not an error."""

    OK = "ok"
    OOM = "oom"
    THRASHING = "thrashing"
    TIMEOUT = "timeout"
    NON_FINITE = "non_finite"
    CRASHED = "crashed"
    INVALID = "invalid"
    INTERRUPTED = "interrupted"


class MemoryCategory(enum.StrEnum):
    """What a byte of device memory is used for at the peak."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    TEMPORARY = "temporary"
    ALLOCATOR_OVERHEAD = "allocator_overhead"
    """Reserved by PyTorch's caching allocator and not used at the peak: free blocks, and rests
    of blocks that were not worth splitting off."""
    CONTEXT_AND_WORKSPACE = "context_and_workspace"
    """CUDA context, loaded kernels and what the driver keeps: outside PyTorch's counters."""


class Exhausted(enum.StrEnum):
    """Which memory ran out in a trial that ended with `Status.OOM`."""

    DEVICE = "device"
    """The memory of the device that trains: what a search learns limits from."""
    HOST = "host"
    """The machine's main memory, beside a GPU that may have had room."""


class Phase(enum.StrEnum):
    """The stage of a trial in which memory is used, or ran out."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    """Of a verification: evaluating and saving a checkpoint, after the steps."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a training step on one GPU, in bytes.

    `device_bytes` is what NVML would show for the process (`peak_reserved_bytes` plus CUDA
    context); `breakdown` splits `device_bytes` by `MemoryCategory` and adds up to it exactly.
    `loaded_bytes` is allocated once model, adapters and optimizer exist and before the first
    step. `paged_bytes` is managed memory of paged optimizers, which torch does not count and
    the driver can move to the host: it is not part of `device_bytes`.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    loaded_bytes: int
    phase_peak_bytes: Mapping[str, int]
    peak_phase: str
    breakdown: Mapping[str, int]
    paged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a configuration trains, at one fixed effective batch.

    `step_s` is one optimizer step (all its micro-steps), `it_per_s` counts micro-steps as
    the progress bars of trainers do, `tokens_per_s` counts tokens that are not padding.
    `mfu` is model FLOPs per second over the GPU's dense peak in the compute precision, with
    recomputation of checkpointed activations not counted; None where the peak is unknown.
    `breakdown_s` splits `step_s` by kind of work and adds up to it.
    """

    step_s: float
    it_per_s: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    breakdown_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage of a training that has several: its peak of device memory, and its speed."""

    device_bytes: int
    samples_per_s: float
    step_s: float


def hardest_stage(stages: Mapping[str, StageNumbers]) -> str | None:
    """The stage that needs most memory; None without stages."""
    return max(stages, key=lambda name: stages[name].device_bytes, default=None)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model of the GPU says of one configuration; nothing here was measured.

    `fits` is decided on `memory.device_bytes` plus `margin_bytes` against `limit_bytes`, the
    memory of the GPU. Of a training in `stages` the memory is that of the stage that needs most,
    and the speed that of all of them, one after another.
    """

    fits: bool
    limit_bytes: int
    margin_bytes: int
    memory: Memory
    speed: Speed
    trainable_params: int
    total_params: int
    gpu: str
    method: str
    """How it was predicted, for example "trace of two optimizer steps, full depth"."""
    source: Source = Source.PREDICTED
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lower and upper end of 90 % intervals, of `device_bytes`, `peak_reserved_bytes`,
    `peak_allocated_bytes`, `step_s` and `tokens_per_s`. Empty in records of older versions."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """The factor that measured trials put on a quantity, of those named in `intervals`; the
    model of the GPU alone said the quantity divided by it. Empty without such trials."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Each stage, of a training that has some; empty otherwise."""

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needs most memory; None where there are no stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object; the keys that scripts read are part of the contract."""
        data = _plain(self)
        speed = data.pop("speed")
        del data["stages"]
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {
            **data,
            **speed,
            "source": str(self.source),
            "intervals": intervals,
            **_stages_dict(self.stages),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_dict`; keys that are not known are ignored."""
        added_later = {"intervals", "corrections", "stages"}
        intervals = data.get("intervals", {})
        return cls(
            memory=_build(Memory, data["memory"]),
            speed=_build(Speed, data),
            source=Source(data["source"]),
            intervals={name: tuple(ends) for name, ends in intervals.items()},
            corrections=data.get("corrections", {}),
            stages=_read_stages(data),
            **{k: data[k] for k in _scalar_names(cls) if k not in added_later},
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a real device did in one trial. `device` is the exact device name.

    `steps` are the timed optimizer steps, after `warmup_steps` that were not timed. `memory` is
    of all steps, its `phase_peak_bytes` of the warm-up. Everything with a default of None is
    unknown where it is None: not asked of the device, or the device does not tell.
    """

    memory: Memory
    speed: Speed
    trainable_params: int
    total_params: int
    device: str
    steps: int
    loss_finite: bool
    source: Source = Source.MEASURED
    warmup_steps: int | None = None
    load_s: float | None = None
    """From the first touch of the device until model, adapters and optimizer exist."""
    timed_micro_steps: int | None = None
    """Micro-steps of the timed steps together. Where they are fewer than `steps` whole ones have,
    `speed` was put together from micro-steps and updates, and a note says so."""
    first_step_s: float | None = None
    """The first optimizer step, of two micro-steps at most: kernels are loaded or compiled and
    optimizer state is made."""
    samples_per_s_interval: tuple[float, float] | None = None
    """95 % confidence interval of the mean rate over the timed steps."""
    stopped_by: str | None = None
    """What ended the timed steps: "interval" (narrow enough), "budget", "loss", or, before
    that, "memory" (beyond what may be recommended) or "dominated" (surely slower than a trial
    that takes no more memory)."""
    evaluation_peak_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """Of a verification: the peak allocated while it evaluated and saved, and the size saved."""
    padded_tokens_per_s: float | None = None
    """Tokens a second with padding counted; `speed.tokens_per_s` counts none."""
    data_wait_fraction: float | None = None
    """Share of the timed steps in which the training process waited for its next batch."""
    num_alloc_retries: int | None = None
    """How often PyTorch's allocator had to give cached blocks back to find memory."""
    timed_alloc_retries: int | None = None
    """How many of these were in the timed steps, after caches had filled."""
    nvml_process_bytes: int | None = None
    nvml_device_bytes: int | None = None
    """Device memory in use by this process, and by all, as the driver counts it."""
    gpu_utilization: float | None = None
    """Share of time in which a kernel ran, 0 to 1, as the driver counts it."""
    power_w: float | None = None
    energy_j_per_sample: float | None = None
    energy_source: str | None = None
    """"counter" (the driver's energy counter) or "sampled power"."""
    memory_limit_bytes: int | None = None
    """What the trial was allowed where a larger device stood in for a smaller one."""
    weights: str | None = None
    """"synthetic", or the checkpoint that was trained."""
    lengths: str | None = None
    """"full" where every sequence had the longest length, "data" where they had the data's."""
    cpu_threads: int | None = None
    notes: tuple[str, ...] = ()
    """What a reader should know, such as a knob that cannot act on this model."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Each stage, as in `Prediction`: `memory` is that of the one that needs most."""

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needed most memory; None where there are no stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object, shaped as `Prediction.to_dict`."""
        data = _plain(self)
        speed = data.pop("speed")
        del data["stages"]
        interval = self.samples_per_s_interval
        return {
            **data,
            **speed,
            "source": str(self.source),
            "samples_per_s_interval": list(interval) if interval else None,
            "notes": list(self.notes),
            **_stages_dict(self.stages),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`; what older versions did not write has its default."""
        known = {k: data[k] for k in _scalar_names(cls) if k in data or k not in _ADDED_LATER}
        interval = known.get("samples_per_s_interval")
        return cls(
            memory=_build(Memory, data["memory"]),
            speed=_build(Speed, data),
            source=Source(data["source"]),
            **{
                **known,
                "samples_per_s_interval": tuple(interval) if interval else None,
                "notes": tuple(known.get("notes", ())),
                "stages": _read_stages(data),
            },
        )


_ADDED_LATER = frozenset(
    f.name
    for f in dataclasses.fields(Measurement)
    if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running one configuration once, whatever happened.

    `prediction` of a simulated trial is the full trace; a real trial carries `measurement`.
    `phase` and `requested_bytes` say where and at what size memory ran out, when it did, and
    `exhausted` which memory; None in records of older versions, which knew the device's only.
    `stage` is the stage that ended a trial of several stages before the others had run.
    """

    status: Status
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    phase: str | None = None
    requested_bytes: int | None = None
    message: str = ""
    duration_s: float = 0.0
    exhausted: Exhausted | None = None
    stage: str | None = None

    @property
    def limiting_stage(self) -> str | None:
        """The stage that decides whether it fits: that which ended it, or needs most memory."""
        return self.stage or (self.evidence.limiting_stage if self.evidence else None)

    @property
    def device_ran_out(self) -> bool:
        """Whether it says something of the device's memory that the trial ran out of memory."""
        return self.status is Status.OOM and self.exhausted is not Exhausted.HOST

    @property
    def evidence(self) -> Prediction | Measurement | None:
        """The numbers to rank by: measured ones where they exist, else predicted ones."""
        return self.measurement or self.prediction


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One line of the journal: everything needed to show, rank or repeat one trial."""

    trial_id: str
    space: str
    gpu: str
    gpu_memory_bytes: int
    configuration: Configuration
    outcome: Outcome
    seed: int
    started_at: str
    """UTC, ISO 8601 with seconds."""
    versions: Mapping[str, str]
    searcher: str
    run_id: str = ""
    device: str | None = None
    """Exact name of the device on which the trial ran, None for a simulated one. Another name
    than those of the GPU type is that of a larger GPU which stood in for it."""
    memory_limit_bytes: int | None = None
    """Memory that the trial was allowed on `device`; None where it was allowed all of it."""
    margin_bytes: int | None = None
    """Memory that is to stay free; None where only the prediction says it."""
    verification: bool = False
    """Whether the trial was a verification: longest lengths, more steps, an evaluation, a save."""

    @property
    def verified(self) -> bool:
        """Whether the configuration passed its verification with the margin."""
        return self.verification and self.fits

    @property
    def source(self) -> Source:
        """Whether the trial ran on a device, however it ended there, or was simulated."""
        ran = self.device is not None or self.outcome.measurement is not None
        return Source.MEASURED if ran else Source.PREDICTED

    @property
    def reserve_bytes(self) -> int:
        """The margin in bytes; 0 where nobody asked for one."""
        if self.margin_bytes is not None:
            return self.margin_bytes
        return self.outcome.prediction.margin_bytes if self.outcome.prediction else 0

    @property
    def fits(self) -> bool:
        """Whether the trial ended well and its memory, with the margin, is inside the GPU."""
        if self.outcome.status is not Status.OK or self.outcome.stage is not None:
            return False  # of the other stages nothing is known
        if self.outcome.measurement is not None:
            used_bytes = self.outcome.measurement.memory.device_bytes
            return used_bytes + self.reserve_bytes <= self.gpu_memory_bytes
        return self.outcome.prediction is not None and self.outcome.prediction.fits

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; `schema` says which version of this record it is."""
        outcome = self.outcome
        return {
            "schema": JOURNAL_SCHEMA,
            "trial_id": self.trial_id,
            "run_id": self.run_id,
            "space": self.space,
            "gpu": self.gpu,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "configuration": self.configuration.to_dict(),
            "status": str(outcome.status),
            "phase": outcome.phase,
            "requested_bytes": outcome.requested_bytes,
            "exhausted": outcome.exhausted,
            "stage": outcome.stage,
            "message": outcome.message,
            "duration_s": outcome.duration_s,
            "predicted": outcome.prediction.to_dict() if outcome.prediction else None,
            "measured": outcome.measurement.to_dict() if outcome.measurement else None,
            "seed": self.seed,
            "started_at": self.started_at,
            "searcher": self.searcher,
            "device": self.device,
            "memory_limit_bytes": self.memory_limit_bytes,
            "margin_bytes": self.margin_bytes,
            "verification": self.verification,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialRecord:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError when malformed."""
        predicted, measured = data["predicted"], data["measured"]
        return cls(
            trial_id=data["trial_id"],
            run_id=data["run_id"],
            space=data["space"],
            gpu=data["gpu"],
            gpu_memory_bytes=data["gpu_memory_bytes"],
            configuration=Configuration(data["configuration"]),
            outcome=Outcome(
                status=Status(data["status"]),
                prediction=Prediction.from_dict(predicted) if predicted else None,
                measurement=Measurement.from_dict(measured) if measured else None,
                phase=data["phase"],
                requested_bytes=data["requested_bytes"],
                message=data["message"],
                duration_s=data["duration_s"],
                # Added after the first journals were written.
                exhausted=Exhausted(data["exhausted"]) if data.get("exhausted") else None,
                stage=data.get("stage"),
            ),
            seed=data["seed"],
            started_at=data["started_at"],
            versions=data["versions"],
            searcher=data["searcher"],
            # Added after the first journals were written.
            device=data.get("device"),
            memory_limit_bytes=data.get("memory_limit_bytes"),
            margin_bytes=data.get("margin_bytes"),
            verification=data.get("verification", False),
        )


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as nested plain dictionaries (mappings are copied)."""
    return {
        f.name: _plain(value) if dataclasses.is_dataclass(value) else _copied(value)
        for f in dataclasses.fields(record)
        for value in (getattr(record, f.name),)
    }


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _build(cls: type[Any], data: Mapping[str, Any]) -> Any:
    return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data})


def _scalar_names(cls: type[Any]) -> list[str]:
    nested = {"memory", "speed", "source"}
    return [f.name for f in dataclasses.fields(cls) if f.name not in nested]


def _stages_dict(stages: Mapping[str, StageNumbers]) -> dict[str, Any]:
    """The stages as JSON types; nothing where there are none."""
    if not stages:
        return {}
    numbers = {name: dataclasses.asdict(stage) for name, stage in stages.items()}
    return {"limiting_stage": hardest_stage(stages), "stages": numbers}


def _read_stages(data: Mapping[str, Any]) -> dict[str, StageNumbers]:
    return {name: _build(StageNumbers, stage) for name, stage in data.get("stages", {}).items()}
