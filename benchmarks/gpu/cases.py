"""What is run: configurations of several models, the most telling ones first.

A run that is cut short keeps its first rows, so each block of the list covers models,
precisions and sizes before the next one goes into depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION_ONLY = ("q_proj", "k_proj", "v_proj", "o_proj")

T4_GIB, TITAN_GIB, A6000_GIB = 14.7, 23.6, 47.4
"""What torch offers of a T4, a TITAN RTX or Quadro RTX 6000, and an RTX A6000."""

_AUTOCAST = {"nf4": "bf16", "int8": "bf16", "bf16": "bf16", "fp16": "fp16"}
"""Mixed precision that goes with the precision of the weights, where a case says nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of one model, perhaps under a memory limit (GiB of reserved memory).

    `allocator` is a value of PYTORCH_CUDA_ALLOC_CONF. `expected_s` is about what the case takes
    on an H200; a case that would not fit the time that is left is not begun.
    """

    model: str
    settings: Mapping[str, Any]
    limit_gib: float | None = None
    allocator: str = ""
    expected_s: float = 8.0
    model_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's architecture (the smoke run's tiny models)."""

    @property
    def name(self) -> str:
        """A short label that names everything in which cases differ."""
        s = self.settings
        parts = [
            self.model,
            s["precision"] if s["mixed_precision"] != "no" else f"{s['precision']}-pure",
            f"r{s['lora_rank']}" if s["lora_rank"] else "full",
            f"{s['micro_batch']}x{s['max_length']}",
            "ckpt" if s["gradient_checkpointing"] else "nockpt",
            s["attention"],
            s["optimizer"],
        ]
        if s["grad_accum"] > 1:
            parts.append(f"ga{s['grad_accum']}")
        if s["lora_targets"] == ATTENTION_ONLY:
            parts.append("qkvo")
        if s.get("training_loop", "trainer") != "trainer":
            parts.append(s["training_loop"])
        if self.limit_gib:
            parts.append(f"<{self.limit_gib}GiB")
        if self.allocator:
            parts.append(self.allocator)
        return " ".join(map(str, parts))


def case(model: str, precision: str, size: tuple[int, int], **changes: Any) -> Case:
    """LoRA fine-tuning; `size` is (micro-batch, length), `changes` knobs or fields of `Case`."""
    fields = {n: changes.pop(n) for n in ("limit_gib", "allocator", "expected_s") if n in changes}
    overrides = changes.pop("model_overrides", {})
    settings: dict[str, Any] = {
        "micro_batch": size[0],
        "max_length": size[1],
        "grad_accum": 1,
        "lora_rank": 16,
        "lora_targets": ALL_LINEAR,
        "precision": precision,
        "mixed_precision": _AUTOCAST.get(precision, "no"),
        "gradient_checkpointing": True,
        "attention": "sdpa",
        "optimizer": "adamw_torch",
    }
    unknown = changes.keys() - {*settings, "lora_alpha", "lora_dropout", "training_loop"}
    if unknown:
        raise ValueError(f"not knobs: {sorted(unknown)}")
    return Case(model=model, settings={**settings, **changes}, model_overrides=overrides, **fields)


def full_list() -> list[Case]:
    """All cases, by value."""
    return [*_breadth(), *_limits(), *_depth()]


def _breadth() -> list[Case]:
    """Every model and precision once, at the settings that people use."""
    big = {"optimizer": "paged_adamw_8bit", "lora_rank": 128}
    return [
        case("qwen2.5-1.5b", "bf16", (2, 1024), expected_s=6),
        case("medgemma-27b-text", "nf4", (4, 1024), expected_s=35, **big),
        case("mistral-7b-v0.1", "bf16", (4, 4096), lora_targets=ATTENTION_ONLY, expected_s=16),
        case("llama-3.1-8b", "bf16", (2, 1536), lora_rank=64, expected_s=12),
        case("tinyllama-1.1b", "nf4", (4, 512), optimizer="paged_adamw_8bit", expected_s=6),
        case("qwen2.5-7b", "fp16", (1, 2048), lora_rank=128, expected_s=12),
        case("gemma-2-2b", "bf16", (2, 1024), attention="eager", expected_s=8),
        case("qwen2.5-0.5b", "fp32", (4, 512), lora_rank=0, mixed_precision="bf16", expected_s=6),
        case("qwen2.5-1.5b", "int8", (2, 1024), expected_s=8),
        case("llama-3.1-8b", "nf4", (4, 1024), optimizer="adamw_8bit", expected_s=12),
        case("qwen2.5-1.5b", "bf16", (4, 1024), gradient_checkpointing=False, expected_s=6),
        case("tinyllama-1.1b", "fp32", (2, 1024), expected_s=6),
        case("tinyllama-1.1b", "tf32", (2, 1024), expected_s=6),
    ]


