"""The loop of one training session, with the optimizer that its configuration names."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from tuner.core.errors import unknown
from tuner.core.records import Phase
from tuner.core.setup.causal_lm import Update
from tuner.core.setup.common import OPTIMIZERS
from tuner.core.setup.encoders import Encoder
from tuner.predict.training import Counts, Environment, Machine, load_object
from tuner.predict.training.quantized import total_numel, whole_numel
from tuner.predict.training.token_data import TokenBatches


def build_optimizer(
    name: str, parameters: list[torch.nn.Parameter], embeddings: Sequence[torch.nn.Parameter] = ()
) -> Any:
    """The optimizer that transformers' Trainer would build for `name`.

    Of `embeddings`, some of `parameters`, optimizers in 8 bits keep their state in fp32 too, as
    `Trainer.create_optimizer` asks them to. Learning rates matter neither for memory nor for
    speed. Raises `InputError` for other names.
    """
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    row = OPTIMIZERS[name]
    if row.rest is not None:
        matrices, others = _by_matrix(parameters, embeddings)
        parts = [build_optimizer(row.rest, others)] if others else []
        if matrices:
            own = load_object(row.path, "optimizer")(matrices, lr=1e-4, **row.options)
            parts.insert(0, own)
        return _OptimizerParts(parts)
    optimizer = load_object(row.path, "optimizer")(parameters, lr=1e-4, **row.options)
    if embeddings and getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        optimizer.mng = _manager_of(embeddings)
    return optimizer


def _by_matrix(
    parameters: Iterable[torch.nn.Parameter], embeddings: Iterable[torch.nn.Parameter]
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of hidden layers, and all other parameters."""
    inputs = {id(weight) for weight in embeddings}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for parameter in parameters:
        parts[parameter.dim() != 2 or id(parameter) in inputs].append(parameter)
    return parts


class _OptimizerParts:
    """Several optimizers that share the parameters of a model, used as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def embedding_weights(model: nn.Module) -> list[torch.nn.Parameter]:
    """The weights of `model`'s embeddings that are trained; tied ones once."""
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in model.parameters() if p.requires_grad and p in weights]


def _manager_of(embeddings: Sequence[torch.nn.Parameter]) -> Any:
    """The manager that makes bitsandbytes' optimizers keep these states in 32 bits.

    One of its own: bitsandbytes has a single one, which knows parameters by addresses that those
    of the next model may have.
    """
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    manager.override_config(list(embeddings), "optim_bits", 32)
    return manager


def unscale_without_data(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Stand in for `GradScaler.unscale_` in a trace, without scale and values.

    A scaler decides by values whether to update, so that a trace cannot have one; but the
    gradients are read and written once more than without it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients.sort(key=lambda gradient: str(gradient.dtype))
    for _, alike in groupby(gradients, key=lambda gradient: gradient.dtype):
        listed = list(alike)
        found_inf, inverse_scale = (torch.empty(1, device=listed[0].device) for _ in range(2))
        torch._amp_foreach_non_finite_check_and_unscale_(listed, found_inf, inverse_scale)


class ModelSession(abc.ABC):
    """A model ready to train; subclasses say what a micro-step is.

    `counts` and `loss` follow a training with data. A trace has none, and no gradient scaler.
    `embeddings` are the parameters that `build_optimizer` is told of as such.
    """

    def __init__(
        self,
        model: Any,
        update: Update | Encoder,
        autocast: str,
        environment: Environment,
        *,
        embeddings: Sequence[nn.Parameter] = (),
    ) -> None:
        self.model = model
        self._update_settings = update
        self._autocast = autocast
        self._environment = environment
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self.trainable_params = sum(map(whole_numel, self._trainable))
        self.total_params = total_numel(model)
        self.embeddings = embeddings
        self._in_backward = isinstance(update, Update) and update.in_backward
        self._is_hooked = False
        self.optimizer: Any = (
            _OptimizerParts([build_optimizer(update.optimizer, [p]) for p in self._trainable])
            if self._in_backward
            else build_optimizer(update.optimizer, self._trainable, embeddings)
        )
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
        if self._autocast == "fp16":
            self._scaler = torch.amp.GradScaler(torch.device(machine.device).type)

    def close(self) -> None:
        """End the data loader's processes. The session cannot be used after it."""
        if self._batches is not None:
            self._batches.close()

    def optimizer_step(self, micro_steps: int) -> None:
        """Run `micro_steps` forward and backward passes, clip, and update once."""
        if self._in_backward and not self._is_hooked:
            self._update_in_backward()
        for micro_step in range(micro_steps):
            with self._exchange(is_last=micro_step == micro_steps - 1):
                self.micro_step(micro_step)
        self._environment.enter(Phase.OPTIMIZER, micro_steps)
        self._update()

    def _update_in_backward(self) -> None:
        """From now on, update each parameter once it has its gradient.

        Hooks run in the order of their registration: those that only look have come before.
        """
        self._is_hooked = True
        for parameter, optimizer in zip(self._trainable, self.optimizer.parts, strict=True):

            def update(_: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            parameter.register_post_accumulate_grad_hook(update)

    def clip(self, parameters: Sequence[nn.Parameter]) -> None:
        """Clip the gradients of `parameters`, where the settings say so."""
        if self._update_settings.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(parameters, self._update_settings.max_grad_norm)

    def _update(self) -> None:
        """Clip, update, and forget the gradients."""
        if self._in_backward:
            return
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        elif self._autocast == "fp16":  # a trace
            unscale_without_data(self._trainable)
        self.clip(self._trainable)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
