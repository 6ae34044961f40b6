"""The vocabularies of the workloads around an encoder: `contrastive` and `multitask`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.core.setup.causal_lm import EFFECTIVE_BATCH, Adapter
from tuner.core.setup.common import Batch, Loader
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.core.setup.schema import ALL_LINEAR, NO_NAMES, KnobSchema, WorkloadSchema

_ENCODER: tuple[KnobSchema, ...] = (
    *Batch.terms(),
    *(term for term in Adapter.terms() if term.name == "lora_dropout"),
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
    *Loader.terms(),
)
"""Everything but what the workload's own model has."""


_CONTRASTIVE = (
    KnobSchema(
        "lora_rank", "int", "rank of the LoRA adapters", default=8, minimum=1, capacity=True
    ),
    KnobSchema(
        "lora_alpha",
        "int",
        "scale of the LoRA adapters: no effect on memory or time",
        default=16,
        default_rule="2 * lora_rank",
        minimum=1,
    ),
    KnobSchema(
        "lora_targets",
        "names",
        "modules that get an adapter",
        default=ALL_LINEAR,
    ),
    KnobSchema(
        "gradient_checkpointing",
        "bool",
        "recompute each layer's activations in the backward pass instead of keeping them",
        default=True,
    ),
    KnobSchema(
        "channels",
        "names",
        "texts of a sample; each has its own encoder",
        default=("text",),
    ),
    KnobSchema(
        "short_channels",
        "names",
        "channels cut at short_length instead of max_length; none for no channel",
        default=NO_NAMES,
    ),
    KnobSchema(
        "short_length", "int", "length of the short channels in tokens", default=32, minimum=1
    ),
    KnobSchema(
        "n_negatives",
        "int",
        "negatives of each anchor: all go through the encoders in every step",
        default=8,
        minimum=1,
        capacity=True,
    ),
    KnobSchema(
        "n_positives",
        "int",
        "positives of each anchor, one of them in a step: pairs of an epoch, not size of a step",
        default=1,
        minimum=1,
    ),
    KnobSchema(
        "experts",
        "int",
        "experts after the concatenated channels; 0 for none",
        default=0,
        minimum=0,
    ),
    KnobSchema("experts_per_sample", "int", "experts that each sample uses", default=2, minimum=1),
    KnobSchema(
        "expert_hidden", "int", "width of the hidden layer of an expert", default=1024, minimum=1
    ),
    KnobSchema(
        "geometry",
        "word",
        "distances: on the hyperboloid (Lorentz model) or between unit vectors",
        default="cosine",
        allowed=("lorentz", "cosine"),
    ),
    KnobSchema(
        "temperature",
        "float",
        "of the InfoNCE loss: no effect on memory or time",
        default=0.07,
        minimum=1e-6,
    ),
    KnobSchema(
        "load_balancing",
        "float",
        "weight of the loss that keeps experts equally busy: no effect on memory or time",
        default=0.01,
        minimum=0,
    ),
)


def _texts_of_a_sample(configuration: Mapping[str, Any]) -> int:
    """Tokens of an anchor, a positive and the negatives, over all channels."""
    channels, short = (_listed(configuration[n]) for n in ("channels", "short_channels"))
    lengths = (configuration["short_length" if c in short else "max_length"] for c in channels)
    return int((2 + configuration["n_negatives"]) * sum(lengths))


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)


CONTRASTIVE = WorkloadSchema(
    "contrastive",
    {term.name: term for term in (*_ENCODER, *_CONTRASTIVE)},
    always=(EFFECTIVE_BATCH,),
    tokens=_texts_of_a_sample,
)

_MULTITASK = (
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
        default=NO_NAMES,
    ),
    KnobSchema(
        "generation_tasks",
        "names",
        "tasks with logits over the vocabulary at each target position; none for no task",
        default=NO_NAMES,
    ),
    KnobSchema(
        "target_length", "int", "target positions of generation tasks", default=128, minimum=1
    ),
    KnobSchema(
        "short_target_tasks",
        "names",
        "generation tasks with short_target_length positions instead; none for no task",
        default=NO_NAMES,
    ),
    KnobSchema(
        "training_loop",
        "word",
        "who holds the outputs of the tasks: none (frees), a function that runs the step, until "
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
    "multitask", {term.name: term for term in (*_ENCODER, *_MULTITASK)}, always=(EFFECTIVE_BATCH,)
)
