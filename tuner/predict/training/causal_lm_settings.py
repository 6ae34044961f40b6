"""The knobs of workload `causal_lm`, checked and typed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from tuner.core.errors import InputError, Problem
from tuner.core.records import Configuration
from tuner.core.setup.distributed_knobs import (
    REDUCE_BUCKET,
    REDUCE_BUCKET_ELEMENTS,
    Parallelism,
)
from tuner.core.setup.schemas import NO_NAMES
from tuner.predict.training.sharding import Sharding, ZeroSettings
from tuner.predict.training.token_data import LoaderSettings

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class CausalLMSettings:
    """The knobs of this workload, checked and typed."""

    micro_batch: int
    max_length: int
    padded: bool
    images: int
    image_size: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    adapter: str
    adapter_dtype: str
    reference_pass: bool
    num_labels: int
    precision: str
    mixed_precision: str
    compute_dtype: str
    double_quant: bool
    kbit_preparation: str
    loss: str
    fused_loss: bool
    gradient_checkpointing: bool
    use_reentrant: bool
    optimizer: str
    attention: str
    max_grad_norm: float
    training_loop: str
    torch_compile: bool
    liger: bool
    offload: float
    cudnn_benchmark: bool
    allocator: str
    parallelism: Parallelism
    reshard_after_forward: bool
    grad_accum: int
    reduce_bucket_size: int
    loader: LoaderSettings

    @classmethod
    def from_configuration(cls, values: Configuration) -> CausalLMSettings:
        """Read the knobs. Raises KeyError when one of the required ones is missing."""
        rank = int(_number(values["lora_rank"]))
        _check_padding(values)
        return cls(
            micro_batch=int(_number(values["micro_batch"])),
            max_length=int(_number(values["max_length"])),
            padded=values.get("padding", "none") == "max_length",
            images=_images(values),
            image_size=int(_number(values.get("image_size", 0))),
            lora_rank=rank,
            lora_alpha=_number(values.get("lora_alpha", 2 * rank)),
            lora_dropout=_number(values.get("lora_dropout", 0.0)),
            lora_targets=_names(values.get("lora_targets", ())),
            modules_to_save=_saved(values),
            adapter=str(values.get("adapter", "lora")),
            adapter_dtype=str(values.get("adapter_dtype", "fp32")),
            reference_pass=_has_reference(values),
            num_labels=_labels(values),
            precision=str(values["precision"]),
            mixed_precision=str(values.get("mixed_precision", "no")),
            compute_dtype=str(values.get("compute_dtype", "auto")),
            double_quant=bool(values.get("double_quant", True)),
            kbit_preparation=str(values.get("kbit_preparation", "peft")),
            loss=str(values.get("loss", "transformers")),
            fused_loss=bool(values.get("fused_loss", False)),
            gradient_checkpointing=bool(values["gradient_checkpointing"]),
            use_reentrant=bool(values.get("use_reentrant", False)),
            optimizer=str(values["optimizer"]),
            attention=str(values["attention"]),
            max_grad_norm=_number(values.get("max_grad_norm", 1.0)),
            training_loop=str(values.get("training_loop", "trainer")),
            torch_compile=bool(values.get("torch_compile", False)),
            liger=bool(values.get("liger", False)),
            offload=_number(values.get("offload", 0.0)),
            cudnn_benchmark=bool(values.get("cudnn_benchmark", False)),
            allocator=str(values.get("allocator", "")),
            parallelism=Parallelism.of(values),
            reshard_after_forward=bool(values.get("reshard_after_forward", True)),
            grad_accum=int(_number(values.get("grad_accum", 1))),
            reduce_bucket_size=int(_number(values.get(REDUCE_BUCKET, REDUCE_BUCKET_ELEMENTS))),
            loader=_loader(values),
        )

    @property
    def is_quantized(self) -> bool:
        """Whether the base model is loaded in 4 or 8 bits."""
        return self.precision in ("nf4", "int8")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None without: FSDP2 and DeepSpeed cast weights."""
        return None if self.parallelism.casts_weights else self._mixed_dtype

    @property
    def _mixed_dtype(self) -> torch.dtype | None:
        return None if self.mixed_precision == "no" else _DTYPES[self.mixed_precision]

    @property
    def sharding(self) -> Sharding:
        """How FSDP2 is asked to shard the model."""
        by_trainer = self.training_loop == "trainer"
        return Sharding(by_trainer, self._mixed_dtype, self.reshard_after_forward)

    @property
    def zero(self) -> ZeroSettings:
        """How DeepSpeed is asked to train, where it does."""
        return ZeroSettings(
            stage=self.parallelism.zero_stage,
            micro_batch=self.micro_batch,
            grad_accum=self.grad_accum,
            max_grad_norm=self.max_grad_norm,
            mixed_precision=self.mixed_precision,
            reduce_bucket_size=self.reduce_bucket_size,
        )

    @property
    def quant_storage(self) -> torch.dtype | None:
        """What 4-bit codes are packed into: FSDP2 shards floating types only."""
        return self.load_dtype if self.parallelism.is_sharded else None

    @property
    def load_dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantised.

        Beside quantised layers it is the compute dtype: unless `compute_dtype` names one, that
        of autocast, else bfloat16.
        """
        if not self.is_quantized:
            return _DTYPES[self.precision]
        if self.compute_dtype != "auto":
            return _DTYPES[self.compute_dtype]
        return self._mixed_dtype or torch.bfloat16

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
        if not loader.num_workers and loader.prefetch_factor != LoaderSettings().prefetch_factor:
            yield "prefetch_factor", f"{loader.prefetch_factor} has no effect with num_workers 0"
        if self.offload:
            yield from self._against_offload()
        if self.mixed_precision == "fp16" and self._trains_fp16_weights:
            yield (
                "mixed_precision",
                "gradients of fp16 weights cannot be scaled: train with precision fp32",
            )

    @property
    def _trains_fp16_weights(self) -> bool:
        """Adapters are fp32 (peft), copies of whole modules as the modules are."""
        if self.load_dtype is not torch.float16 or (self.lora_rank and not self.modules_to_save):
            return False
        return not (self.is_quantized and self.kbit_preparation == "peft")

    def _without_gpu(self) -> Iterator[tuple[str, str]]:
        if self.allocator:
            yield "allocator", f"{self.allocator!r} has no effect without a GPU"
        if self.cudnn_benchmark:
            yield "cudnn_benchmark", "true has no effect without a GPU"
        if self.loader.pin_memory:
            yield "pin_memory", "true has no effect without a GPU"
        if self.liger:
            yield "liger", "its kernels need a GPU"
        if self.fused_loss:
            yield "fused_loss", "its kernel needs a GPU"
        if self.loss == "chunked":
            yield "loss", "chunked is computed by a kernel that needs a GPU"
        if self.optimizer.startswith("paged_"):
            yield "optimizer", f"{self.optimizer} pages between a GPU and the host"
        if self.attention == "flash_attention_2":
            yield "attention", "flash_attention_2 needs a GPU"

    def _against_offload(self) -> Iterator[tuple[str, str]]:
        if not self.lora_rank:
            yield "offload", "only a frozen base can stay on the host: set lora_rank to 1 or more"
        if self.is_quantized:
            yield "offload", f"{self.precision} layers cannot be trained from host memory"
        if not self.gradient_checkpointing:
            yield (
                "offload",
                "without gradient_checkpointing autograd keeps every weight on the device",
            )
        if self.torch_compile:
            yield "offload", "torch_compile cannot follow weights that move to and from the host"


def _loader(values: Configuration) -> LoaderSettings:
    names = [field.name for field in fields(LoaderSettings)]
    given: dict[str, Any] = {name: values[name] for name in names if name in values}
    return LoaderSettings(**given)


def _images(values: Configuration) -> int:
    """Images of an example. Raises `InputError` where only their size is given."""
    images = int(_number(values.get("images", 0)))
    if not images and values.get("image_size", 0):
        raise InputError(
            f"image_size {values['image_size']} has no effect without images",
            hint="set images to 1 or more",
        )
    return images


def _check_padding(values: Configuration) -> None:
    if values.get("padding") == "max_length" and values["attention"] == "flash_attention_2":
        raise InputError(
            "flash_attention_2 takes padding out of a batch, so that its work depends on the data",
            hint="set padding to none, or attention to sdpa",
        )


def _saved(values: Configuration) -> tuple[str, ...]:
    """Modules that are trained whole. Raises `InputError` where an adapter is on them too."""
    names = _names(values.get("modules_to_save", NO_NAMES))
    if names == NO_NAMES:
        return ()
    both = [name for name in names if name in _names(values.get("lora_targets", ()))]
    if both:
        raise InputError(
            f"{', '.join(both)} cannot be in lora_targets and in modules_to_save",
            hint="a module has an adapter or is trained whole",
        )
    return names


def _has_reference(values: Configuration) -> bool:
    """Whether there is a reference. Raises `InputError` where it is a second model."""
    wanted = bool(values.get("reference_pass", False))
    if wanted and not values["lora_rank"]:
        raise InputError(
            "reference_pass is one of the model without its adapters, and lora_rank 0 has none",
            hint="set lora_rank to 1 or more; a second model in memory is not predicted",
        )
    return wanted


def _labels(values: Configuration) -> int:
    """Labels of a classifier. Raises `InputError` for what only language models have."""
    labels = int(_number(values.get("num_labels", 0)))
    unfit = {
        "images": bool(values.get("images", 0)),
        "loss": values.get("loss", "transformers") != "transformers",
        **{name: bool(values.get(name)) for name in ("reference_pass", "fused_loss", "liger")},
    }
    for name in [name for name, is_set in unfit.items() if labels and is_set]:
        raise InputError(
            f"{name} {values[name]} does not go with num_labels {labels}: it is of language models",
            hint=f"leave {name} out, or set num_labels to 0",
        )
    return labels


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{value!r} is not a number")
    return value


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
