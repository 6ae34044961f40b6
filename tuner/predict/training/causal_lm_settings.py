"""The setup of workload `causal_lm` in PyTorch's terms, and the setups that cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from tuner.core.errors import InputError, Problem, unknown
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.core.setup.causal_lm import (
    IN_BACKWARD,
    OFFLOAD_ACTIVATIONS,
    PEFT_METHODS,
    PROGRAM_WAYS,
    Setup,
)
from tuner.core.setup.common import Loader
from tuner.core.setup.schema import NO_NAMES
from tuner.predict.training.encoders import torch_dtype
from tuner.predict.training.parallel import Sharding, ZeroSettings


@dataclass(frozen=True, slots=True)
class TrainingSetup(Setup):
    """A setup with what PyTorch makes of it."""

    @classmethod
    def of(cls, configuration: Mapping[str, KnobValue]) -> Self:
        """As `Setup.of`; raises `InputError` for contradictions too."""
        setup = super(TrainingSetup, cls).of(configuration)
        for problem, hint in setup._contradictions():
            raise InputError(problem, hint=hint)
        return setup

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Problems of the setup on any machine, each with a remedy."""
        if self.examples.padded and self.update.attention == "flash_attention_2":
            yield (
                "flash_attention_2 takes padding out of a batch, so that its work depends on the "
                "data",
                "set padding to none, or attention to sdpa",
            )
        if self.examples.packed and (self.examples.images or self.examples.labels):
            yield "padding packed is of texts and language models", "set padding to none"
        if self.examples.image_size and not self.examples.images:
            yield (
                f"image_size {self.examples.image_size} has no effect without images",
                "set images to 1 or more",
            )
        both = [name for name in self.adapter.saved if name in self.adapter.targets]
        if both:
            yield (
                f"{', '.join(both)} cannot be in lora_targets and in modules_to_save",
                "a module has an adapter or is trained whole",
            )
        if self.recompute.on_host and (self.recompute.reentrant or not self.recompute.enabled):
            yield (
                f"{OFFLOAD_ACTIVATIONS} is of checkpoints that are not reentrant",
                "set gradient_checkpointing to true and use_reentrant to false",
            )
        for way in self.ways:
            if way not in PROGRAM_WAYS:
                found = unknown("value of program_ways", way, PROGRAM_WAYS)
                yield found.message, found.hint or ""
        if self.update.in_backward:
            yield from self._against_backward()
        second = self.examples.reference_model
        if self.examples.reference and not self.adapter.rank and not second:
            yield (
                "reference_pass is one of the model without its adapters, and lora_rank 0 has none",
                "set lora_rank to 1 or more, or reference_model to true",
            )
        if second and (self.parallelism.is_sharded or self.parallelism.zero_stage > 0):
            yield "reference_model is predicted on one GPU or DDP only", "set distributed to ddp"
        unfit = {
            "images": self.examples.images,
            "loss": self.loss.kind if self.loss.kind != "transformers" else None,
            "reference_pass": self.examples.reference,
            "fused_loss": self.loss.fused,
            "liger": self.process.liger,
        }
        for name in [name for name, value in unfit.items() if self.examples.labels and value]:
            yield (
                f"{name} {unfit[name]} does not go with num_labels {self.examples.labels}: "
                "it is of language models",
                f"leave {name} out, or set num_labels to 0",
            )

    def _against_backward(self) -> Iterator[tuple[str, str]]:
        """Problems of settings with an update in the backward pass, which torchtune refuses too."""
        if self.batch.accumulation > 1:
            sums = "sums up no gradients: grad_accum has to be 1"
            yield f"{IN_BACKWARD} {sums}", "set effective_batch to micro_batch times the GPUs"
        if self.update.max_grad_norm:
            yield f"{IN_BACKWARD} has no norm of all gradients", "set max_grad_norm to 0"
        if self.precision.autocast == "fp16":
            yield (f"{IN_BACKWARD} is not predicted with a scaler", "set mixed_precision to bf16")
        if self.parallelism.ranks > 1 and not self.parallelism.is_sharded:
            yield f"{IN_BACKWARD} is predicted on one GPU or FSDP2 only", "emulate the program"

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways of the program that no other parameter expresses."""
        return () if self.update.ways == NO_NAMES else self.update.ways

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None without: FSDP2 and DeepSpeed cast weights."""
        casts_weights = self.parallelism.is_sharded or self.parallelism.zero_stage > 0
        return None if casts_weights else self._mixed_dtype

    @property
    def _mixed_dtype(self) -> torch.dtype | None:
        return torch_dtype(self.precision.autocast)

    @property
    def sharding(self) -> Sharding:
        """The way FSDP2 shards the model."""
        by_trainer = self.update.loop == "trainer"
        return Sharding(by_trainer, self._mixed_dtype, self.ranks.reshard, self.ranks.sync)

    @property
    def zero(self) -> ZeroSettings:
        """The settings of DeepSpeed, if it trains the model."""
        return ZeroSettings(
            stage=self.parallelism.zero_stage,
            micro_batch=self.batch.micro,
            grad_accum=self.batch.accumulation,
            gradient_clipping=self.update.max_grad_norm,
            mixed_precision=self.precision.autocast,
            reduce_bucket_size=self.ranks.bucket,
        )

    @property
    def quant_storage(self) -> torch.dtype | None:
        """The dtype that 4-bit codes are packed into: FSDP2 shards floating types only."""
        return self.load_dtype if self.parallelism.is_sharded else None

    @property
    def load_dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantised.

        Beside quantised layers it is the compute dtype: unless the configuration names one,
        that of autocast, else bfloat16.
        """
        precision = self.precision
        word = precision.compute if precision.is_quantized else precision.weights
        return torch_dtype(word) or self._mixed_dtype or torch.bfloat16

    def check_machine(self, device: str) -> None:
        """Raise `InputError`, with every reason, where this cannot be trained on `device`.

        Among the reasons are knobs that would have no effect: a trial of one would answer a
        question that nobody can act on.
        """
        problems = [Problem(text, where=knob) for knob, text in self._refusals(device)]
        if problems:
            raise InputError(
                f"this configuration cannot be trained on {device} as it says", problems=problems
            )

    def _refusals(self, device: str) -> Iterator[tuple[str, str]]:
        if not device.startswith("cuda"):
            yield from self._without_gpu()
        loader = self.loader
        if not loader.num_workers and loader.persistent_workers:
            yield "persistent_workers", "true has no effect with num_workers 0"
        if not loader.num_workers and loader.prefetch_factor != Loader().prefetch_factor:
            yield "prefetch_factor", f"{loader.prefetch_factor} has no effect with num_workers 0"
        if self.process.offload:
            yield from self._against_offload()
        if self.recompute.on_host:
            yield OFFLOAD_ACTIVATIONS, "true is predicted, and tuner's own loop offloads nothing"
        traced = {
            "program_ways": self.ways,
            "loss": self.loss.kind if self.loss.kind == "liger" else "",
            "adapter": self.adapter.kind if self.adapter.kind in PEFT_METHODS else "",
        }
        for name in [name for name, value in traced.items() if value]:
            yield name, f"{show(traced[name])} is predicted, and tuner's own loop has no such part"
        if self.examples.packed:
            yield (
                "padding",
                "packed is predicted, and tuner's own loop packs nothing: set it to none",
            )
        if self.precision.autocast == "fp16" and self._trains_fp16_weights:
            yield (
                "mixed_precision",
                "gradients of fp16 weights cannot be scaled: train with precision fp32",
            )

    @property
    def _trains_fp16_weights(self) -> bool:
        """Adapters are fp32 (peft), copies of whole modules as the modules are."""
        if self.load_dtype is not torch.float16 or (self.adapter.rank and not self.adapter.saved):
            return False
        return not (self.precision.is_quantized and self.precision.preparation == "peft")

    def _without_gpu(self) -> Iterator[tuple[str, str]]:
        if self.process.allocator:
            yield "allocator", f"{self.process.allocator!r} has no effect without a GPU"
        if self.process.cudnn_benchmark:
            yield "cudnn_benchmark", "true has no effect without a GPU"
        if self.loader.pin_memory:
            yield "pin_memory", "true has no effect without a GPU"
        if self.process.liger:
            yield "liger", "its kernels need a GPU"
        if self.loss.fused:
            yield "fused_loss", "its kernel needs a GPU"
        if self.loss.kind == "chunked":
            yield "loss", "chunked is computed by a kernel that needs a GPU"
        if self.update.optimizer.startswith("paged_"):
            yield "optimizer", f"{self.update.optimizer} pages between a GPU and the host"
        if self.update.attention == "flash_attention_2":
            yield "attention", "flash_attention_2 needs a GPU"

    def _against_offload(self) -> Iterator[tuple[str, str]]:
        if not self.adapter.rank:
            yield "offload", "only a frozen base can stay on the host: set lora_rank to 1 or more"
        if self.precision.is_quantized:
            yield "offload", f"{self.precision.weights} layers cannot be trained from host memory"
        if not self.recompute.enabled:
            yield (
                "offload",
                "without gradient_checkpointing autograd keeps every weight on the device",
            )
        if self.process.compile:
            yield "offload", "torch_compile cannot follow weights that move to and from the host"
