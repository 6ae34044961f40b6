"""The vocabulary of workload `multitask`: task heads and a router on one frozen encoder."""

from __future__ import annotations

from tuner.core.setup.encoder_knobs import ALWAYS, ENCODER
from tuner.core.setup.knob_schema import KnobSchema, WorkloadSchema

_OWN = (
    KnobSchema(
        "lora_rank",
        "int",
        "rank of the LoRA set of each generation task",
        default=16,
        minimum=1,
        capacity=True,
    ),
    KnobSchema(
        "lora_alpha",
        "int",
        "scale of the LoRA sets: no effect on memory or time",
        default=32,
        default_rule="2 * lora_rank",
        minimum=1,
    ),
    KnobSchema(
        "classification_rank",
        "int",
        "rank of the LoRA set of each classification task",
        default=16,
        minimum=1,
    ),
    KnobSchema(
        "extraction_rank",
        "int",
        "rank of the LoRA set of each extraction task",
        default=16,
        minimum=1,
    ),
    KnobSchema(
        "lora_targets",
        "names",
        "modules that get an adapter in each set",
        default=("query", "key", "value", "dense"),
    ),
    KnobSchema(
        "backbone",
        "word",
        "frozen: it runs under no_grad and the LoRA sets beside it get no gradient; adapted: each "
        "task runs it with its LoRA set inside, which is trained",
        default="adapted",
        allowed=("adapted", "frozen"),
    ),
    KnobSchema(
        "phase",
        "word",
        "what is trained: the adapters and heads of trained_tasks; the router, on all tasks with "
        "everything else frozen; or both jointly",
        default="adapters",
        allowed=("adapters", "router", "joint"),
    ),
    KnobSchema(
        "trained_tasks",
        "names",
        "tasks that a step of phase adapters trains; all for every task",
        default=("all",),
    ),
    KnobSchema(
        "classification_tasks",
        "names",
        "tasks with one of two classes per sample; none for no task",
        default=("classification",),
    ),
    KnobSchema(
        "extraction_tasks",
        "names",
        "tasks with a start and an end position in the sample; none for no task",
        default=("none",),
    ),
    KnobSchema(
        "generation_tasks",
        "names",
        "tasks with logits over the vocabulary at each target position; none for no task",
        default=("none",),
    ),
    KnobSchema(
        "target_length", "int", "target positions of generation tasks", default=128, minimum=1
    ),
    KnobSchema(
        "short_target_tasks",
        "names",
        "generation tasks with short_target_length positions instead; none for no task",
        default=("none",),
    ),
    KnobSchema(
        "training_loop",
        "word",
        "who holds the outputs of the tasks: nobody (frees), a function that runs the step, until "
        "backward has ended, or the body of a loop, until the next forward pass has ended",
        default="frees",
        allowed=("frees", "function", "loop"),
        optional=True,
    ),
    KnobSchema(
        "short_target_length",
        "int",
        "target positions of the short generation tasks",
        default=64,
        minimum=1,
    ),
)

MULTITASK = WorkloadSchema(
    "multitask", {term.name: term for term in (*ENCODER, *_OWN)}, always=ALWAYS
)
