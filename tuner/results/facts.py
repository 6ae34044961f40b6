"""What the results need to know of a search space and a GPU, and no more.

The results layer reads a space's and a GPU's attributes through two protocols; it does not
load them. `SpaceFacts` is the frozen extract that every output is written from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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

    @classmethod
    def of(cls, space: SpaceLike) -> SpaceFacts:
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
        )
