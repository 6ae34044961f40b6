"""The vocabularies of the workloads around an encoder: `contrastive` and `multitask`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.core.setup.causal_lm import EFFECTIVE_BATCH, Adapter
from tuner.core.setup.common import Batch, Loader
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.core.setup.schema import ALL_LINEAR, NO_NAMES, Group, KnobSchema, WorkloadSchema, knob


@dataclass(frozen=True, slots=True)
class Encoder(Group):
    """The step around an encoder, whatever its model computes."""

    length: int = knob(
        "max_length",
        "longest sequence in tokens; longer texts are cut",
        default=512,
        minimum=1,
        capacity=True,
    )
    padding: str = knob(
        "padding",
        "max_length: sequences are padded, so attention gets a mask; none: every sequence is full",
        default="max_length",
        allowed=("max_length", "none"),
    )
    precision: str = knob(
        "precision",
        "how the weights are kept: tf32 is fp32 weights with TF32 matrix products",
        default="fp32",
        allowed=("fp32", "tf32"),
    )
    autocast: str = knob(
        "mixed_precision",
        "autocast of the forward pass; fp16 scales the loss (GradScaler)",
        default="fp16",
        allowed=("no", "bf16", "fp16"),
    )
    optimizer: str = knob(
        "optimizer",
        "optimizer by its name in transformers' TrainingArguments",
        default="adamw_torch",
        allowed=tuple(OPTIMIZERS),
    )
    attention: str = knob(
        "attention",
        "attn_implementation of transformers",
        default="sdpa",
        allowed=("eager", "sdpa"),
    )
    max_grad_norm: float = knob(
        "max_grad_norm",
        "gradients are clipped to this norm; 0 does not clip",
        default=1.0,
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class Comparison(Group):
    """The knobs of `contrastive` beside those of its step."""

    lora_rank: int = knob(
        "lora_rank", "rank of the LoRA adapters", default=8, minimum=1, capacity=True
    )
    lora_alpha: int = knob(
        "lora_alpha",
        "scale of the LoRA adapters: no effect on memory or time",
        default=16,
        default_rule="2 * lora_rank",
        minimum=1,
    )
    lora_targets: tuple[str, ...] = knob(
        "lora_targets", "modules that get an adapter", default=ALL_LINEAR
    )
    gradient_checkpointing: bool = knob(
        "gradient_checkpointing",
        "recompute each layer's activations in the backward pass instead of keeping them",
        default=True,
    )
    channels: tuple[str, ...] = knob(
        "channels", "texts of a sample; each has its own encoder", default=("text",)
    )
    short_channels: tuple[str, ...] = knob(
        "short_channels",
        "channels cut at short_length instead of max_length; none for no channel",
        default=NO_NAMES,
    )
    short_length: int = knob(
        "short_length", "length of the short channels in tokens", default=32, minimum=1
    )
    n_negatives: int = knob(
        "n_negatives",
        "negatives of each anchor: all go through the encoders in every step",
        default=8,
        minimum=1,
        capacity=True,
    )
    n_positives: int = knob(
        "n_positives",
        "positives of each anchor, one of them in a step: pairs of an epoch, not size of a step",
        default=1,
        minimum=1,
    )
    experts: int = knob(
        "experts", "experts after the concatenated channels; 0 for none", default=0, minimum=0
    )
    experts_per_sample: int = knob(
        "experts_per_sample", "experts that each sample uses", default=2, minimum=1
    )
    expert_hidden: int = knob(
        "expert_hidden", "width of the hidden layer of an expert", default=1024, minimum=1
    )
    geometry: str = knob(
        "geometry",
        "distances: on the hyperboloid (Lorentz model) or between unit vectors",
        default="cosine",
        allowed=("lorentz", "cosine"),
    )
    temperature: float = knob(
        "temperature",
        "of the InfoNCE loss: no effect on memory or time",
        default=0.07,
        minimum=1e-06,
    )
    load_balancing: float = knob(
        "load_balancing",
        "weight of the loss that keeps experts equally busy: no effect on memory or time",
        default=0.01,
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class Tasks(Group):
    """The knobs of `multitask` beside those of its step."""

    lora_rank: int = knob(
        "lora_rank",
        "rank of the LoRA set of each generation task",
        default=16,
        minimum=1,
        capacity=True,
    )
    lora_alpha: int = knob(
        "lora_alpha",
        "scale of the LoRA sets: no effect on memory or time",
        default=32,
        default_rule="2 * lora_rank",
        minimum=1,
    )
    classification_rank: int = knob(
        "classification_rank",
        "rank of the LoRA set of each classification task",
        default=16,
        minimum=1,
    )
    extraction_rank: int = knob(
        "extraction_rank", "rank of the LoRA set of each extraction task", default=16, minimum=1
    )
    lora_targets: tuple[str, ...] = knob(
        "lora_targets",
        "modules that get an adapter in each set",
        default=("query", "key", "value", "dense"),
    )
    backbone: str = knob(
        "backbone",
        "frozen: it runs under no_grad and the LoRA sets beside it get no gradient; adapted: each "
        "task runs it with its LoRA set inside, which is trained",
        default="adapted",
        allowed=("adapted", "frozen"),
    )
    phase: str = knob(
        "phase",
        "what is trained: the adapters and heads of trained_tasks; the router, on all tasks with "
        "everything else frozen; or both jointly",
        default="adapters",
        allowed=("adapters", "router", "joint"),
    )
    trained_tasks: tuple[str, ...] = knob(
        "trained_tasks",
        "tasks that a step of phase adapters trains; all for every task",
        default=("all",),
    )
    classification_tasks: tuple[str, ...] = knob(
        "classification_tasks",
        "tasks with one of two classes per sample; none for no task",
        default=("classification",),
    )
    extraction_tasks: tuple[str, ...] = knob(
        "extraction_tasks",
        "tasks with a start and an end position in the sample; none for no task",
        default=NO_NAMES,
    )
    generation_tasks: tuple[str, ...] = knob(
        "generation_tasks",
        "tasks with logits over the vocabulary at each target position; none for no task",
        default=NO_NAMES,
    )
    target_length: int = knob(
        "target_length", "target positions of generation tasks", default=128, minimum=1
    )
    short_target_tasks: tuple[str, ...] = knob(
        "short_target_tasks",
        "generation tasks with short_target_length positions instead; none for no task",
        default=NO_NAMES,
    )
    training_loop: str = knob(
        "training_loop",
        "who holds the outputs of the tasks: none (frees), a function that runs the step, until "
        "backward has ended, or the body of a loop, until the next forward pass has ended",
        default="frees",
        allowed=("frees", "function", "loop"),
        optional=True,
    )
    short_target_length: int = knob(
        "short_target_length",
        "target positions of the short generation tasks",
        default=64,
        minimum=1,
    )


def _vocabulary(own: type[Group]) -> dict[str, KnobSchema]:
    """The knobs of a workload: of its step, and its own."""
    dropout = [term for term in Adapter.terms() if term.name == "lora_dropout"]
    terms = (*Batch.terms(), *dropout, *Encoder.terms(), *Loader.terms(), *own.terms())
    return {term.name: term for term in terms}


def _texts_of_a_sample(configuration: Mapping[str, Any]) -> int:
    """Tokens of an anchor, a positive and the negatives, over all channels."""
    channels, short = (_listed(configuration[n]) for n in ("channels", "short_channels"))
    lengths = (configuration["short_length" if c in short else "max_length"] for c in channels)
    return int((2 + configuration["n_negatives"]) * sum(lengths))


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)


CONTRASTIVE = WorkloadSchema(
    "contrastive",
    _vocabulary(Comparison),
    always=(EFFECTIVE_BATCH,),
    tokens=_texts_of_a_sample,
)

MULTITASK = WorkloadSchema("multitask", _vocabulary(Tasks), always=(EFFECTIVE_BATCH,))
