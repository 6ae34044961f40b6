"""What the five projects ran and believed: facts of their public sources, as settings of spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Used:
    """One of a project's configurations: what it set beside the baseline of the space.

    `said` is what the project said of it: reported where it was observed, expected where it was
    a guess.
    """

    label: str
    settings: Mapping[str, Any]
    said: str = ""


@dataclass(frozen=True)
class Finding:
    """What was wrong in a budget: a sentence, and the configuration whose numbers it names.

    The names are those of `benchmarks.casebook.numbers_of`, on the system's first GPU type.
    """

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A project: its space, its configurations by GPU type, and what its page says in words."""

    space: str
    title: str
    story: str
    used: Mapping[str, tuple[Used, ...]]
    findings: tuple[Finding, ...] = ()


_27B = (
    Used(
        "rank 128, micro-batch 1, 1024 tokens",
        {},
        "reported: 29 GB (micro-batch and length were not recorded)",
    ),
    Used("rank 128, micro-batch 4, 1024 tokens", {"micro_batch": 4}),
    Used("rank 128, micro-batch 8, 1024 tokens", {"micro_batch": 8}),
    Used("rank 256, micro-batch 1, 1024 tokens", {"lora_rank": 256}),
    Used("rank 384, micro-batch 1, 2048 tokens", {"lora_rank": 384, "max_length": 2048}),
    Used("rank 128, micro-batch 1, 1024 tokens, 8-bit weights", {"precision": "int8"}),
    Used("rank 128, micro-batch 1, 1024 tokens, plain AdamW", {"optimizer": "adamw_torch"}),
)

_QWEN_24 = (
    Used("fp16, rank 128, micro-batch 1, 512 tokens", {}, "used: 256 to 2048 tokens"),
    Used(
        "fp16, rank 128, micro-batch 1, 1024 tokens",
        {"max_length": 1024},
        "used: 256 to 2048 tokens",
    ),
    Used(
        "fp16, rank 128, micro-batch 1, 2048 tokens",
        {"max_length": 2048},
        "used: 256 to 2048 tokens",
    ),
    Used("fp16, rank 64, micro-batch 1, 512 tokens", {"lora_rank": 64}),
    Used("4-bit, rank 128, micro-batch 1, 512 tokens", {"precision": "nf4"}, "tried"),
)

_BF16 = {"precision": "bf16", "mixed_precision": "bf16"}