def _limits() -> list[Case]:
    """Pairs on the two sides of the memory of smaller GPUs."""
    big = {"optimizer": "paged_adamw_8bit", "lora_rank": 128, "limit_gib": A6000_GIB}
    seven = {"lora_rank": 128, "limit_gib": TITAN_GIB}
    small = {"limit_gib": T4_GIB, "mixed_precision": "fp16"}
    return [
        case("medgemma-27b-text", "nf4", (4, 1024), expected_s=30, **big),
        case("medgemma-27b-text", "nf4", (8, 1024), expected_s=30, **big),
        case("qwen2.5-7b", "bf16", (2, 2048), expected_s=12, **seven),
        case("qwen2.5-7b", "bf16", (1, 1024), expected_s=10, **seven),
        case("qwen2.5-1.5b", "fp16", (4, 1024), expected_s=6, **small),
        case("qwen2.5-1.5b", "fp16", (8, 1024), expected_s=6, **small),
        case("llama-3.1-8b", "nf4", (2, 1024), expected_s=10, **small),
        case("llama-3.1-8b", "nf4", (8, 1024), expected_s=10, **small),
    ]


def _depth() -> list[Case]:
    """One knob at a time, from the breadth's cases."""
    return [
        case("qwen2.5-1.5b", "bf16", (2, 1024), attention="eager", expected_s=6),
        case("qwen2.5-1.5b", "bf16", (1, 1024), expected_s=6),
        case("qwen2.5-1.5b", "bf16", (8, 1024), expected_s=7),
        case("qwen2.5-1.5b", "bf16", (2, 256), expected_s=6),
        case("qwen2.5-1.5b", "bf16", (2, 4096), expected_s=7),
        case("qwen2.5-1.5b", "bf16", (2, 1024), lora_rank=8, expected_s=6),
        case("qwen2.5-1.5b", "bf16", (2, 1024), lora_rank=128, expected_s=6),
        case("qwen2.5-1.5b", "bf16", (2, 1024), grad_accum=4, expected_s=7),
        case("qwen2.5-1.5b", "bf16", (2, 1024), mixed_precision="no", expected_s=6),
        case("qwen2.5-1.5b", "bf16", (2, 1024), training_loop="loop", expected_s=6),
        case("mistral-7b-v0.1", "bf16", (8, 4096), lora_targets=ATTENTION_ONLY, expected_s=18),
        case("mistral-7b-v0.1", "nf4", (4, 2048), optimizer="adamw_8bit", expected_s=14),
        case("tinyllama-1.1b", "fp16", (4, 1024), expected_s=6),
        case("tinyllama-1.1b", "bf16", (4, 1024), optimizer="adamw_8bit", expected_s=6),
        case("qwen2.5-0.5b", "bf16", (4, 1024), lora_rank=0, mixed_precision="no",
             optimizer="adamw_8bit", expected_s=6),
        case("qwen2.5-0.5b", "fp32", (2, 1024), lora_rank=0, mixed_precision="bf16",
             gradient_checkpointing=False, expected_s=6),
        case("gemma-2-2b", "nf4", (2, 512), attention="eager", lora_rank=64,
             optimizer="paged_adamw_8bit", expected_s=8),
        case("qwen2.5-7b", "int8", (2, 1024), lora_rank=64, expected_s=14),
        case("llama-3.1-8b", "bf16", (4, 2048), lora_rank=64, expected_s=14),
        case("medgemma-27b-text", "nf4", (1, 2048), optimizer="adamw_torch", lora_rank=64,
             expected_s=32),
        case("qwen2.5-1.5b", "bf16", (4, 1024), allocator="expandable_segments:True",
             expected_s=6),
        case("medgemma-27b-text", "nf4", (4, 1024), optimizer="paged_adamw_8bit", lora_rank=128,
             attention="eager", expected_s=32),
    ]  # fmt: skip


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def smoke_list() -> list[Case]:
    """Tiny models through every path of the code; the last one must run out of memory."""
    tiny: dict[str, Any] = {"model_overrides": _TINY, "expected_s": 3, "lora_rank": 8}
    return [
        case("tinyllama-1.1b", "fp32", (2, 32), **tiny),
        case("tinyllama-1.1b", "nf4", (2, 32), **{**tiny, "optimizer": "adamw_8bit"}),
        case("qwen2.5-0.5b", "int8", (2, 32), **tiny),
        case("gemma-2-2b", "bf16", (1, 32), **{**tiny, "attention": "eager", "lora_rank": 0},
             grad_accum=2, mixed_precision="no"),
        case("tinyllama-1.1b", "fp32", (64, 1024), limit_gib=0.05, **tiny),
    ]  # fmt: skip
