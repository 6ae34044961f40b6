"""The names that workloads around an encoder share: batch, adapters' scale, precision, loader."""

from __future__ import annotations

from tuner.core.setup.batch_knobs import BATCH, LORA_DROPOUT
from tuner.core.setup.knob_schema import KnobSchema
from tuner.core.setup.machine_knobs import MACHINE
from tuner.core.setup.optimizers import OPTIMIZERS

_LOADER = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")

ENCODER: tuple[KnobSchema, ...] = (
    *BATCH,
    LORA_DROPOUT,
    KnobSchema(
        "max_length",
        "int",
        "longest sequence in tokens; longer texts are cut",
        default=512,
        minimum=1,
        capacity=True,
    ),
    KnobSchema(
        "padding",
        "word",
        "max_length: sequences are padded, so attention gets a mask; none: every sequence is full",
        default="max_length",
        allowed=("max_length", "none"),
    ),
    KnobSchema(
        "precision",
        "word",
        "how the weights are kept: tf32 is fp32 weights with TF32 matrix products",
        default="fp32",
        allowed=("fp32", "tf32"),
    ),
    KnobSchema(
        "mixed_precision",
        "word",
        "autocast of the forward pass; fp16 scales the loss (GradScaler)",
        default="fp16",
        allowed=("no", "bf16", "fp16"),
    ),
    KnobSchema(
        "optimizer",
        "word",
        "optimizer by its name in transformers' TrainingArguments",
        default="adamw_torch",
        allowed=tuple(OPTIMIZERS),
    ),
    KnobSchema(
        "attention",
        "word",
        "attn_implementation of transformers",
        default="sdpa",
        allowed=("eager", "sdpa"),
    ),
    KnobSchema(
        "max_grad_norm",
        "float",
        "gradients are clipped to this norm; 0 does not clip",
        default=1.0,
        minimum=0,
    ),
    *(term for term in MACHINE if term.name in _LOADER),
)
"""Everything but what the workload's own model has."""

ALWAYS = ("effective_batch == micro_batch * grad_accum",)
