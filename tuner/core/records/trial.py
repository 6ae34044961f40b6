"""The outcome of a trial, and its line in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.kinds import SAYS_NOTHING, Exhausted, Source, Status
from tuner.core.records.configuration import Configuration
from tuner.core.records.evidence import Measurement, MemoryBudget, Prediction
from tuner.core.records.reading import Bytes, Quantity, read

JOURNAL_SCHEMA = 1
"""Version of the record that `TrialRecord.to_dict` writes."""

PROCESSOR = "cpu"
"""The "GPU type" of trials on a processor, whose ranks share its memory."""


def utc_now() -> str:
    """The time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one trial of a configuration, with its numbers.

    A real trial has a `measurement`, one on an emulated device an `emulation` of the same form.
    When memory ran out, `phase` and `requested_bytes` say where and at what size, and `exhausted`
    which memory (None in older records: the device's). `stage` is the stage that ended a trial
    before the others had run.
    """

    status: Status
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    phase: str | None = None
    requested_bytes: Bytes | None = None
    message: str = ""
    duration_s: Quantity = 0.0
    exhausted: Exhausted | None = None
    stage: str | None = None
    emulation: Measurement | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers in the field of another kind."""
        for name, kind in (("measurement", Source.MEASURED), ("emulation", Source.EMULATED)):
            found: Measurement | None = getattr(self, name)
            if found is not None and found.source is not kind:
                raise ValueError(f"{name} holds numbers that are {found.source}")

    @classmethod
    def of(cls, status: Status, ran: Measurement, **more: Any) -> Outcome:
        """The outcome of a trial that ran, with `ran` in the field of its kind."""
        return cls(status, **more).with_ran(ran)

    @classmethod
    def predicted(cls, prediction: Prediction) -> Outcome:
        """The outcome if the prediction is right; the margin does not matter, as in a trial."""
        memory, limit_bytes = prediction.memory, prediction.budget.limit_bytes
        if memory.device_bytes <= limit_bytes:
            return cls(Status.OK, prediction=prediction)
        return cls(
            Status.OOM,
            prediction=prediction,
            phase=memory.peak_phase,
            message=f"needs {memory.device_bytes} bytes of memory, the GPU has {limit_bytes}",
        )

    @property
    def ran(self) -> Measurement | None:
        """The numbers of the steps, on a device or an emulated one."""
        return self.measurement or self.emulation

    def with_ran(self, ran: Measurement | None) -> Outcome:
        """A copy with other numbers of the steps, in the field of their kind."""
        emulated = ran is not None and ran.source is Source.EMULATED
        return replace(
            self, measurement=None if emulated else ran, emulation=ran if emulated else None
        )

    @property
    def limiting_stage(self) -> str | None:
        """The stage that decides the fit: it ended the trial, or needs the most memory."""
        return self.stage or (self.evidence.limiting_stage if self.evidence else None)

    @property
    def device_ran_out(self) -> bool:
        """True if the trial ran out of the device's memory, not the host's."""
        return self.status is Status.OOM and self.exhausted is not Exhausted.HOST

    @property
    def evidence(self) -> Prediction | Measurement | None:
        """The numbers to rank by: measured ones, else emulated ones, else predicted ones."""
        return self.measurement or self.emulation or self.prediction


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One line of the journal: everything needed to show, rank or repeat one trial."""

    trial_id: str
    space: str
    gpu: str
    gpu_memory_bytes: Bytes
    configuration: Configuration
    outcome: Outcome
    seed: int
    started_at: str
    """UTC, ISO 8601 with seconds."""
    versions: Mapping[str, str]
    searcher: str
    run_id: str = ""
    device: str | None = None
    """Exact name of the device of the trial; it may be a larger GPU that stood in for the type."""
    memory_limit_bytes: Bytes | None = None
    """The limit of the trial on `device`; None for all of its memory."""
    margin_bytes: Bytes | None = None
    """The memory to keep free; None if only the prediction has it."""
    verification: bool = False
    """True for a verification: longest lengths, more steps, an evaluation, a save."""
    emulated_device: str | None = None
    """Name of the GPU that was emulated for the trial."""
    node: str | None = None
    """Name of the cluster's node on which the trial ran; None on the machine of the search."""
    verified_by: TrialRecord | None = None
    """The verification of this prediction on an emulated device. It changes none of the numbers.
    In journals it is a record of its own (see `tuner.searches.journal.latest`)."""

    @classmethod
    def of(
        cls, space: str, gpu: Gpu, configuration: Configuration, outcome: Outcome, **more: Any
    ) -> TrialRecord:
        """A record of a trial that begins now, unless `more` has other values."""
        rest = {"trial_id": "", "seed": 0, "versions": {}, "searcher": "", **more}
        rest.setdefault("started_at", utc_now())
        return cls(
            space=space,
            gpu=gpu.id,
            gpu_memory_bytes=gpu.memory_bytes,
            configuration=configuration,
            outcome=outcome,
            **rest,
        )

    def alike(self, other: TrialRecord, *, versions: bool = True) -> bool:
        """True if both ran in the same place, and with the same `versions` of libraries."""
        mine, others = (
            (
                one.device,
                one.emulated_device,
                one.memory_limit_bytes,
                one.gpu_memory_bytes,
                dict(one.versions) if versions else one.versions.get("model"),
            )
            for one in (self, other)
        )
        return mine == others

    @property
    def verified(self) -> bool:
        """True if the configuration passed its verification with the margin."""
        if self.verified_by is not None:
            return self.verified_by.verified
        return self.verification and self.fits

    @property
    def verified_source(self) -> Source | None:
        """The source of the verification that it passed; None without one."""
        if not self.verified:
            return None
        return self.source if self.verified_by is None else self.verified_by.source

    @property
    def is_refuted(self) -> bool:
        """True if a verification showed that it does not fit."""
        check = self.verified_by
        return check is not None and not check.fits and check.outcome.status not in SAYS_NOTHING

    @property
    def source(self) -> Source:
        """The place of the trial, however it ended: a device, an emulated one, or none."""
        if self.device is not None or self.outcome.measurement is not None:
            return Source.MEASURED
        if self.emulated_device is not None or self.outcome.emulation is not None:
            return Source.EMULATED
        return Source.PREDICTED

    @property
    def budget(self) -> MemoryBudget:
        """The memory of one rank: that of a GPU, or its part of a processor's memory."""
        limit_bytes = self.gpu_memory_bytes // self._sharing
        if self.margin_bytes is not None:
            return MemoryBudget(limit_bytes, self.margin_bytes // self._sharing)
        predicted = self.outcome.prediction
        return MemoryBudget(limit_bytes, predicted.budget.margin_bytes if predicted else 0)

    @property
    def _sharing(self) -> int:
        """Ranks that share the memory: those on a processor."""
        ran, predicted = self.outcome.ran, self.outcome.prediction
        if self.gpu != PROCESSOR:
            return 1
        if ran is not None:
            return max(1, len(ran.ranks))
        if predicted is None or predicted.budget.limit_bytes <= 0:
            return 1
        return max(1, round(self.gpu_memory_bytes / predicted.budget.limit_bytes))

    @property
    def fits(self) -> bool:
        """True if the trial ended well and left the margin free on every rank."""
        if self.outcome.status is not Status.OK or self.outcome.stage is not None:
            return False  # the other stages are unknown
        if self.is_refuted:
            return False
        if self.outcome.ran is not None:
            return self.budget.fits(self.outcome.ran.memory.device_bytes)
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
            **({"emulated": outcome.emulation.to_dict()} if outcome.emulation else {}),
            "seed": self.seed,
            "started_at": self.started_at,
            "searcher": self.searcher,
            "device": self.device,
            **({"emulated_device": self.emulated_device} if self.emulated_device else {}),
            **({"node": self.node} if self.node else {}),
            "memory_limit_bytes": self.memory_limit_bytes,
            "margin_bytes": self.margin_bytes,
            "verification": self.verification,
            **({"verified_by": self.verified_by.trial_id} if self.verified_by else {}),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialRecord:
        """The inverse of `to_dict`. Raises TypeError or ValueError when malformed."""

        def part(cls: type[Prediction] | type[Measurement], name: str) -> Any:
            found = data.get(name)
            return cls.from_dict(found) if found else None

        ran = {
            "prediction": part(Prediction, "predicted"),
            "measurement": part(Measurement, "measured"),
            "emulation": part(Measurement, "emulated"),
        }
        outcome = read(Outcome, {**data, **ran})
        # `verified_by` is the name of another record in a journal.
        record = read(cls, {**data, "outcome": outcome, "verified_by": None})
        versions = {  # older journals have the build: "2.13.0+cpu"
            name: version if name == "model" else version.partition("+")[0]
            for name, version in record.versions.items()
        }
        return replace(record, versions=versions)
