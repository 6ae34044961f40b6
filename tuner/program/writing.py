"""A configuration that a format reads, with account of the values that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.core.aliases import meanings
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.common import OPTIMIZERS, QUANTIZED, TORCH_DTYPES
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    REDUCE_BUCKET,
    REDUCE_BUCKET_ELEMENTS,
    Parallelism,
)

Settings = dict[str, Any]

_OF_ADAPTERS = (
    "adapter", "lora_alpha", "lora_dropout", "lora_targets", "modules_to_save", "kbit_preparation",
)  # fmt: skip
_NO_SETTING = "the tool has no setting for it"


class SettingsReader:
    """Reads values for a format, and reports those that it never read, or left out, as `unsaid`."""

    def __init__(self, configuration: Configuration) -> None:
        self._values = configuration
        self._expressed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._defaults: dict[str, KnobValue] = {}

    def get(self, name: str) -> KnobValue | None:
        """The value of `name`, now expressed; None where the workload has no such name."""
        self._expressed.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str:
        """The value of `name` as a word; empty where the workload has no such name."""
        value = self.get(name)
        return "" if value is None else str(value)

    def implies(
        self,
        name: str,
        value: KnobValue,
        why: str = _NO_SETTING,
        *,
        default: KnobValue | None = None,
    ) -> None:
        """Note that the tool always does as `value` says; `default` applies without the name."""
        if name not in self._values and default is not None:
            self._defaults[name] = default
        if self._values.get(name, default) == value:
            self._expressed.add(name)
        else:
            self.leave(name, why)

    def leave(self, name: str, why: str) -> None:
        """Note why the format cannot say the value of `name`."""
        self._reasons[name] = why

    @property
    def unsaid(self) -> dict[str, tuple[KnobValue, str]]:
        """Values of the configuration that the format doesn't say, each with the reason."""
        values = {**self._values, **self._defaults}
        return {
            name: (value, self._reasons.get(name, _NO_SETTING))
            for name, value in values.items()
            if name in self._reasons or name not in self._expressed
        }

    @property
    def parallelism(self) -> Parallelism:
        """The sharing of work among ranks; their number and most strategies are the launcher's."""
        found = Parallelism.of(self._values)
        if found.ranks > 1:
            self.leave(GPUS_PER_TRIAL, "belongs to the launcher: one process a GPU")
        else:
            self.get(GPUS_PER_TRIAL)
            self.get(DISTRIBUTED)
        return found

    @property
    def zero(self) -> Settings | None:
        """DeepSpeed's `zero_optimization`; None without ZeRO."""
        stage = self.parallelism.zero_stage
        if not stage:
            return None
        self.get(DISTRIBUTED)
        bucket = self.get(REDUCE_BUCKET)
        # The number that is predicted, which the word "auto" would replace.
        return {"stage": stage, REDUCE_BUCKET: bucket or REDUCE_BUCKET_ELEMENTS}

    @property
    def is_quantized(self) -> bool:
        """True if the base weights are kept in 4 or 8 bits."""
        return self.text("precision") in QUANTIZED

    @property
    def dtype(self) -> str:
        """The torch dtype of weights that are not quantised, as the workload loads them."""
        precision = self.text("precision")
        if precision in TORCH_DTYPES:
            self.get("compute_dtype")
            return TORCH_DTYPES[precision]
        compute, mixed = self.text("compute_dtype"), self.text("mixed_precision")
        return TORCH_DTYPES.get(compute) or TORCH_DTYPES.get(mixed) or "bfloat16"

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained; otherwise their settings count as expressed."""
        if self.get("lora_rank") != 0:
            return True
        for name in _OF_ADAPTERS:
            self.get(name)
        return False

    def under(self, *names: str) -> Settings:
        """The values under names of a tool, several in a text, without those that it lacks.

        A name that stands for one value, such as use_dora, is true for that and left out otherwise.
        """
        found: Settings = {}
        for name in " ".join(names).split():
            knob, _, value = next(iter(meanings(name)), name).partition("=")
            said = self.get(knob)
            if name in _SPELLED:
                found[name] = _SPELLED[name](self)
            elif isinstance(said, tuple):
                found[name] = list(said) if said != ("none",) else None
            else:
                found[name] = (said == value or None) if value else said
        return without_none(found)

    def lora(self, *names: str) -> Settings:
        """The values under names of an adapter's settings; none where all weights are trained."""
        return self.under(*names) if self.has_adapters else {}

    def train_as_transformers(self, loss: str = "transformers") -> None:
        """Note what a loop of transformers' Trainer implies, with this `loss`."""
        self.get("effective_batch")  # the product of micro-batch and accumulation
        self.implies("training_loop", "trainer")
        if loss:
            self.implies("loss", loss)
        self.implies("fused_loss", False)
        if self.get("allocator") != "":
            self.leave("allocator", "set PYTORCH_CUDA_ALLOC_CONF in the environment")

    def leave_preparation(self) -> None:
        """Note that the tool leaves the rest of a quantised model in the dtype of loading."""
        if self.is_quantized:
            why = "the tool widens no embeddings and no head"
            self.implies("kbit_preparation", "none", why)
        else:
            self.get("kbit_preparation")