SYSTEMS = (
    System(
        space="qlora27b",
        title="A. Medical questions with MedGemma-27B, 48 GB",
        story="QLoRA on one RTX A6000. Reported: 29 GB before tuning, 48.5 of 49.1 GB after it. "
        "Expected: 50 to 60 s for an optimizer step of 32 examples.",
        used={"a6000": _27B},
        findings=(
            Finding(
                "Rank {lora_rank} has {trainable:,} trainable parameters, as the project counted. "
                "Kept in fp32 they take {adapters} with their gradients; paged optimizer state of "
                "{paged} is not on the GPU."
            ),
            Finding(
                "`prepare_model_for_kbit_training` widens the embedding to fp32: {embedding_fp32} "
                "in place of {embedding_half}. No budget had it."
            ),
            Finding(
                "It also turns checkpointing on, so that `grad_ckpt: False` in the scripts was an "
                "edit without effect. With an effect the same run would need {device}.",
                {"gradient_checkpointing": False},
            ),
            Finding(
                "With its defaults that is the reentrant kind, which this tool once did not know. "
                "8-bit weights, rank 16 on q, k, v and o, micro-batch 1: 36.1 to 37.0 GB were "
                "reported at 1024 tokens and 41.4 GB at 2048. It told 44.6 and 57.0 GiB; with "
                "`use_reentrant: true` it predicts {allocated} allocated at 1024 tokens.",
                {
                    "precision": "int8",
                    "lora_rank": 16,
                    "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
                    "use_reentrant": True,
                },
            ),
            Finding(
                "Logits over 262,144 words and what the loss makes of them take {logits} of "
                "{device} at 4 x 1024 tokens. No budget had them.",
                {"micro_batch": 4},
            ),
            Finding(
                "A step takes {step} with every example at full length, not 50 to 60 s. The "
                "examples have 235 tokens in the mean and a batch is as long as its longest, so "
                "that steps on the data are shorter; `tuner data` counts by how much."
            ),
        ),
    ),
    System(
        space="qlora4b",
        title="A. The same with MedGemma-4B, 24 GB",
        story="The fast model, on a TITAN RTX: Turing, so fp16 and a scaled loss.",
        used={
            "titan_rtx": (
                Used("rank 64, micro-batch 1, 1024 tokens", {}),
                Used("rank 64, micro-batch 4, 1024 tokens", {"micro_batch": 4}),
                Used("rank 64, micro-batch 16, 256 tokens", {"micro_batch": 16, "max_length": 256}),
                Used(
                    "rank 64, micro-batch 4, 1024 tokens, 8-bit",
                    {"micro_batch": 4, "precision": "int8"},
                ),
            )
        },
        findings=(
            Finding(
                "The model is more than its language model: a SigLIP tower of 27 layers is loaded "
                "beside it. LoRA finds `q_proj`, `k_proj` and `v_proj` in it by name: of "
                "{trainable:,} trainable parameters at rank {lora_rank}, {tower_adapters:,} never "
                "get a gradient from text."
            ),
            Finding("At 4 x 1024 tokens the logits take {logits} of {device}.", {"micro_batch": 4}),
        ),
    ),
    System(
        space="gemma2_2b",
        title="A. Gemma-2-2B for quick experiments, 16 GB",
        story="The same scripts with a small model, on whatever card is free.",
        used={
            "t4": (
                Used("rank 64, micro-batch 1, 1024 tokens", {}),
                Used("rank 64, micro-batch 4, 1024 tokens", {"micro_batch": 4}),
                Used("rank 64, micro-batch 8, 1024 tokens", {"micro_batch": 8}),
            ),
        },
        findings=(
            Finding(
                "A small model has a large head: 256,000 words make {logits} of {device} at 4 x "
                "1024 tokens.",
                {"micro_batch": 4},
            ),
        ),
    ),
    System(
        space="naics_embedder",
        title="B. A four-channel contrastive embedder, 24 and 80 GB",
        story="Four MiniLM encoders, experts, 24 negatives an anchor in the first stage. The "
        "project's own estimator proposed 45 x 5 on 24 GB and 128 x 2 on 80 GB, and was never "
        "checked. They ran 4 x 16 and 8 x 2 and settled on 12 x 2.",
        used={
            "rtx6000": (
                Used(
                    "micro-batch 45, accumulation 5",
                    {"micro_batch": 45, "effective_batch": 225},
                    "proposed",
                ),
                Used(
                    "micro-batch 4, accumulation 16",
                    {"micro_batch": 4, "effective_batch": 64},
                    "ran",
                ),
                Used(
                    "micro-batch 8, accumulation 2",
                    {"micro_batch": 8, "effective_batch": 16},
                    "ran",
                ),
                Used("micro-batch 12, accumulation 2", {"micro_batch": 12}, "settled on"),
            ),
            "a100_80gb": (
                Used(
                    "micro-batch 128, accumulation 2",
                    {"micro_batch": 128, "effective_batch": 256},
                    "proposed",
                ),
                Used("micro-batch 12, accumulation 2", {"micro_batch": 12}),
            ),
        },
        findings=(
            Finding(
                "One anchor is 26 texts in four channels: 104 sequences and {tokens:,} tokens, so "
                "that a micro-batch of 12 is one of 1,248 sequences."
            ),
            Finding(
                "Only {trainable:,} of {total:,} parameters are trained; activations take "
                "{activations} of {device}."
            ),
            Finding(
                "LoRA on all linear layers adapts the four poolers too, which never get a "
                "gradient: 24,576 parameters that this page once did not count. The program "
                "itself, *emulated* at 12 x 2, has as many and takes 12.98 GiB."
            ),
        ),
    ),
    System(
        space="dynamo_t4",
        title="C. RoBERTa with five task heads in three phases, 16 GB",
        story="A frozen encoder, and three heads with logits over 50,265 words at every target "
        "position. Expected: 6 to 10 GB.",
        used={
            "t4": (
                Used(
                    "micro-batch 64, accumulation 1, 512 tokens",
                    {"micro_batch": 64, "max_length": 512},
                    "used",
                ),
                Used(
                    "micro-batch 32, accumulation 2, 512 tokens",
                    {"micro_batch": 32, "max_length": 512},
                    "used",
                ),
                Used("micro-batch 8, accumulation 8, 256 tokens", {}, "used"),
                Used(
                    "micro-batch 12, accumulation 6, 256 tokens",
                    {"micro_batch": 12, "effective_batch": 72},
                    "used",
                ),
            )
        },
        findings=(
            Finding(
                "A sample has 128 + 2 x 256 target positions: 32.2 million logits, 61.4 MiB for "
                "each copy in fp16. Phases 2 and 3 run all three heads on every sample; the budget "
                "was that of the encoder."
            ),
            Finding(
                "The project's step holds the outputs of all heads until backward has ended, "
                "weighted in fp32: 123 MiB a sample. This page once left that out, called 32 x 2 "
                "at 512 tokens a fit at 12.93 GiB, and the program ran out of memory with it. "
                "*Emulated*, it runs out in the backward pass: it needs 16.12 GiB allocated, where "
                "{allocated} are predicted here.",
                {"micro_batch": 32, "max_length": 512},
            ),
        ),
    ),
    System(
        space="qwen7b_lora",
        title="D. Semantic parsing with Qwen2.5-7B, 24 and 48 GB",
        story="LoRA of rank 128 on weights in half precision, every example padded to the maximum.",
        used={
            "rtx6000": _QWEN_24,
            "rtx3090": (
                Used(
                    "bf16, rank 128, micro-batch 1, 512 tokens", _BF16, "used: 256 to 2048 tokens"
                ),
                Used(
                    "bf16, rank 128, micro-batch 1, 2048 tokens",
                    {**_BF16, "max_length": 2048},
                    "used: 256 to 2048 tokens",
                ),
            ),
            "a6000": (
                Used(
                    "bf16, rank 64, micro-batch 1, 1024 tokens",
                    {**_BF16, "lora_rank": 64, "max_length": 1024},
                    "tried",
                ),
            ),
        },
        findings=(
            Finding(
                "{trainable:,} trainable parameters at rank {lora_rank}: weights, gradients and "
                "two moments in fp32 are {four_copies} beside {frozen} of frozen fp16 weights."
            ),
            Finding(
                "Options of PyTorch's allocator act on what is reserved and not in use, "
                "{overhead} here. They make no room for what is allocated."
            ),
            Finding(
                "The program itself, *emulated* at 1 x 16 and 512 tokens in fp16, takes 20.51 GiB "
                "allocated; {allocated} are predicted here."
            ),
        ),
    ),
    System(
        space="cot8b_h100",
        title="E. Chains of thought with Llama-3.1-8B, 80 GB",
        story="LoRA of rank 64 in bf16 on a rented H100. Reported: 1.25 it/s at effective batch 8 "
        "(3,558 steps), about 40 % utilisation.",
        used={
            "h100_sxm": (
                Used("micro-batch 2, accumulation 4, 2048 tokens", {}, "used"),
                Used("micro-batch 4, accumulation 2, 2048 tokens", {"micro_batch": 4}, "used"),
                Used(
                    "micro-batch 4, accumulation 2, 1536 tokens",
                    {"micro_batch": 4, "max_length": 1536},
                ),
            )
        },
        findings=(
            Finding(
                "{device} of 79.19 GiB were in use, and checkpointing spent {recompute} of a step "
                "on computing again what there was room to keep."
            ),
            Finding(
                "The longest example has 1,481 tokens, so 1536 cuts none. The predictions are of "
                "full lengths; 1.25 steps of 8 examples a second are those of the data's own."
            ),
            Finding(
                "The program itself, *emulated* at 4 x 2 and 1536 tokens, takes 27.93 GiB "
                "allocated; {allocated} are predicted here.",
                {"micro_batch": 4, "max_length": 1536},
            ),
        ),
    ),
)
