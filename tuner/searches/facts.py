"""A frozen extract of a search space, its stages and its ranks, from which results are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.core.expressions import settings_text
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Measurement,
    MemoryBudget,
    Prediction,
    StageNumbers,
    TrialRecord,
)
from tuner.core.records.trial import PROCESSOR
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.core.units import format_duration, format_size
from tuner.space import DataFacts, SearchSpace, Stage, TokenLengths


@dataclass(frozen=True, slots=True)
class _StageFacts:
    """A stage of a training: its own settings, examples and epochs (None: unknown)."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    examples: int | None = None
    epochs: float | None = None

    def settings(self, configuration: Mapping[str, Any]) -> str:
        """The stage's own settings, for people."""
        own = {n: configuration.get(f"{self.name}.{n}", value) for n, value in self.values.items()}
        return settings_text(own, between=", ")

    def run_s(self, samples_per_s: float) -> float | None:
        """Seconds of all its epochs, or of one epoch if their number is unknown."""
        if self.examples is None or samples_per_s <= 0:
            return None
        return self.examples * (1.0 if self.epochs is None else self.epochs) / samples_per_s


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """A search space as results show it.

    `examples` and `epochs` describe one training run; None if the space does not give them.
    `baseline` holds the settings that the gain is measured against. `knobs` are the names that
    the search varies, in the order in which they are shown; `defaults` are the names that keep a
    default value that the space did not choose.
    """

    name: str
    description: str = ""
    model: str | None = None
    knobs: tuple[str, ...] = ()
    examples: int | None = None
    epochs: float | None = None
    baseline: Mapping[str, Any] | None = None
    defaults: frozenset[str] = frozenset()
    capacity: tuple[str, ...] = ()
    """Knobs whose larger values make a better model, but never a faster or smaller one."""
    objectives: tuple[str, ...] = ()
    """Objectives of its front, by name; the first is primary. Empty: throughput and memory."""
    lengths: TokenLengths | None = None
    """Token lengths of the examples."""
    stages: tuple[_StageFacts, ...] = ()
    """The stages of the training, in their order; empty if it has no stages."""

    @classmethod
    def of(cls, space: SearchSpace) -> SpaceFacts:
        """The extract of a loaded search space."""
        return cls(
            name=space.name,
            description=space.description,
            model=space.model,
            knobs=tuple(space.knobs),
            examples=space.data.examples,
            epochs=space.data.epochs,
            baseline=space.baseline or None,
            defaults=space.defaulted & space.fixed.keys(),
            capacity=tuple(name for name in space.knobs if space.terms[name].capacity),
            objectives=tuple(objective.metric for objective in space.objectives),
            lengths=space.data.token_lengths,
            stages=tuple(_stage(stage, space.data) for stage in space.stages),
        )


def _stage(stage: Stage, data: DataFacts) -> _StageFacts:
    examples = data.examples if stage.examples is None else stage.examples
    epochs = data.epochs if stage.epochs is None else stage.epochs
    return _StageFacts(stage.name, stage.values, examples, epochs)


OF_ONE = "all memory is of one of them"


