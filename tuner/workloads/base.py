"""What a workload offers: from one configuration to a session that can train a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from tuner.records import Configuration, Phase


class Environment(Protocol):
    """Where a session runs: a real device, or a trace on tensors without data.

    A workload asks its environment for everything that differs between the two, so that the
    code that trains is the same in both.
    """

    device: str
    """A torch device string: "meta" in a trace, "cuda:0" or "cpu" on a machine."""

    def materialize(self, model: Any) -> None:
        """Give a model built on the meta device its tensors on this device."""

    def autocast(self, dtype: Any) -> AbstractContextManager[None]:
        """Mixed precision in `dtype` (a torch dtype) for the code inside."""

    def checkpoint_contexts(
        self, autocast_dtype: Any | None
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts around a checkpointed forward and around its recomputation."""

    def enter(self, phase: Phase, micro_step: int) -> None:
        """A phase of the step begins. `micro_step` counts from 0 within an optimizer step."""


class TrainingSession(Protocol):
    """A model with its optimizer, ready to train. Not thread safe."""

    model: Any
    """A torch module."""
    optimizer: Any
    """A torch optimizer over the trainable parameters of `model`."""
    trainable_params: int
    total_params: int

    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; `micro_step` counts from 0 in a step."""

    def optimizer_step(self, micro_steps: int) -> None:
        """Run `micro_steps` forward and backward passes and one optimizer step."""


class Workload(Protocol):
    """A kind of training: opens sessions, and says what it needs and which knobs act."""

    name: str

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> TrainingSession:
        """Build model and optimizer. `model_config` is a transformers configuration."""
