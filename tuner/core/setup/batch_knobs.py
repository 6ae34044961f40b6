"""The knobs of a batch, and of what adapters drop: the same in every workload."""

from __future__ import annotations

from tuner.core.setup.knob_schema import KnobSchema

BATCH: tuple[KnobSchema, ...] = (
    KnobSchema(
        "micro_batch",
        "int",
        "samples in one forward and backward pass on one GPU",
        default=1,
        minimum=1,
    ),
    KnobSchema(
        "effective_batch",
        "int",
        "samples in one optimizer step: micro_batch * grad_accum (* gpus_per_trial)",
        default=16,
        minimum=1,
    ),
    KnobSchema(
        "grad_accum",
        "int",
        "micro-steps whose gradients are added up before an optimizer step",
        default=16,
        default_rule="effective_batch // micro_batch",
        minimum=1,
    ),
)

LORA_DROPOUT = KnobSchema(
    "lora_dropout", "float", "dropout before each adapter", default=0.0, minimum=0, below=1
)
