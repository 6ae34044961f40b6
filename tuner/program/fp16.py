"""A training in bf16 on a GPU without bf16 (Turing, Volta): what to change, and what it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.setup.common import QUANTIZED
from tuner.program.arguments import ProgramTraining

_KNOBS = ("precision", "compute_dtype", "mixed_precision")


def has_bf16(gpu: Gpu | None) -> bool:
    """False for a GPU that computes in fp16 and not in bf16."""
    return gpu is None or "bf16" in gpu.flops or "fp16" not in gpu.flops


def in_fp16(
    training: ProgramTraining, knobs: Mapping[str, Any], gpu: Gpu
) -> tuple[dict[str, Any], list[str]]:
    """The knobs with fp16 for bf16, and the changes to the program that make them so.

    No knobs where nothing is in bf16.
    """
    found = {name: "fp16" for name in _KNOBS if knobs.get(name) == "bf16"}
    if not found:
        return {}, []
    changes = list(dict.fromkeys(_changes(training)))
    if knobs.get("mixed_precision") == "bf16" and not any("fp16=True" in text for text in changes):
        changes.append(f"{training['arguments'].title}: add fp16=True")
    is_quantised, rank = knobs.get("precision") in QUANTIZED, knobs.get("lora_rank")
    if not rank and found.get("precision") and knobs.get("mixed_precision") == "bf16":
        # Gradients of fp16 weights cannot be scaled.
        found["precision"] = "fp32"
        changes = [text.replace("torch.float16", "torch.float32") for text in changes]
    if rank and is_quantised and knobs.get("adapter_dtype") == "bf16":
        found["adapter_dtype"] = "fp32"
        changes.append(
            "widen the adapters, whose bf16 gradients fp16 cannot scale, before trainer.train(): "
            "for p in trainer.model.parameters(): p.data = p.data.float() if p.requires_grad "
            "else p.data"
        )
    why = gpu.unsupported_reason("bf16") or f"{gpu.name} has no bf16"
    return found, [f"{why}. Predicted with this change: {'; '.join(changes)}"]


def _changes(training: ProgramTraining) -> Iterator[str]:
    for arguments in training.groups.values():
        for name, argument in arguments.values.items():
            last = name.rpartition(".")[2]
            if last == "bf16" and argument.value in (True, "true", "auto"):
                yield f"{argument.where}: bf16=True -> fp16=True"
            elif str(argument.value).removeprefix("torch.") == "bfloat16" and "dtype" in last:
                yield f"{argument.where}: {last}=torch.bfloat16 -> {last}=torch.float16"
