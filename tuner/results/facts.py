"""What the results need to know of a search space and a GPU, and no more.

The results layer reads a space's and a GPU's attributes through two protocols; it does not
load them. `SpaceFacts` is the frozen extract that every output is written from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.expressions import show


class GpuLike(Protocol):
    """The attributes of `tuner.gpus.Gpu` that results use."""

    @property
    def id(self) -> str:
        """The catalogue id, "a6000"."""
        ...

    @property
    def name(self) -> str:
        """The name that people read."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The memory that torch reports, in bytes."""
        ...

    @property
    def price_usd_per_hour(self) -> float | None:
        """What an hour costs in US dollars; None when unknown."""
        ...

    @property
    def price_date(self) -> str | None:
        """When that price was read."""
        ...


class DataLike(Protocol):
    """The facts about the training data that results use."""

    @property
    def examples(self) -> int | None:
        """Training examples of one epoch."""
        ...

    @property
    def epochs(self) -> float | None:
        """Passes over the data in one run."""
        ...

    @property
    def token_lengths(self) -> LengthsLike | None:
        """How long the examples are; None when unknown."""
        ...


class LengthsLike(Protocol):
    """The facts about token lengths that results use."""

    @property
    def max(self) -> int:
        """Tokens of the longest example."""
        ...

    @property
    def points(self) -> Sequence[tuple[float, float]]:
        """(length, share of examples up to it); empty where that is not known."""
        ...


class TermLike(Protocol):
    """What results use of what is said of a knob."""

    @property
    def capacity(self) -> bool:
        """Whether more of it makes a better model."""
        ...


class StageLike(Protocol):
    """What results use of a stage of a space."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def values(self) -> Mapping[str, Any]:
        """What has another value in it."""
        ...

    @property
    def examples(self) -> int | None:
        """Its training examples; None where they are those of the space."""
        ...

    @property
    def epochs(self) -> float | None:
        """Passes over them; None where they are those of the space."""
        ...


class ObjectiveLike(Protocol):
    """What results use of an objective of a space."""

    @property
    def metric(self) -> str:
        """Its name."""
        ...


class SpaceLike(Protocol):
    """The attributes of a `SearchSpace` that results use."""

    @property
    def name(self) -> str:
        """The name that people read."""
        ...

    @property
    def description(self) -> str:
        """What the space is for, in a line."""
        ...

    @property
    def model(self) -> str | None:
        """The model id; None where the workload brings its own."""
        ...

    @property
    def knobs(self) -> Mapping[str, Any]:
        """What the search moves, by name."""
        ...

    @property
    def data(self) -> DataLike:
        """Facts about the training data."""
        ...

    @property
    def terms(self) -> Mapping[str, TermLike]:
        """What is known of each knob."""
        ...

    @property
    def objectives(self) -> Sequence[ObjectiveLike]:
        """What is to be large or small."""
        ...

    @property
    def stages(self) -> Sequence[StageLike]:
        """The parts of the training, in their order; empty where there is one only."""
        ...

    @property
    def baseline(self) -> Mapping[str, Any] | None:
        """The settings that the gain is counted from."""
        ...

    @property
    def fixed(self) -> Mapping[str, Any]:
        """What has one value in every configuration, by name."""
        ...

    @property
    def defaulted(self) -> frozenset[str]:
        """Names that the file of the space does not mention."""
        ...


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage of a training: what it changes, and how much it trains; None is unknown."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    examples: int | None = None
    epochs: float | None = None

    def settings(self, configuration: Mapping[str, Any]) -> str:
        """What has a value of its own in this stage, for people."""
        own = {n: configuration.get(f"{self.name}.{n}", value) for n, value in self.values.items()}
        return ", ".join(f"{name}={show(value)}" for name, value in own.items())

    def run_s(self, samples_per_s: float) -> float | None:
        """Seconds of all its epochs, of one where their number is unknown."""
        if self.examples is None or samples_per_s <= 0:
            return None
        return self.examples * (1.0 if self.epochs is None else self.epochs) / samples_per_s


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """A search space as results show it.

    `examples` and `epochs` describe one training run; None when the space does not say.
    `baseline` holds the settings that the gain is counted from. `knobs` are the names that
    the search moves, in the order in which they are shown; `defaults` those that keep one value
    which the space did not choose.
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
    """Knobs of which more makes a better model, and never a faster or smaller one."""
    objectives: tuple[str, ...] = ()
    """What its front is over, by name; the first one decides. Empty: throughput and memory."""
    longest_tokens: int | None = None
    length_points: tuple[tuple[float, float], ...] = ()
    """Cumulative distribution of token lengths: (length, share of examples up to it)."""
    stages: tuple[StageFacts, ...] = ()
    """The parts of the training, in their order; empty where there is one only."""

    @classmethod
    def of(cls, space: SpaceLike) -> SpaceFacts:
        """The extract of a loaded search space."""
        lengths = space.data.token_lengths
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
            longest_tokens=lengths.max if lengths is not None else None,
            length_points=tuple(lengths.points) if lengths is not None else (),
            stages=tuple(_stage(stage, space.data) for stage in space.stages),
        )


def _stage(stage: StageLike, data: DataLike) -> StageFacts:
    examples = data.examples if stage.examples is None else stage.examples
    epochs = data.epochs if stage.epochs is None else stage.epochs
    return StageFacts(stage.name, stage.values, examples, epochs)
