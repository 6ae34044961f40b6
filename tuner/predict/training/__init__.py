"""Workloads: their interface, and how a configuration becomes a session that can train a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tuner.core.errors import InputError, missing_extra, unknown
from tuner.core.records import Configuration, Phase
from tuner.core.setup.schemas import SCHEMAS
from tuner.space.data import DataFacts


@dataclass(slots=True)
class Counts:
    """The samples, tokens and FLOPs of a session so far, summed over its micro-steps.

    `tokens` are without padding. `model_flops` counts no recomputation; None where the FLOPs of
    the model are not known. `data_wait_s` is how long micro-steps waited for their batch.
    """

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    model_flops: float | None = 0.0
    data_wait_s: float = 0.0


class Environment(Protocol):
    """The environment of a session: a real device, or a trace on tensors without data.

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


@runtime_checkable
class Machine(Environment, Protocol):
    """An environment with real memory and real data; a trace has neither.

    `checkpoint` is what to load with `from_pretrained`, None for synthetic weights. `data`
    describes the examples; without it each has the longest length, as a trace assumes.
    `full_micro_steps` is the number of micro-steps in which they have it in any case, so that
    the peak is that of the worst batch.
    """

    checkpoint: str | None
    data: DataFacts | None
    full_micro_steps: int

    def materialize(self, model: Any, on_host: Sequence[Any] = ()) -> None:
        """As in a trace, but the modules in `on_host` have their tensors in host memory."""


class TrainingSession(Protocol):
    """A model with its optimizer, ready to train. Not thread safe."""

    model: Any
    """A torch module."""
    optimizer: Any
    """A torch optimizer over the trainable parameters of `model`."""
    trainable_params: int
    total_params: int
    counts: Counts
    loss: Any
    """The loss of the last micro-step, a torch tensor of one value; None before the first."""

    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; `micro_step` counts from 0 in a step."""

    def optimizer_step(self, micro_steps: int) -> None:
        """Run `micro_steps` forward and backward passes and one optimizer step."""

    def evaluate(self) -> None:
        """Run forward passes of an evaluation; called where a configuration has `eval_batch`."""

    def close(self) -> None:
        """End what runs beside the session. It cannot be used after it."""


class Workload(Protocol):
    """A kind of training: opens sessions, and says what it needs and which knobs act."""

    name: str

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> TrainingSession:
        """Build model and optimizer. `model_config` is a transformers configuration."""


OpenSession = Callable[[Any, Configuration, Environment], TrainingSession]


@dataclass(slots=True)
class _FunctionWorkload:
    """Opens sessions by calling a function; see `tuner.predict.training.Workload`."""

    name: str
    function: OpenSession

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> TrainingSession:
        return self.function(model_config, configuration, environment)


CLASSES = {
    "causal_lm": "tuner.predict.training.causal_lm:CausalLM",
    "contrastive": "tuner.predict.training.contrastive:Contrastive",
    "multitask": "tuner.predict.training.multitask:MultiTask",
}
"""The class of each workload. It loads torch, so it is imported when the workload is asked for."""


def get_workload(name: str) -> Workload:
    """The workload with this name. Imports torch. Raises `InputError` for other names.

    "package.module:object" names one of the user's own: a `Workload`, a class of which one can be
    made without arguments, or a function that opens a session as `Workload.open` does.
    """
    if name not in CLASSES and ":" not in name:
        raise unknown("workload", name, CLASSES)
    return _workload_of(CLASSES.get(name, name))


def _workload_of(name: str) -> Workload:
    """The workload that `name` names. Raises `InputError` if it opens no session."""
    found = load_object(name, "workload")
    if isinstance(found, type):
        found = found()
    if callable(getattr(found, "open", None)):
        workload: Workload = found
        return workload
    if not callable(found):
        raise InputError(
            f"workload {name!r} is of type {type(found).__name__}, which opens no session",
            hint="write a function or a class with open(model_config, configuration, environment)",
        )
    return _FunctionWorkload(name, found)


def tokens_per_sample(workload: str, configuration: Configuration) -> int:
    """Tokens of one sample at full length. Raises `InputError` for an unknown workload."""
    if workload not in SCHEMAS:
        raise unknown("workload", workload, CLASSES)
    return SCHEMAS[workload].tokens(configuration)


def load_object(name: str, kind: str) -> Any:
    """The object that "package.module:object" names; `kind` is what it is to be, for people.

    Raises `InputError` where there is none, `UnavailableError` where the extra `[all]` is missing.
    """
    module_name, _, object_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (ModuleNotFoundError, AttributeError) as error:
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            raise missing from error
        raise InputError(f"{kind} {name!r} cannot be found: {error}") from error
