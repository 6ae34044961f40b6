"""The vocabularies of the workloads around an encoder: `contrastive` and `multitask`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.core.setup.causal_lm import EFFECTIVE_BATCH, Adapter
from tuner.core.setup.common import OPTIMIZERS, Batch, Loader
from tuner.core.setup.schema import ALL_LINEAR, NO_NAMES, Group, KnobSchema, WorkloadSchema, knob


@dataclass(frozen=True, slots=True)
class Encoder(Group):
    """The step around an encoder, whatever its model computes."""

    # fmt: off
    length: int = knob("max_length", 512,
        "longest sequence in tokens; longer texts are cut", minimum=1, capacity=True)
    padding: str = knob("padding", "max_length",
        "max_length: sequences are padded, so attention gets a mask; none: every sequence is full",
        allowed=("max_length", "none"))
    precision: str = knob("precision", "fp32",
        "how the weights are kept: tf32 is fp32 weights with TF32 matrix products",
        allowed=("fp32", "tf32"))
    autocast: str = knob("mixed_precision", "fp16",
        "autocast of the forward pass; fp16 scales the loss (GradScaler)",
        allowed=("no", "bf16", "fp16"))
    optimizer: str = knob("optimizer", "adamw_torch",
        "optimizer by its name in transformers' TrainingArguments", allowed=tuple(OPTIMIZERS))
    attention: str = knob("attention", "sdpa",
        "attn_implementation of transformers", allowed=("eager", "sdpa"))
    max_grad_norm: float = knob("max_grad_norm", 1.0,
        "gradients are clipped to this norm; 0 does not clip", minimum=0)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Samples(Group):
    """The samples of `contrastive` and the adapters of its encoders."""

    # fmt: off
    lora_rank: int = knob("lora_rank", 8, "rank of the LoRA adapters", minimum=1, capacity=True)
    lora_alpha: int = knob("lora_alpha", 16,
        "scale of the LoRA adapters: no effect on memory or time",
        default_rule="2 * lora_rank", minimum=1)
    lora_targets: tuple[str, ...] = knob("lora_targets", ALL_LINEAR, "modules that get an adapter")
    checkpointing: bool = knob("gradient_checkpointing", True,
        "recompute each layer's activations in the backward pass instead of keeping them")
    channels: tuple[str, ...] = knob("channels", ("text",),
        "texts of a sample; each has its own encoder")
    short_channels: tuple[str, ...] = knob("short_channels", NO_NAMES,
        "channels cut at short_length instead of max_length; none for no channel")
    short_length: int = knob("short_length", 32,
        "length of the short channels in tokens", minimum=1)
    n_negatives: int = knob("n_negatives", 8,
        "negatives of each anchor: all go through the encoders in every step",
        minimum=1, capacity=True)
    n_positives: int = knob("n_positives", 1,
        "positives of each anchor, one of them in a step: pairs of an epoch, not size of a step",
        minimum=1)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Comparison(Samples):
    """The knobs of `contrastive` beside those of its step: samples, and how they are compared."""

    # fmt: off
    experts: int = knob("experts", 0,
        "experts after the concatenated channels; 0 for none", minimum=0)
    experts_per_sample: int = knob("experts_per_sample", 2,
        "experts that each sample uses", minimum=1)
    expert_hidden: int = knob("expert_hidden", 1024,
        "width of the hidden layer of an expert", minimum=1)
    geometry: str = knob("geometry", "cosine",
        "distances: on the hyperboloid (Lorentz model) or between unit vectors",
        allowed=("lorentz", "cosine"))
    temperature: float = knob("temperature", 0.07,
        "of the InfoNCE loss: no effect on memory or time", minimum=1e-06)
    load_balancing: float = knob("load_balancing", 0.01,
        "weight of the loss that keeps experts equally busy: no effect on memory or time",
        minimum=0)
    # fmt: on


@dataclass(frozen=True, slots=True)
class _TaskAdapters(Group):
    """The LoRA sets of `multitask`, beside a backbone or inside it."""

    # fmt: off
    lora_rank: int = knob("lora_rank", 16,
        "rank of the LoRA set of each generation task", minimum=1, capacity=True)
    lora_alpha: int = knob("lora_alpha", 32, "scale of the LoRA sets: no effect on memory or time",
        default_rule="2 * lora_rank", minimum=1)
    classification_rank: int = knob("classification_rank", 16,
        "rank of the LoRA set of each classification task", minimum=1)
    extraction_rank: int = knob("extraction_rank", 16,
        "rank of the LoRA set of each extraction task", minimum=1)
    lora_targets: tuple[str, ...] = knob("lora_targets", ("query", "key", "value", "dense"),
        "modules that get an adapter in each set")
    backbone: str = knob("backbone", "adapted",
        "frozen: it runs under no_grad and the LoRA sets beside it get no gradient; adapted: each "
        "task runs it with its LoRA set inside, which is trained",
        allowed=("adapted", "frozen"))
    # fmt: on


@dataclass(frozen=True, slots=True)
class Tasks(_TaskAdapters):
    """The knobs of `multitask` beside those of its step: LoRA sets, and what is trained."""

    # fmt: off
    phase: str = knob("phase", "adapters",
        "what is trained: the adapters and heads of trained_tasks; the router, on all tasks with "
        "everything else frozen; or both jointly",
        allowed=("adapters", "router", "joint"))
    trained_tasks: tuple[str, ...] = knob("trained_tasks", ("all",),
        "tasks that a step of phase adapters trains; all for every task")
    classification_tasks: tuple[str, ...] = knob("classification_tasks", ("classification",),
        "tasks with one of two classes per sample; none for no task")
    extraction_tasks: tuple[str, ...] = knob("extraction_tasks", NO_NAMES,
        "tasks with a start and an end position in the sample; none for no task")
    generation_tasks: tuple[str, ...] = knob("generation_tasks", NO_NAMES,
        "tasks with logits over the vocabulary at each target position; none for no task")
    target_length: int = knob("target_length", 128,
        "target positions of generation tasks", minimum=1)
    short_target_tasks: tuple[str, ...] = knob("short_target_tasks", NO_NAMES,
        "generation tasks with short_target_length positions instead; none for no task")
    training_loop: str = knob("training_loop", "frees",
        "who holds the outputs of the tasks: none (frees), a function that runs the step, until "
        "backward has ended, or the body of a loop, until the next forward pass has ended",
        allowed=("frees", "function", "loop"), optional=True)
    short_target_length: int = knob("short_target_length", 64,
        "target positions of the short generation tasks", minimum=1)
    # fmt: on


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
    "contrastive", _vocabulary(Comparison), always=(EFFECTIVE_BATCH,), tokens=_texts_of_a_sample
)

MULTITASK = WorkloadSchema("multitask", _vocabulary(Tasks), always=(EFFECTIVE_BATCH,))
