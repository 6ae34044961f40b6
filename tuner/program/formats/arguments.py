"""Arguments that several tools share: those of transformers' `TrainingArguments`."""

from __future__ import annotations

from typing import Any

from tuner.program.formats.settings_reader import SettingsReader

Settings = dict[str, Any]


_OWN_PREPARATION = "the tool widens no embeddings and no head"


def without_none(settings: Settings) -> Settings:
    """`settings` less those that the workload has no value for."""
    return {name: value for name, value in settings.items() if value is not None}


def trainer_arguments(chosen: SettingsReader, loss: str | None = "transformers") -> Settings:
    """Keyword arguments of `transformers.TrainingArguments`.

    `loss` is how the tool computes it; None where the tool speaks of it itself.
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
        "optim": chosen.get("optimizer"),
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        "tf32": True if chosen.text("precision") == "tf32" else None,
        "max_grad_norm": chosen.get("max_grad_norm"),
        "deepspeed": _deepspeed(chosen),
    }
    return without_none(settings)


def _deepspeed(chosen: SettingsReader) -> Settings | None:
    """DeepSpeed's settings, which take the rest from the arguments; None without ZeRO."""
    zero = chosen.zero
    if zero is None:
        return None
    filled = dict.fromkeys(
        (
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        "auto",
    )
    return {**filled, "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def machine_arguments(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `TrainingArguments` about the machine, where the space has them."""
    workers = chosen.get("num_workers")
    prefetch, persistent = chosen.get("prefetch_factor"), chosen.get("persistent_workers")
    chosen.leave_unless_empty("allocator", "set PYTORCH_CUDA_ALLOC_CONF in the environment")
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


DTYPE_OF_MIXED = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def own_preparation(chosen: SettingsReader) -> None:
    """Note that the tool leaves the rest of a quantised model in the dtype of loading."""
    if chosen.is_quantized:
        chosen.implies("kbit_preparation", "none", _OWN_PREPARATION)
    else:
        chosen.get("kbit_preparation")
