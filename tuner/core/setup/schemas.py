"""What each knob is called, what it may be, and what it is when nobody says.

One table per workload. The space files, `tuner estimate --set` and the workloads read the same
one, so a name means one thing everywhere and a misspelt one is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.core.records import Configuration
from tuner.core.setup.batch_knobs import BATCH, LORA_DROPOUT
from tuner.core.setup.contrastive_knobs import CONTRASTIVE
from tuner.core.setup.distributed_knobs import DISTRIBUTED_TERMS
from tuner.core.setup.knob_schema import KnobSchema, WorkloadSchema
from tuner.core.setup.machine_knobs import MACHINE
from tuner.core.setup.multitask_knobs import MULTITASK
from tuner.core.setup.optimizers import OPTIMIZERS, REFUSED

__all__ = ["ALL_LINEAR", "NO_NAMES", "SCHEMAS", "KnobSchema", "WorkloadSchema", "unmodelled"]

ALL_LINEAR: tuple[str, ...] = ("all-linear",)
"""peft's own word for every linear layer but the output head, whatever the model calls them."""

NO_NAMES: tuple[str, ...] = ("none",)
"""The empty list of names, which a space file cannot write."""

_CAUSAL_LM = (
    *BATCH,
    KnobSchema(
        "lora_rank",
        "int",
        "rank of the LoRA adapters; 0 for none: full fine-tuning, which trains every weight",
        default=16,
        minimum=0,
        capacity=True,
    ),
    KnobSchema(
        "lora_alpha",
        "int",
        "scale of the LoRA adapters: no effect on memory or time",
        default=32,
        default_rule="2 * lora_rank if lora_rank else 1",
        minimum=1,
    ),
    LORA_DROPOUT,
    KnobSchema("lora_targets", "names", "modules that get an adapter", default=ALL_LINEAR),
    KnobSchema(
        "modules_to_save",
        "names",
        "modules trained as full copies beside the adapters, such as lm_head or embed_tokens; "
        "none for no module",
        default=NO_NAMES,
        optional=True,
    ),
    KnobSchema(
        "adapter_dtype",
        "word",
        "dtype of the adapters: fp32, as peft makes them, or bf16, as TRL's trainers keep those of "
        "a quantised model",
        default="fp32",
        allowed=("fp32", "bf16"),
        optional=True,
    ),
    KnobSchema(
        "adapter",
        "word",
        "kind of the adapters: lora; rslora, scaled by the root of the rank, which takes as much; "
        "or dora, with a magnitude for each output, whose passes make the whole adapted weight",
        default="lora",
        allowed=("lora", "rslora", "dora"),
        optional=True,
        refused={
            "adalora": "lora with lora_rank at its init_r comes nearest",
            "ia3": "lora with lora_rank 1, which has somewhat more to train, comes nearest",
            "vera": "lora with lora_rank 1, which has somewhat more to train, comes nearest",
            "oft": "lora with as many trainable parameters comes nearest",
            "prompt_tuning": "lora with lora_rank 1 and its tokens added to max_length is nearest",
        },
    ),
    KnobSchema(
        "num_labels",
        "int",
        "train a classifier of whole texts with so many labels, as "
        "AutoModelForSequenceClassification; 1 is a regression, 0 a language model",
        default=0,
        minimum=0,
        optional=True,
    ),
    KnobSchema(
        "reference_pass",
        "bool",
        "after each forward pass another one without gradients and adapters: the reference of "
        "preference training (DPO), whose chosen and rejected answers are a sequence each",
        default=False,
        optional=True,
    ),
    KnobSchema(
        "max_length",
        "int",
        "longest sequence in tokens; longer examples are cut",
        default=1024,
        minimum=1,
        capacity=True,
    ),
    KnobSchema(
        "images",
        "int",
        "images of each example, whose tokens are part of max_length; of models that cut an image "
        "into tiles, the tiles",
        default=0,
        minimum=0,
        optional=True,
    ),
    KnobSchema(
        "image_size",
        "int",
        "pixels of an image's sides, of models that take any size; 0 is the size that the vision "
        "tower was made for",
        default=0,
        minimum=0,
        optional=True,
    ),
    KnobSchema(
        "padding",
        "word",
        "max_length: every example is padded, so attention gets a mask; none: the longest example "
        "of a batch has no padding, and no mask where all are as long",
        default="none",
        allowed=("none", "max_length"),
        optional=True,
    ),
    KnobSchema(
        "precision",
        "word",
        "how the base weights are kept: nf4 and int8 are quantised by bitsandbytes, tf32 is "
        "fp32 weights with TF32 matrix products",
        default="bf16",
        allowed=("fp32", "tf32", "fp16", "bf16", "int8", "nf4"),
        refused={
            **dict.fromkeys(("awq", "gptq", "hqq", "mxfp4"), "nf4, of 4 bits, comes nearest"),
            "fp8": "int8, of as many bits, comes nearest",
        },
    ),
    KnobSchema(
        "mixed_precision",
        "word",
        "autocast of the forward pass, as Trainer's bf16=True and fp16=True",
        default="bf16",
        default_rule="'no' if precision in ('fp32', 'tf32') else "
        "'fp16' if precision == 'fp16' else 'bf16'",
        allowed=("no", "bf16", "fp16"),
    ),
    KnobSchema(
        "compute_dtype",
        "word",
        "dtype of products with nf4 and int8 layers and of what is not quantised; auto is that "
        "of mixed_precision, else bf16",
        default="auto",
        allowed=("auto", "fp32", "fp16", "bf16"),
    ),
    KnobSchema(
        "double_quant",
        "bool",
        "nf4 only: keep the scales of weight blocks in 8 bits too (bnb_4bit_use_double_quant)",
        default=True,
    ),
    KnobSchema(
        "kbit_preparation",
        "word",
        "nf4 and int8 with adapters: widen what is not quantised to fp32, as peft's "
        "prepare_model_for_kbit_training, only the norms of it, as trl's SFTTrainer, or nothing",
        default="peft",
        allowed=("peft", "trl", "none"),
    ),
    KnobSchema(
        "loss",
        "word",
        "how the loss treats the logits: as the installed transformers does; as versions 4.46 to "
        "4.48 did, with a copy; or chunked, as TRL's trainers since 1.16, which never have them",
        default="transformers",
        allowed=("transformers", "transformers_4_46", "chunked"),
        refused=dict.fromkeys(
            ("cut_cross_entropy", "liger", "unsloth"),
            "chunked, which never has the whole logits either, comes nearest",
        ),
    ),
    KnobSchema(
        "fused_loss",
        "bool",
        "a fused cross entropy that turns the logits into their gradient in place",
        default=False,
    ),
    KnobSchema(
        "gradient_checkpointing",
        "bool",
        "recompute each layer's activations in the backward pass instead of keeping them",
        default=True,
    ),
    KnobSchema(
        "use_reentrant",
        "bool",
        "with gradient_checkpointing: PyTorch's older way (use_reentrant=True), which keeps less "
        "of a layer at once; what checkpoints have that are enabled without keyword arguments",
        default=False,
        optional=True,
    ),
    KnobSchema(
        "optimizer",
        "word",
        "optimizer by its name in transformers' TrainingArguments",
        default="adamw_torch",
        allowed=tuple(OPTIMIZERS),
        refused=REFUSED,
    ),
    KnobSchema(
        "attention",
        "word",
        "attn_implementation of transformers",
        default="sdpa",
        allowed=("eager", "sdpa", "flash_attention_2"),
    ),
    KnobSchema(
        "max_grad_norm",
        "float",
        "gradients are clipped to this norm; 0 does not clip (TrainingArguments' default is 1)",
        default=1.0,
        minimum=0,
    ),
    KnobSchema(
        "training_loop",
        "word",
        "who runs the step: transformers' Trainer; a function of one's own, which holds the "
        "model's outputs (the logits) until backward has ended; or the body of a loop, whose "
        "variables hold them until the next forward pass has ended",
        default="trainer",
        allowed=("trainer", "function", "loop"),
    ),
)

SCHEMAS: Mapping[str, WorkloadSchema] = {
    "causal_lm": WorkloadSchema(
        "causal_lm",
        {term.name: term for term in (*_CAUSAL_LM, *MACHINE, *DISTRIBUTED_TERMS)},
        always=("effective_batch == micro_batch * grad_accum",),
    ),
    "contrastive": CONTRASTIVE,
    "multitask": MULTITASK,
}
"""By workload. A workload without a table here cannot be searched."""


def unmodelled(workload: str, configuration: Configuration) -> tuple[str, ...]:
    """The knobs that `configuration` sets to something whose effect no prediction knows.

    Those that have their default are not among them: predictions are of the default.
    """
    return tuple(
        name
        for name, term in SCHEMAS[workload].terms.items()
        if not term.modelled and configuration.get(name, term.default) != term.default
    )