def without_none(settings: Settings) -> Settings:
    """`settings` without those that the workload has no value for, at any depth."""
    return {
        name: without_none(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value is not None
    }


def single_optimizer(chosen: SettingsReader) -> str:
    """The name of an optimizer that takes every parameter, as trainers build it."""
    name = chosen.text("optimizer")
    rest = OPTIMIZERS[name].rest
    if rest is None:
        return name
    chosen.leave("optimizer", f"{name} needs a second optimizer beside it: build both yourself")
    return rest


def _deepspeed(chosen: SettingsReader) -> Settings | None:
    zero = chosen.zero
    if zero is None:
        return None
    filled = (
        "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps",
        "gradient_clipping",
    )  # fmt: skip
    auto = dict.fromkeys(filled, "auto")
    return {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def _only(knob: str, when: str, *values: KnobValue) -> Callable[[SettingsReader], Any]:
    """Spells the value of `knob` where `when` has one of `values`, or is on."""

    def spelled(chosen: SettingsReader) -> Any:
        value, other = chosen.get(knob), chosen.get(when)
        return value if (other in values if values else other) else None

    return spelled


_SPELLED: Mapping[str, Callable[[SettingsReader], Any]] = {
    "bf16": lambda chosen: chosen.text("mixed_precision") == "bf16",
    "fp16": lambda chosen: chosen.text("mixed_precision") == "fp16",
    "bnb_4bit_compute_dtype": lambda chosen: chosen.dtype,
    "bnb_4bit_quant_type": _only("precision", "precision", "nf4"),
    "quantization_type": _only("precision", "precision", "nf4"),
    "use_bnb_nested_quant": _only("double_quant", "precision", "nf4"),
    "double_quantization": _only("double_quant", "precision", "nf4"),
    # Without processes there is nothing to prefetch with, and Trainer refuses it.
    "dataloader_prefetch_factor": _only("prefetch_factor", "num_workers"),
    "dataloader_persistent_workers": _only("persistent_workers", "num_workers"),
    "deepspeed": _deepspeed,
    # As the workload; the ways keep other tensors.
    "gradient_checkpointing_kwargs": lambda chosen: (
        {"use_reentrant": bool(chosen.get("use_reentrant"))}
        if chosen.get("gradient_checkpointing")
        else None
    ),
    "optim": single_optimizer,
    "target_modules": lambda chosen: (
        "all-linear"
        if (names := chosen.get("lora_targets")) == ("all-linear",)
        else list(names)
        if isinstance(names, tuple)
        else None
    ),
}
"""By name: how tools spell a value otherwise than tuner does."""

TRAINING = (
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing "
    "gradient_checkpointing_kwargs optim bf16 fp16 tf32 max_grad_norm deepspeed"
)
"""Names of `transformers.TrainingArguments`."""

MACHINE = (
    "torch_compile use_liger_kernel dataloader_num_workers dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_persistent_workers"
)
"""Names of `TrainingArguments` about the machine, which not every space has."""
