"""Encoders from their architecture configuration, and what is done with their output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.core.records import Phase
from tuner.core.setup.common import TORCH_DTYPES, Loader
from tuner.core.setup.encoders import Encoder
from tuner.core.setup.schema import NO_NAMES
from tuner.predict.training import Environment, Machine
from tuner.predict.training.session import ModelSession
from tuner.predict.training.token_data import TokenBatches, build_loader
from tuner.space.data import DataFacts
from tuner.space.models.config_fields import length_problem, table_positions


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings of a session around an encoder, whatever its model computes."""

    micro_batch: int
    adapters: Mapping[str, Any]
    """Options of peft's adapters beside their rank."""
    encoder: Encoder
    loader: Loader

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EncoderSettings:
        """The settings from the values of a whole vocabulary."""
        targets = names(values["lora_targets"])
        adapters = {
            "target_modules": "all-linear" if targets == ("all-linear",) else list(targets),
            "lora_alpha": values["lora_alpha"],
            "lora_dropout": values["lora_dropout"],
        }
        return cls(values["micro_batch"], adapters, Encoder.of(values), Loader.of(values))

    @property
    def padded(self) -> bool:
        """Attention gets a mask."""
        return self.encoder.padding == "max_length"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None without mixed precision."""
        return torch_dtype(self.encoder.autocast)


def torch_dtype(precision: str) -> torch.dtype | None:
    """PyTorch's dtype of a precision that isn't quantised; None for "no" (autocast off)."""
    dtype: torch.dtype | None = getattr(torch, TORCH_DTYPES.get(precision, ""), None)
    return dtype


def names(value: tuple[str, ...]) -> tuple[str, ...]:
    """A list of names; `NO_NAMES` is the empty one."""
    return () if value == NO_NAMES else value


def require_positions(model_config: Any, length: int) -> None:
    """Raise `InputError` if the model has fewer than `length` positions."""
    problem = length_problem(table_positions(model_config.to_dict()), length, "max_length")
    if problem is not None:
        raise InputError(problem[0], hint=problem[1])


def build_encoder(model_config: Any, attention: str) -> Any:
    """An encoder without a task head, in fp32, on the device of the context.

    Raises `InputError` for what transformers cannot build.
    """
    from transformers import AutoModel

    try:
        return AutoModel.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
    except (ValueError, ImportError) as error:
        text = " ".join(str(error).split())
        raise InputError(
            f"transformers cannot build this encoder with attention {attention}: {text[:300]}"
        ) from error


def initialiser(encoders: Sequence[Any]) -> Callable[[nn.Module], None]:
    """Initialises a module without weights: of an encoder as transformers does, else as PyTorch."""
    inside = {id(module) for encoder in encoders for module in encoder.modules()}

    def initialise(module: nn.Module) -> None:
        if id(module) in inside:
            encoders[0]._init_weights(module)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()

    return initialise


def initialise_positions(encoder: nn.Module) -> None:
    """Token types of all tokens are 0, as transformers leaves them."""
    for name, buffer in encoder.named_buffers():
        if name.endswith("token_type_ids"):
            buffer.zero_()


def enable_checkpointing(
    encoder: Any, environment: Environment, autocast_dtype: torch.dtype | None
) -> None:
    """Recompute each layer in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if environment.device == "meta":
        # On a machine PyTorch restores autocast by itself.
        options["context_fn"] = partial(environment.checkpoint_contexts, autocast_dtype)
    encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    encoder.enable_input_require_grads()


def add_adapter(
    encoder: Any,
    options: Mapping[str, Any],
    environment: Environment,
    *,
    name: str = "default",
    skip_pooler: bool = False,
) -> Any:
    """`encoder` with a set of adapters of that name; the first one wraps it.

    `options` are those of peft. Raises `InputError` when the targets do not exist in the model.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    skipped = r".*pooler.*" if skip_pooler else None
    config = LoraConfig(**options, exclude_modules=skipped, bias="none")
    is_meta = environment.device == "meta"
    try:
        with torch.device(environment.device):
            if isinstance(encoder, PeftModel):
                encoder.add_adapter(name, config, low_cpu_mem_usage=is_meta)
                return encoder
            return get_peft_model(encoder, config, adapter_name=name, low_cpu_mem_usage=is_meta)
    except ValueError as error:
        # The second is what peft says where some modules are excluded.
        known = ("not found in the base model", "No modules were targeted for adaptation")
        if not any(text in str(error) for text in known):
            raise
        targets = ", ".join(config.target_modules)
        raise InputError(
            f"lora_targets {targets} do not exist in the model",
            hint="all-linear takes every linear layer",
        ) from error


def attention_mask(tokens: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """A mask of the shape of `tokens`: all but the last token, or all.

    What is masked does not matter for memory or time, only whether anything is: attention then
    gets a mask, which rules its fastest kernels out.
    """
    mask = torch.ones_like(tokens)
    if padded:
        mask[:, -1] = 0
    return mask


def mean_pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over unmasked tokens in fp32: (samples, length, width) to (samples, width).

    Weights are expanded to the size of `hidden`, as in the recipe on the model cards of
    sentence-transformers: autograd keeps them.
    """
    weights = mask.unsqueeze(-1).expand(hidden.shape).float()
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)


class Field(NamedTuple):
    """A part of every sample: a number of texts, each `length` tokens long."""

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
        super().__init__(model, settings.encoder, settings.encoder.autocast, environment)
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
