"""What each knob is called, what it may be, and what it is when nobody says.

One table per workload. The space files, `tuner estimate --set` and the workloads read the same
one, so a name means one thing everywhere and a misspelt one is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.records import Configuration
from tuner.space.contrastive_terms import CONTRASTIVE
from tuner.space.distributed_terms import DISTRIBUTED_TERMS
from tuner.space.machine_terms import MACHINE
from tuner.space.multitask_terms import MULTITASK
from tuner.space.optimizers import OPTIMIZERS
from tuner.space.terms import Term, Vocabulary

__all__ = ["ALL_LINEAR", "NO_NAMES", "VOCABULARIES", "Term", "Vocabulary", "unmodelled"]

ALL_LINEAR: tuple[str, ...] = ("all-linear",)
"""peft's own word for every linear layer but the output head, whatever the model calls them."""

NO_NAMES: tuple[str, ...] = ("none",)
"""The empty list of names, which a space file cannot write."""

_CAUSAL_LM = (
    Term(
        "micro_batch",
        "int",
        "sequences in one forward and backward pass on one GPU",
        default=1,
        minimum=1,
    ),
    Term(
        "effective_batch",
        "int",
        "sequences in one optimizer step: micro_batch * grad_accum (* gpus_per_trial)",
        default=16,
        minimum=1,
    ),
    Term(
        "grad_accum",
        "int",
        "micro-steps whose gradients are added up before an optimizer step",
        default=16,
        default_rule="effective_batch // micro_batch",
        minimum=1,
    ),
    Term("lora_rank", "int", "rank of the LoRA adapters", default=16, minimum=1, capacity=True),
    Term(
        "lora_alpha",
        "int",
        "scale of the LoRA adapters: no effect on memory or time",
        default=32,
        default_rule="2 * lora_rank",
        minimum=1,
    ),
    Term("lora_dropout", "float", "dropout before each adapter", default=0.0, minimum=0, below=1),
    Term("lora_targets", "names", "modules that get an adapter", default=ALL_LINEAR),
    Term(
        "modules_to_save",
        "names",
        "modules of which a full copy is trained beside the adapters, as lm_head or embed_tokens; "
        "none for no module",
        default=NO_NAMES,
        optional=True,
    ),
    Term(
        "max_length",
        "int",
        "longest sequence in tokens; longer examples are cut",
        default=1024,
        minimum=1,
        capacity=True,
    ),
    Term(
        "padding",
        "word",
        "max_length: every example is padded, so attention gets a mask; none: the longest example "
        "of a batch has no padding, and no mask where all are as long",
        default="none",
        allowed=("none", "max_length"),
        optional=True,
    ),
    Term(
        "precision",
        "word",
        "how the base weights are kept: nf4 and int8 are quantised by bitsandbytes, tf32 is "
        "fp32 weights with TF32 matrix products",
        default="bf16",
        allowed=("fp32", "tf32", "fp16", "bf16", "int8", "nf4"),
    ),
    Term(
        "mixed_precision",
        "word",
        "autocast of the forward pass, as Trainer's bf16=True and fp16=True",
        default="bf16",
        default_rule="'no' if precision in ('fp32', 'tf32') else "
        "'fp16' if precision == 'fp16' else 'bf16'",
        allowed=("no", "bf16", "fp16"),
    ),
    Term(
        "compute_dtype",
        "word",
        "dtype of products with nf4 and int8 layers and of what is not quantised; auto is that "
        "of mixed_precision, else bf16",
        default="auto",
        allowed=("auto", "fp32", "fp16", "bf16"),
    ),
    Term(
        "double_quant",
        "bool",
        "nf4 only: keep the scales of weight blocks in 8 bits too (bnb_4bit_use_double_quant)",
        default=True,
    ),
    Term(
        "kbit_preparation",
        "word",
        "nf4 and int8 with adapters: widen what is not quantised to fp32, as peft's "
        "prepare_model_for_kbit_training, only the norms of it, as trl's SFTTrainer, or nothing",
        default="peft",
        allowed=("peft", "trl", "none"),
    ),
    Term(
        "loss",
        "word",
        "how the loss treats the logits: as the installed transformers does, as versions 4.46 to "
        "4.48 or up to 4.45 did, or in the precision of the logits",
        default="transformers",
        allowed=("transformers", "transformers_4_46", "transformers_4_45", "unwidened"),
    ),
    Term(
        "fused_loss",
        "bool",
        "a fused cross entropy that turns the logits into their gradient in place",
        default=False,
    ),
    Term(
        "gradient_checkpointing",
        "bool",
        "recompute each layer's activations in the backward pass instead of keeping them",
        default=True,
    ),
    Term(
        "optimizer",
        "word",
        "optimizer by its name in transformers' TrainingArguments",
        default="adamw_torch",
        allowed=tuple(OPTIMIZERS),
    ),
    Term(
        "attention",
        "word",
        "attn_implementation of transformers",
        default="sdpa",
        allowed=("eager", "sdpa", "flash_attention_2"),
    ),
    Term(
        "max_grad_norm",
        "float",
        "gradients are clipped to this norm; 0 does not clip (TrainingArguments' default is 1)",
        default=1.0,
        minimum=0,
    ),
    Term(
        "training_loop",
        "word",
        "who runs the step: transformers' Trainer; a function of one's own, which holds the "
        "model's outputs (the logits) until backward has ended; or the body of a loop, whose "
        "variables hold them until the next forward pass has ended",
        default="trainer",
        allowed=("trainer", "function", "loop"),
    ),
)

VOCABULARIES: Mapping[str, Vocabulary] = {
    "causal_lm": Vocabulary(
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
        for name, term in VOCABULARIES[workload].terms.items()
        if not term.modelled and configuration.get(name, term.default) != term.default
    )
