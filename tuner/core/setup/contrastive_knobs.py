"""The vocabulary of workload `contrastive`: an embedder trained on anchors and candidates."""

from __future__ import annotations

from tuner.core.setup.encoder_knobs import ALWAYS, ENCODER
from tuner.core.setup.knob_schema import KnobSchema, WorkloadSchema

_OWN = (
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
        default=("all-linear",),
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
        default=("none",),
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

CONTRASTIVE = WorkloadSchema(
    "contrastive", {term.name: term for term in (*ENCODER, *_OWN)}, always=ALWAYS
)