def counted_gpus(configuration: Configuration) -> int:
    """Number of GPUs, or ranks on a processor, that train together.

    1 if the user's own code uses the name for something else.
    """
    value = configuration.get(GPUS_PER_TRIAL, 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def paid_gpus(configuration: Configuration, gpu: Gpu) -> int:
    """Number of GPUs to pay for: ranks on a processor share one."""
    return 1 if gpu.id == PROCESSOR else counted_gpus(configuration)


def times_text(count: int, name: str) -> str:
    """The name with its count, "2 x NVIDIA A40"; a single one is the name alone."""
    return f"{count} x {name}" if count > 1 else name


def gpus_text(configuration: Configuration, gpu: Gpu) -> str:
    """The GPU's name; for several, also their count and a note that memory is per GPU."""
    count = counted_gpus(configuration)
    if count == 1:
        return gpu.name
    several = f"{count} ranks on" if gpu.id == PROCESSOR else f"{count} x"
    return f"{several} {gpu.name}, {OF_ONE}"


def ranks_text(evidence: Prediction | Measurement) -> str:
    """Device memory of each rank that was measured; empty for one GPU."""
    return ", ".join(format_size(rank.device_bytes) for rank in evidence.ranks)


def rounded(value: float) -> float:
    """Six significant digits: more would claim an accuracy that no prediction has."""
    return float(f"{value:.6g}")


MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class StageRow:
    """Consecutive stages with the same numbers, as one row.

    `settings` are the stage's own settings. `run_s` is the time of all epochs of each stage in
    seconds; None if its number of examples is unknown.
    """

    names: tuple[str, ...]
    settings: str
    numbers: StageNumbers
    run_s: float | None
    hardest: bool
    fits: bool

    @property
    def label(self) -> str:
        """The names of the stages, shortened if there are more than `MAX_NAMES`."""
        first, *rest = self.names
        return ", ".join(self.names) if len(self.names) <= MAX_NAMES else f"{first} to {rest[-1]}"

    @property
    def time_text(self) -> str:
        """The time of each stage, for people."""
        each = " each" if len(self.names) > 1 else ""
        return "?" if self.run_s is None else format_duration(self.run_s) + each


def rows_of(record: TrialRecord, space: SpaceFacts) -> list[StageRow]:
    """The stages of a trial; see `stage_rows`. Empty without numbers."""
    evidence, configuration = record.outcome.evidence, record.configuration
    if evidence is None:
        return []
    return stage_rows(evidence, configuration, space, record.budget)


def stage_rows(
    evidence: Prediction | Measurement,
    configuration: Configuration,
    space: SpaceFacts,
    budget: MemoryBudget,
) -> list[StageRow]:
    """The stages in their order; equal ones that follow each other share a row."""
    facts = {stage.name: stage for stage in space.stages}
    rows: list[StageRow] = []
    for name, numbers in evidence.stages.items():
        stage = facts.get(name, _StageFacts(name))
        settings = stage.settings(configuration)
        names: tuple[str, ...] = (name,)
        if rows and (rows[-1].numbers, rows[-1].settings) == (numbers, settings):
            names = (*rows.pop().names, name)
        rows.append(
            StageRow(
                names=names,
                settings=settings,
                numbers=numbers,
                run_s=stage.run_s(numbers.samples_per_s),
                hardest=evidence.limiting_stage in names,
                fits=budget.fits(numbers.device_bytes),
            )
        )
    return rows


def limit_text(
    evidence: Prediction | Measurement, configuration: Configuration, space: SpaceFacts
) -> str:
    """The stage that needs most memory: "in stage1 (n_negatives=24), the hardest of 5 stages".

    Empty where there are no stages.
    """
    name = evidence.limiting_stage
    if name is None:
        return ""
    stage = next((s for s in space.stages if s.name == name), _StageFacts(name))
    settings = stage.settings(configuration)
    text = f"in {name} ({settings})" if settings else f"in {name}"
    return f"{text}, the hardest of {len(evidence.stages)} stages"


def stages_dict(record: TrialRecord, space: SpaceFacts) -> dict[str, Any]:
    """The stages as JSON types; nothing where there are none."""
    evidence = record.outcome.evidence
    if evidence is None or not evidence.stages:
        return {}
    return {
        "limiting_stage": evidence.limiting_stage,
        "stages": {
            name: {
                "settings": row.settings,
                "peak_device_memory": format_size(row.numbers.device_bytes),
                "peak_device_bytes": row.numbers.device_bytes,
                "samples_per_s": rounded(row.numbers.samples_per_s),
                "step_s": rounded(row.numbers.step_s),
                "time_s": None if row.run_s is None else round(row.run_s, 3),
            }
            for row in rows_of(record, space)
            for name in row.names
        },
    }


def seconds_of(
    stages: Mapping[str, StageNumbers], space: SpaceFacts
) -> tuple[float, float | None] | None:
    """Seconds of one pass over the data of every stage, and of all passes (None: unknown).

    None if the examples or the numbers of a stage are unknown.
    """
    epoch_s = run_s = 0.0
    # A stage without a number of epochs has one, if another stage gives a number.
    epochs_known = any(stage.epochs is not None for stage in space.stages)
    for stage in space.stages:
        numbers = stages.get(stage.name)
        if numbers is None or stage.examples is None or numbers.samples_per_s <= 0:
            return None
        seconds = stage.examples / numbers.samples_per_s
        epoch_s += seconds
        run_s += seconds * (1.0 if stage.epochs is None else stage.epochs)
    return epoch_s, run_s if epochs_known else None
