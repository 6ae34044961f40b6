"""Workload `causal_lm`: supervised fine-tuning of a causal language model, full or LoRA.

The model is built from its architecture configuration by transformers and adapted by peft,
in the order in which a training script does it: load, k-bit preparation, adapters,
optimizer. Nothing is approximated here; a trace and a real run execute this same code.
"""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Phase
from tuner.core.setup.schema import NO_NAMES
from tuner.predict.training import Environment, Machine
from tuner.predict.training.causal_lm_model import build_model, build_skeleton
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.predict.training.encoders import require_positions
from tuner.predict.training.images import Images, images_of
from tuner.predict.training.parallel import Ranks, distribute
from tuner.predict.training.program_ways import apply_ways
from tuner.predict.training.quantized import logical_numel
from tuner.predict.training.session import ModelSession, embedding_weights
from tuner.predict.training.token_data import TokenBatches, build_loader
from tuner.space.models.trainable import require_trained


class CausalLMSession(ModelSession):
    """A causal language model ready to train on batches of random tokens."""

    def __init__(
        self,
        model: Any,
        settings: TrainingSetup,
        environment: Environment,
        ranks: Ranks | None = None,
        images: Images | None = None,
        reference: Any = None,
    ) -> None:
        # Loops of people's own give an optimizer its parameters, and do no more.
        by_trainer = settings.update.loop == "trainer"
        embeddings = embedding_weights(model) if by_trainer else []
        super().__init__(
            model, settings.update, settings.precision.autocast, environment, embeddings=embeddings
        )
        self._settings: TrainingSetup = settings
        self._ranks = ranks or Ranks.alone(model)
        self._ranks.take(self.optimizer)
        self._images = images
        self._reference = reference
        self._offloading: AbstractContextManager[Any] = contextlib.nullcontext()
        if settings.recompute.on_host:
            self._offloading = _OffloadedShapes(model)
        self._outputs: Any = None
        self._flops: _StepFlops | None = None

    def use_data(self, machine: Machine, flops: _StepFlops | None) -> None:
        """Train on batches of a data loader, and count what was done; see `Counts`."""
        settings = self._settings
        loader = build_loader(
            settings.loader,
            vocab_size=self._vocab_size,
            shape=(settings.batch.micro, settings.examples.length),
            data=machine.data,
            full=machine.full_micro_steps * settings.batch.micro,
            padded=settings.examples.padded,
            rank=self._ranks.number,
        )
        self._train_on(TokenBatches(loader, machine.device), machine)
        self._flops = flops
        self.counts.model_flops = None if flops is None else 0.0

    def _exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._ranks.exchange(is_last=is_last)

    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; gradients accumulate."""
        self._environment.enter(Phase.FORWARD, micro_step)
        batch = self._next_batch()
        if self._settings.update.loop != "trainer":
            # A hand-written loop holds `outputs`, and with it the logits, during backward.
            self._outputs = self._forward(batch)
            self._refer(batch)
            self._environment.enter(Phase.BACKWARD, micro_step)
            self._backward(self._outputs.loss)
            if self._settings.update.loop == "function":
                self._outputs = None
            return
        loss: torch.Tensor = self._outputs_as_trainer(batch).loss  # outputs die before backward
        self._refer(batch)
        self._environment.enter(Phase.BACKWARD, micro_step)
        self._backward(loss)

    def _backward(self, loss: torch.Tensor) -> None:
        if self._batches is not None:
            self.loss = loss.detach()
        self._ranks.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def _update(self) -> None:
        if not self._ranks.update():
            super()._update()

    @property
    def _vocab_size(self) -> int:
        weight = self.model.get_input_embeddings().weight
        return int(getattr(weight, "ds_shape", weight.shape)[0])  # of DeepSpeed's, where shared

    def evaluate(self) -> None:
        """Evaluate as transformers' Trainer does.

        Of several batches whose logits are kept, each is joined to those before it
        (`EvalLoopContainer`), while those of the last one are still held.
        """
        settings = self._settings.evaluating
        self._environment.enter(Phase.EVALUATION, 0)
        self.model.eval()
        kept: Any = None
        logits: Any = None
        with torch.no_grad():
            for _ in range(max(1, settings.kept)):
                batch = self._next_batch(settings.batch)
                outputs = self._outputs_as_trainer(batch)
                if settings.kept and outputs.logits is None:
                    del batch["labels"]  # TRL's pass for `compute_metrics`
                    outputs = self._outputs_as_trainer(batch)
                logits = outputs.logits if settings.kept else None
                del outputs
                kept = logits if kept is None else torch.cat((kept, logits))
        self.model.train()

    def _next_batch(self, samples: int | None = None) -> dict[str, torch.Tensor]:
        """The arguments of the model. A trace has no data, only shapes."""
        if self._batches is not None:
            return self._real_batch(self._batches)
        shape = (samples or self._settings.batch.micro, self._settings.examples.length)
        device = self._environment.device
        if self._images is not None:
            return self._batch_of_images(self._images, shape)
        if self._settings.examples.packed:
            return self._packed_batch(shape)
        tokens = torch.randint(0, self._vocab_size, shape, device=device)
        return self._labelled(
            {
                "input_ids": tokens,
                "attention_mask": torch.ones(shape, dtype=torch.long, device=device),
                "labels": tokens.clone(),
            }
        )

    def _packed_batch(self, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """One row of all examples, of which each `max_length` tokens are two: what TRL packs.

        Positions are made on the host, so that a trace knows where examples end.
        """
        device, tokens = self._environment.device, shape[0] * shape[1]
        positions = torch.arange(tokens) % max(1, shape[1] // 2)
        ids = torch.randint(0, self._vocab_size, (1, tokens), device=device)
        return {"input_ids": ids, "position_ids": positions[None].to(device), "labels": ids.clone()}

    def _labelled(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch with a label for each text, where a classifier is trained; changes it."""
        labels, examples = self._settings.examples.labels, len(batch["input_ids"])
        if labels:
            # Made on the host, so that they are known to a trace, where some models ask for them.
            host = torch.ones(examples) if labels == 1 else torch.arange(examples) % labels
            batch["labels"] = host.to(self._environment.device)
        return batch

    def _batch_of_images(self, images: Images, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """A trace's batch with images: made on the host, so that it is known where they stand."""
        device = self._environment.device
        ids = torch.zeros(shape, dtype=torch.long)
        host = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        placed = {name: tensor.to(device) for name, tensor in images.placed(host).items()}
        return {**placed, **images.fields(shape[0], device)}

    def _real_batch(self, batches: TokenBatches) -> dict[str, torch.Tensor]:
        batch = batches.next()
        samples, length = batch.inputs["input_ids"].shape
        counts = self.counts
        counts.samples += samples
        counts.tokens += batch.tokens
        counts.padded_tokens += samples * length
        counts.data_wait_s = batches.waited_s
        if self._flops is not None and counts.model_flops is not None:
            counts.model_flops += self._flops.of(samples, length)
        if self._images is None:
            return self._labelled(batch.inputs)
        placed = self._images.placed(batch.inputs)
        return {**placed, **self._images.fields(samples, self._environment.device)}

    def _forward(self, batch: dict[str, torch.Tensor], model: Any = None) -> Any:
        dtype = self._settings.autocast_dtype
        precision = self._environment.autocast(dtype) if dtype else contextlib.nullcontext()
        with precision, self._offloading if model is None else contextlib.nullcontext():
            return (model or self._ranks.called)(**batch, use_cache=False)

    def _refer(self, batch: dict[str, torch.Tensor]) -> None:
        """Run the reference model of preference training on the same sequences."""
        if self._reference is not None:
            with torch.no_grad():
                self._forward(batch, self._reference)
        elif self._settings.examples.reference:
            with torch.no_grad(), self.model.disable_adapter():
                self._forward(batch)

    def _outputs_as_trainer(self, batch: dict[str, torch.Tensor]) -> Any:
        """The outputs of the model as transformers' Trainer has them.

        Under mixed precision accelerate converts the outputs to fp32
        (`convert_outputs_to_fp32`), so a second fp32 copy of the logits exists until here.
        """
        outputs = self._forward(batch)
        # Fused kernels of the output head and its loss leave no logits.
        if self._settings.autocast_dtype is not None and outputs.logits is not None:
            outputs["logits"] = outputs.logits.float()
        return outputs


class CausalLM:
    """Opens sessions that fine-tune a causal language model."""

    name = "causal_lm"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> CausalLMSession:
        """Build model, adapters and optimizer on the environment's device.

        Raises `InputError` when LoRA targets do not exist in the model, and for what cannot be
        built or trained as the configuration says.
        """
        settings = TrainingSetup.of(configuration)
        parallelism = settings.parallelism
        parallelism.require(configuration)
        require_trained(model_config, num_labels=settings.examples.labels)
        require_positions(model_config, settings.examples.length)
        images = _images(model_config, settings, environment)
        environment.enter(Phase.LOAD, 0)
        model = build_model(model_config, settings, environment)
        # Layers of a tower that no text passes through get adapters, and never a gradient.
        may_have_idle = model_config.get_text_config() is not model_config
        ranks = distribute(
            model,
            parallelism,
            environment,
            may_have_idle=may_have_idle,
            sharding=settings.sharding,
            zero=settings.zero,
        )
        reference = None
        if settings.examples.reference_model:
            reference = _reference(model_config, settings, environment)
        session = CausalLMSession(model, settings, environment, ranks, images, reference)
        apply_ways(session, settings.ways)
        if isinstance(environment, Machine):
            session.use_data(environment, step_flops(model, model_config))
        return session


def _reference(model_config: Any, settings: TrainingSetup, environment: Environment) -> Any:
    """The second model of preference training: the same, frozen, without adapters."""
    whole = replace(
        settings,
        adapter=replace(settings.adapter, rank=0, modules_to_save=NO_NAMES, kind="lora"),
        recompute=replace(settings.recompute, enabled=False),
    )
    return build_model(model_config, whole, environment).requires_grad_(False).eval()


def _images(model_config: Any, settings: TrainingSetup, environment: Environment) -> Images | None:
    """The images of a batch. Raises `InputError` for what cannot be trained with them."""
    if not settings.examples.images:
        return None
    data = environment.data if isinstance(environment, Machine) else None
    if data is not None and data.token_lengths is not None:
        raise InputError(
            "the data's token_lengths say nothing of images, whose tokens are part of them",
            hint="--lengths full gives every example max_length tokens, its images included",
        )
    plain = replace(
        settings,
        precision=replace(settings.precision, weights="bf16"),
        recompute=replace(settings.recompute, enabled=False),
    )
    images = images_of(
        build_skeleton(model_config, plain),
        model_config,
        number=settings.examples.images,
        size=settings.examples.image_size,
    )
    images.require(settings.examples.length)
    return images


@dataclass(frozen=True, slots=True)
class _StepFlops:
    """FLOPs of forward and backward pass, per token and per pair of tokens."""

    per_token: float
    per_token_pair: float

    def of(self, samples: int, length: int) -> float:
        """FLOPs of one micro-step on `samples` sequences of `length` tokens, padding included."""
        return samples * (length * self.per_token + length * length * self.per_token_pair)


def step_flops(model: Any, model_config: Any) -> _StepFlops | None:
    """Model FLOPs: what the mathematics of the step needs, without recomputation.

    A product of T tokens with an m x n matrix is 2 T m n forward, as much for the gradient of
    its input, and as much again for that of the matrix where it is trained. Attention is two
    products of length x length x head size for each head, half of them masked, and twice that
    backward (Chowdhery et al. 2022, PaLM, appendix B, less the masked half). A vision tower runs
    on no token of a text. None for models with experts, whose layers do not see every token.
    """
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    if heads is None or layers is None:
        return None
    # The modules that see every token of a text. peft keeps the original of a module that is
    # trained whole, which sees none.
    towers = [model]
    if getattr(model_config, "vision_config", None) is not None:
        towers = [model.get_decoder(), model.get_output_embeddings()]
    named = (item for tower in towers for item in tower.named_modules())
    parts = [module for name, module in named if "original_module" not in name.split(".")]
    if any(p.dim() > 2 for part in parts for p in part.parameters(recurse=False)):
        return None
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    # GPT-2 has linear layers of its own kind, with the matrix transposed.
    linear = [m for m in parts if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    weights: list[Any] = [module.weight for module in linear]
    per_token = sum((6.0 if w.requires_grad else 4.0) * logical_numel(w) for w in weights)
    # Forward 2 products of 2 FLOPs, backward twice as many, and half of the pairs.
    return _StepFlops(per_token, 3 * 2 * 2 * heads * head_size * layers / 2)


_LEAST_BYTES = 1024
"""`min_offload_size`: smaller tensors stay."""

_STASHED = 5
"""`max_fwd_stash_size`: tensors whose copies to the host may be under way; the last ones stay."""


@dataclass(slots=True, eq=False)
class _Held:
    """A tensor by its layout; it is on the device while its copy is under way."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stashed: torch.Tensor | None


class _OffloadedShapes(saved_tensors_hooks):
    """Frees what a forward pass saves, and allocates it again in the backward pass.

    As torchtune 0.6.1 does (training/_activation_offloading.py, `OffloadActivations`, with
    streams), for tensors without data. One training has one of it, for all its forward passes.
    """

    def __init__(self, model: Any) -> None:
        self._stash: deque[_Held] = deque()
        self._own = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
        self._words = model.get_input_embeddings().weight.shape[0]
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        # The loss and the output head are outside, in torchtune's recipes.
        is_own = tensor.untyped_storage()._cdata in self._own
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._words
        if is_own or is_logits or not tensor.is_floating_point() or tensor.nbytes < _LEAST_BYTES:
            return tensor
        held = _Held(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tensor)
        self._stash.append(held)
        if len(self._stash) > _STASHED:
            self._stash.popleft().stashed = None
        return held

    def _unpack(self, held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        found: torch.Tensor | None = held.stashed
        if found is None:
            found = torch.empty_strided(
                held.size, held.stride, dtype=held.dtype, device=held.device
            )
        held.stashed = None
        return found
