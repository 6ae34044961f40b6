"""What the sessions of all workloads share: parameters, optimizer, and the update after a step.

The loop is the usual one of trainers: forward and backward passes whose gradients accumulate, a
gradient scaler under fp16, clipping, an update.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from tuner.core.records import Phase
from tuner.predict.training.base import Counts, Environment, Machine
from tuner.predict.training.optimizers import build_optimizer, unscale_without_data
from tuner.predict.training.quantized import total_numel, whole_numel
from tuner.predict.training.token_data import TokenBatches


class UpdateSettings(Protocol):
    """What an update depends on."""

    @property
    def optimizer(self) -> str:
        """A name that `build_optimizer` knows."""

    @property
    def mixed_precision(self) -> str:
        """The autocast type; "fp16" scales the loss."""

    @property
    def max_grad_norm(self) -> float:
        """Where gradients are clipped; 0 for nowhere."""


class ModelSession(abc.ABC):
    """A model ready to train; subclasses say what a micro-step is.

    `counts` and `loss` follow a training with data. A trace has none, and no gradient scaler.
    `embeddings` are the parameters that `build_optimizer` is told of as such.
    """

    def __init__(
        self,
        model: Any,
        settings: UpdateSettings,
        environment: Environment,
        *,
        embeddings: Sequence[nn.Parameter] = (),
    ) -> None:
        self.model = model
        self._settings = settings
        self._environment = environment
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self.trainable_params = sum(map(whole_numel, self._trainable))
        self.total_params = total_numel(model)
        self.embeddings = embeddings
        self.optimizer = build_optimizer(settings.optimizer, self._trainable, embeddings)
        self.counts = Counts(model_flops=None)
        self.loss: Any = None
        self._batches: TokenBatches | None = None
        self._scaler: torch.amp.GradScaler | None = None

    @abc.abstractmethod
    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; gradients accumulate."""

    def _exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around a micro-step: whether its gradients are exchanged with other ranks."""
        return contextlib.nullcontext()

    def _train_on(self, batches: TokenBatches, machine: Machine) -> None:
        """Take data from `batches`. Under fp16 the loss is scaled, as Trainer(fp16=True) does."""
        self._batches = batches
        if self._settings.mixed_precision == "fp16":
            self._scaler = torch.amp.GradScaler(torch.device(machine.device).type)

    def close(self) -> None:
        """End the data loader's processes. The session cannot be used after it."""
        if self._batches is not None:
            self._batches.close()

    def optimizer_step(self, micro_steps: int) -> None:
        """Run `micro_steps` forward and backward passes, clip, and update once."""
        for micro_step in range(micro_steps):
            with self._exchange(is_last=micro_step == micro_steps - 1):
                self.micro_step(micro_step)
        self._environment.enter(Phase.OPTIMIZER, micro_steps)
        self._update()

    def _update(self) -> None:
        """Clip, update, and forget the gradients."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        elif self._settings.mixed_precision == "fp16":  # a trace
            unscale_without_data(self._trainable)
        if self._settings.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self._trainable, self._settings.max_grad_norm)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
