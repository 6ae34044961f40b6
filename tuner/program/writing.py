"""A configuration that a format reads, with account of the values that it leaves out."""

from __future__ import annotations

from typing import Any

from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.common import QUANTIZED, TORCH_DTYPES
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    REDUCE_BUCKET,
    REDUCE_BUCKET_ELEMENTS,
    Parallelism,
)
from tuner.core.setup.optimizers import OPTIMIZERS

Settings = dict[str, Any]

DTYPE_OF_MIXED = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}

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

    def kind_of_adapter(self, prefix: str = "") -> dict[str, bool]:
        """The flag of `peft.LoraConfig` for DoRA or rsLoRA, behind `prefix`; none for LoRA."""
        kind = self.text("adapter")
        return {f"{prefix}use_{kind}": True} if kind in ("dora", "rslora") else {}

    def adapter(self, rank: str, prefix: str = "") -> Settings:
        """Kind, rank, alpha and dropout of the adapters; `rank` is the tool's name for that."""
        return {
            **self.kind_of_adapter(prefix),
            rank: self.get("lora_rank"),
            "lora_alpha": self.get("lora_alpha"),
            "lora_dropout": self.get("lora_dropout"),
        }

    @property
    def saved_modules(self) -> list[str] | None:
        """The modules of which a full copy is trained; None without any."""
        names = self.get("modules_to_save")
        return list(names) if isinstance(names, tuple) and names != ("none",) else None

    @property
    def targets(self) -> str | list[str] | None:
        """The modules that get an adapter, as peft takes them."""
        names = self.get("lora_targets")
        if not isinstance(names, tuple):
            return None
        return "all-linear" if names == ("all-linear",) else list(names)

    def leave_preparation(self) -> None:
        """Note that the tool leaves the rest of a quantised model in the dtype of loading."""
        if self.is_quantized:
            why = "the tool widens no embeddings and no head"
            self.implies("kbit_preparation", "none", why)
        else:
            self.get("kbit_preparation")


def without_none(settings: Settings) -> Settings:
    """`settings` without those that the workload has no value for."""
    return {name: value for name, value in settings.items() if value is not None}


def single_optimizer(chosen: SettingsReader) -> str:
    """The name of an optimizer that takes every parameter, as trainers build it."""
    name = chosen.text("optimizer")
    rest = OPTIMIZERS[name].rest
    if rest is None:
        return name
    chosen.leave("optimizer", f"{name} needs a second optimizer beside it: build both yourself")
    return rest


def training_arguments(chosen: SettingsReader, loss: str | None = "transformers") -> Settings:
    """Keyword arguments of `transformers.TrainingArguments`.

    `loss` is the tool's own; None if the tool handles it itself.
    """
    chosen.get("effective_batch")  # the product of the first two
    chosen.implies("training_loop", "trainer")
    if loss is not None:
        chosen.implies("loss", loss)
    chosen.implies("fused_loss", False)
    mixed = chosen.text("mixed_precision")
    checkpointing = chosen.get("gradient_checkpointing")
    reentrant = bool(chosen.get("use_reentrant"))
    settings: Settings = {
        "per_device_train_batch_size": chosen.get("micro_batch"),
        "gradient_accumulation_steps": chosen.get("grad_accum"),
        "gradient_checkpointing": checkpointing,
        # As the workload does it; the two ways keep other tensors.
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant} if checkpointing else None,
        "optim": single_optimizer(chosen),
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        "tf32": True if chosen.text("precision") == "tf32" else None,
        "max_grad_norm": chosen.get("max_grad_norm"),
        "deepspeed": _deepspeed(chosen.zero),
    }
    return without_none(settings)


def _deepspeed(zero: Settings | None) -> Settings | None:
    if zero is None:
        return None
    filled = (
        "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps",
        "gradient_clipping",
    )  # fmt: skip
    auto = dict.fromkeys(filled, "auto")
    return {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def machine_arguments(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `TrainingArguments` about the machine, where the space has them."""
    workers = chosen.get("num_workers")
    prefetch, persistent = chosen.get("prefetch_factor"), chosen.get("persistent_workers")
    if chosen.get("allocator") != "":
        chosen.leave("allocator", "set PYTORCH_CUDA_ALLOC_CONF in the environment")
    return without_none(
        {
            "torch_compile": chosen.get("torch_compile"),
            "use_liger_kernel": chosen.get("liger"),
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": chosen.get("pin_memory"),
            # Without processes there is nothing to prefetch with, and Trainer refuses it.
            "dataloader_prefetch_factor": prefetch if workers else None,
            "dataloader_persistent_workers": persistent if workers else None,
        }
    )
