"""A training session of a model that turns rows of tokens into a loss.

The loop is the usual hand-written one, with autocast around the forward pass. What differs
between workloads is in their models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.core.records import Phase
from tuner.predict.training.base import Environment, Machine
from tuner.predict.training.encoder_settings import EncoderSettings
from tuner.predict.training.session import ModelSession
from tuner.predict.training.token_data import TokenBatches, build_loader
from tuner.space.data import DataFacts


class Field(NamedTuple):
    """A part of every sample: so many texts of so many tokens each."""

    texts: int
    length: int


class LossSession(ModelSession):
    """Trains `model`, which is called with token tensors: one a field, (samples * texts, length).

    `sample_tokens` are the tokens of a sample that an encoder reads; fields may hold targets
    beside them. `after_backward` is called at the end of each micro-step. On a machine samples
    come from PyTorch's data loader, each at its full length. Raises `InputError` for what a machine
    cannot do.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: EncoderSettings,
        environment: Environment,
        *,
        vocab_size: int,
        fields: Sequence[Field],
        sample_tokens: int,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model, settings, environment)
        self._settings: EncoderSettings = settings
        self._vocab_size = vocab_size
        self._fields = tuple(fields)
        self._sample_tokens = sample_tokens
        self._after_backward = after_backward
        if isinstance(environment, Machine):
            self._use_data(environment)

    def _use_data(self, machine: Machine) -> None:
        settings = self._settings
        if machine.checkpoint is not None:
            raise InputError(
                "only language models are trained from a checkpoint",
                hint="synthetic weights are as fast and as large",
            )
        if machine.data is not None and machine.data.token_lengths is not None:
            raise InputError(
                "only language models are trained on the lengths of the data",
                hint="--lengths full gives every sample the configuration's lengths",
            )
        if settings.loader.persistent_workers and not settings.loader.num_workers:
            raise InputError("persistent_workers true has no effect with num_workers 0")
        loader = build_loader(
            settings.loader,
            vocab_size=self._vocab_size,
            shape=(settings.micro_batch, sum(f.texts * f.length for f in self._fields)),
            data=DataFacts(examples=machine.data.examples) if machine.data else None,
        )
        self._train_on(TokenBatches(loader, machine.device), machine)

    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; gradients accumulate."""
        self._environment.enter(Phase.FORWARD, micro_step)
        dtype = self._settings.autocast_dtype
        precision = self._environment.autocast(dtype) if dtype else contextlib.nullcontext()
        fields = self._next_fields()
        with precision:
            loss = self.model(fields)
        self._environment.enter(Phase.BACKWARD, micro_step)
        if self._batches is not None:
            self.loss = loss.detach()
        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        self._after_backward()

    def _next_fields(self) -> list[torch.Tensor]:
        """Tokens of each field. A trace has no data, only its shapes."""
        if self._batches is None:
            samples, device = self._settings.micro_batch, self._environment.device
            shapes = [(samples * field.texts, field.length) for field in self._fields]
            return [torch.randint(0, self._vocab_size, s, device=device) for s in shapes]
        tokens = self._batches.next().inputs["input_ids"]
        samples = tokens.shape[0]
        self.counts.samples += samples
        self.counts.tokens += samples * self._sample_tokens
        self.counts.padded_tokens += samples * self._sample_tokens
        self.counts.data_wait_s = self._batches.waited_s
        parts = torch.split(tokens, [field.texts * field.length for field in self._fields], dim=1)
        return [
            part.reshape(-1, field.length) for part, field in zip(parts, self._fields, strict=True)
        ]
