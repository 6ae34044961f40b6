"""A frozen extract of a search space, from which every output of results is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.core.expressions import show
from tuner.space import DataFacts, SearchSpace, Stage


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
    def of(cls, space: SearchSpace) -> SpaceFacts:
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


def _stage(stage: Stage, data: DataFacts) -> StageFacts:
    examples = data.examples if stage.examples is None else stage.examples
    epochs = data.epochs if stage.epochs is None else stage.epochs
    return StageFacts(stage.name, stage.values, examples, epochs)
