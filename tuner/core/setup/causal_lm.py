"""The knobs of workload `causal_lm`, as typed groups that `Setup.of` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tuner.core.records import KnobValue
from tuner.core.setup.common import OPTIMIZERS, QUANTIZED, REFUSED, Batch, Loader, Process
from tuner.core.setup.distributed_knobs import Parallelism, Ranks
from tuner.core.setup.schema import (
    ALL_LINEAR,
    BETWEEN_OPTIONS,
    NO_NAMES,
    Group,
    WorkloadSchema,
    knob,
)

LORA_FA, BLOCKS = "lora_fa", "bdlora"

PEFT_METHODS = (
    "adaption_prompt", "beft", "boft", "c3a", "deft", "delora", "fourierft", "gralora", "hira",
    "hra", "ia3", "lily", "ln_tuning", "loha", "lokr", "miss", "oft", "p_tuning", "peanut",
    "prefix_tuning", "prompt_tuning", "psoft", "pvera", "randlora", "road", "tinylora",
    "trainable_tokens", "vblora", "vera",
)  # fmt: skip
"""Methods of peft beside LoRA that a trace builds, by the name of their `PeftType`."""

PEFT_OPTIONS: Mapping[str, type] = {
    "adapter_layers": int, "adapter_len": int, "block_size": int, "decomposition_method": str,
    "encoder_hidden_size": int, "nblocks": int, "target_modules_bd_a": tuple,
    "target_modules_bd_b": tuple, "feedforward_modules": tuple, "init_weights": str,
    "num_attention_heads": int, "num_layers": int, "num_transformer_submodules": int,
    "num_virtual_tokens": int, "oft_block_size": int, "para": bool, "psoft_svd": str,
    "stride_A": int, "token_dim": int, "token_indices": tuple, "use_cayley_neumann": bool,
    "variant": str,
}  # fmt: skip
"""Arguments of their configurations that change memory or time, by kind."""


@dataclass(frozen=True, slots=True)
class Adapter(Group):
    """The adapters of a model, or none (rank 0)."""

    # fmt: off
    rank: int = knob("lora_rank", 16,
        "rank of the LoRA adapters; 0 for none: full fine-tuning, which trains every weight",
        minimum=0, capacity=True)
    alpha: int = knob("lora_alpha", 32, "scale of the LoRA adapters: no effect on memory or time",
        default_rule="2 * lora_rank if lora_rank else 1", minimum=1)
    dropout: float = knob("lora_dropout", 0.0, "dropout before each adapter", minimum=0, below=1)
    targets: tuple[str, ...] = knob("lora_targets", ALL_LINEAR, "modules that get an adapter")
    modules_to_save: tuple[str, ...] = knob("modules_to_save", NO_NAMES,
        "modules trained as full copies beside the adapters, such as lm_head or embed_tokens; "
        "none for no module",
        optional=True)
    dtype: str = knob("adapter_dtype", "fp32",
        "dtype of the adapters: fp32, as peft makes them, or bf16, as TRL's trainers keep those "
        "of a quantised model",
        allowed=("fp32", "bf16"), optional=True)
    kind: str = knob("adapter", "lora",
        "kind of the adapters: lora; rslora, scaled by the root of the rank, which takes as much; "
        "dora, with a magnitude for each output, whose passes make the whole adapted weight; "
        "lora_fa, of which the second matrix alone is trained; bdlora, of matrices in blocks; or "
        "another of peft's methods by its name, with adapter_options (predictions only)",
        allowed=("lora", "rslora", "dora", LORA_FA, BLOCKS, *PEFT_METHODS), optional=True,
        refused={"adalora": "lora with lora_rank at its init_r comes nearest"})
    options: str = knob("adapter_options", "",
        "arguments of a peft method's configuration beside its rank and its targets, such as "
        "num_virtual_tokens:20",
        kind="text", allowed=tuple(PEFT_OPTIONS), optional=True)
    # fmt: on

    @property
    def arguments(self) -> dict[str, Any]:
        """The `options` as values: numbers, words, and lists such as [q_proj,v_proj]."""
        found: dict[str, Any] = {}
        for part in filter(None, BETWEEN_OPTIONS.split(self.options)):
            name, _, text = part.partition(":")
            kind = PEFT_OPTIONS[name]
            if kind is tuple:
                words = text.strip("[]").split(",")
                found[name] = [int(word) if word.isdigit() else word for word in words]
            elif kind is bool or text in ("true", "false"):
                found[name] = text == "true"
            else:
                found[name] = kind(text)
        return found

    @property
    def saved(self) -> tuple[str, ...]:
        """Modules that are trained as full copies."""
        return () if self.modules_to_save == NO_NAMES else self.modules_to_save


@dataclass(frozen=True, slots=True)
class Examples(Group):
    """The examples, and what is asked of the model about each."""

    # fmt: off
    labels: int = knob("num_labels", 0,
        "train a classifier of whole texts with this number of labels, as "
        "AutoModelForSequenceClassification; 1 is a regression, 0 a language model",
        minimum=0, optional=True)
    reference: bool = knob("reference_pass", False,
        "after each forward pass another one without gradients and adapters: the reference of "
        "preference training (DPO), whose chosen and rejected answers are a sequence each",
        optional=True)
    reference_model: bool = knob("reference_model", False,
        "with reference_pass: the reference is a second model in memory, not this one without its "
        "adapters",
        optional=True)
    length: int = knob("max_length", 1024,
        "longest sequence in tokens; longer examples are cut", minimum=1, capacity=True)
    images: int = knob("images", 0,
        "images of each example, whose tokens are part of max_length; of models that cut an image "
        "into tiles, the tiles",
        minimum=0, optional=True)
    image_size: int = knob("image_size", 0,
        "pixels of an image's sides, of models that take any size; 0 is the size that the vision "
        "tower was made for",
        minimum=0, optional=True)
    padding: str = knob("padding", "none",
        "max_length: every example is padded, so attention gets a mask; none: the longest example "
        "of a batch has no padding, and no mask where all are as long; packed: the batch is one "
        "row of several examples with a mask of their ends",
        allowed=("none", "max_length", "packed"), optional=True)
    # fmt: on

    @property
    def padded(self) -> bool:
        """Every example is padded to `length`."""
        return self.padding == "max_length"

    @property
    def packed(self) -> bool:
        """A batch is one row, and attention masks what is of another example."""
        return self.padding == "packed"


@dataclass(frozen=True, slots=True)
class Precision(Group):
    """Dtypes of weights and products."""

    # fmt: off
    weights: str = knob("precision", "bf16",
        "how the base weights are kept: nf4 and int8 are quantised by bitsandbytes, tf32 is fp32 "
        "weights with TF32 matrix products",
        allowed=("fp32", "tf32", "fp16", "bf16", "int8", "nf4"),
        refused={
            **dict.fromkeys(("awq", "gptq", "hqq", "mxfp4"), "nf4, of 4 bits, comes nearest"),
            "fp4": "nf4 has the same size", "fp8": "int8, of as many bits, comes nearest"})
    autocast: str = knob("mixed_precision", "bf16",
        "autocast of the forward pass, as Trainer's bf16=True and fp16=True",
        default_rule="'no' if precision in ('fp32', 'tf32') else "
        "'fp16' if precision == 'fp16' else 'bf16'",
        allowed=("no", "bf16", "fp16"))
    compute: str = knob("compute_dtype", "auto",
        "dtype of products with nf4 and int8 layers and of what is not quantised; auto is that of "
        "mixed_precision, else bf16",
        allowed=("auto", "fp32", "fp16", "bf16"))
    double_quant: bool = knob("double_quant", True,
        "nf4 only: keep the scales of weight blocks in 8 bits too (bnb_4bit_use_double_quant)")
    preparation: str = knob("kbit_preparation", "peft",
        "nf4 and int8 with adapters: widen what is not quantised to fp32, as peft's "
        "prepare_model_for_kbit_training, only the norms of it, as trl's SFTTrainer, or nothing",
        allowed=("peft", "trl", "none"))
    # fmt: on

    @property
    def is_quantized(self) -> bool:
        """The base model is loaded in 4 or 8 bits."""
        return self.weights in QUANTIZED


@dataclass(frozen=True, slots=True)
class Loss(Group):
    """The treatment of the logits by the loss."""

    # fmt: off
    kind: str = knob("loss", "transformers",
        "how the loss treats the logits: as the installed transformers does; as versions 4.46 to "
        "4.48 did, with a copy; as 4.45 did, whose model returned them in fp32 as well; "
        "unwidened, in their own precision; chunked, as TRL's trainers since 1.16, which never "
        "have them; or liger, whose gradients are computed with the loss",
        allowed=("transformers", "transformers_4_46", "transformers_4_45", "unwidened", "chunked",
                 "liger"),
        refused=dict.fromkeys(("cut_cross_entropy", "unsloth"),
            "chunked, which never has the whole logits either, comes nearest"))
    fused: bool = knob("fused_loss", False,
        "a fused cross entropy that turns the logits into their gradient in place")
    # fmt: on


OFFLOAD_ACTIVATIONS = "activation_offloading"
WITHOUT_CHECKPOINTING = "set gradient_checkpointing to false"
"""The remedy for models whose layers can't be recomputed."""


@dataclass(frozen=True, slots=True)
class Recompute(Group):
    """Gradient checkpointing."""

    # fmt: off
    enabled: bool = knob("gradient_checkpointing", True,
        "recompute each layer's activations in the backward pass instead of keeping them")
    reentrant: bool = knob("use_reentrant", False,
        "with gradient_checkpointing: PyTorch's older way (use_reentrant=True), which keeps less "
        "of a layer at once; what checkpoints have that are enabled without keyword arguments",
        optional=True)
    on_host: bool = knob(OFFLOAD_ACTIVATIONS, False,
        "predictions only: with gradient_checkpointing, keep the checkpoints on the host until "
        "the backward pass (torchtune's enable_activation_offloading)",
        optional=True)
    # fmt: on


IN_BACKWARD = "optimizer_in_backward"

PROGRAM_WAYS: Mapping[str, str] = {
    "padded": "the last token of each batch is padding, so attention gets a mask",
    "loss_outside": "the program takes the cross entropy of all logits, unshifted",
    "cache_in_outputs": "the model is called without use_cache=False: outputs keep keys and values",
    "gradients_until_next": "gradients are forgotten before the next forward pass",
    "keeps_cache": "GPT-BigCode up to transformers 4.48, whose training keeps its cache",
    "fused_attention": "one product for query, key and value, as the first Qwen",
    "fused_norms": "one kernel for each norm and rotary embedding, as Unsloth's fast kernels",
    "question_answering": "a model with a head for the places of an answer",
    "pretraining": "a model with its heads for pretraining",
    "master_weights": "Apex's O2: all in half precision, and FusedAdam on copies in fp32",
    "bert_adam": "NVIDIA's BertAdam, which clips each gradient",
    "adamw_hf": "transformers' own AdamW, Trainer's default up to 4.45",
    "plain_optimizer": "an optimizer whose states of embeddings are as all others",
}
"""Ways of programs that no other parameter expresses."""


@dataclass(frozen=True, slots=True)
class Update(Group):
    """The step: optimizer, attention, clipping, and who runs it."""

    # fmt: off
    optimizer: str = knob("optimizer", "adamw_torch",
        "optimizer by its name in transformers' TrainingArguments",
        allowed=tuple(OPTIMIZERS), refused=REFUSED)
    attention: str = knob("attention", "sdpa",
        "attn_implementation of transformers; or sdpa on repeated heads, as transformers 4.49 and "
        "programs of one's own call it, and the same with a dense mask (masked_heads)",
        allowed=("eager", "sdpa", "flash_attention_2", "repeated_heads", "masked_heads"))
    max_grad_norm: float = knob("max_grad_norm", 1.0,
        "gradients are clipped to this norm; 0 does not clip (TrainingArguments' default is 1)",
        minimum=0)
    loop: str = knob("training_loop", "trainer",
        "who runs the step: transformers' Trainer; a function of one's own, which holds the "
        "model's outputs (the logits) until backward has ended; or the body of a loop, whose "
        "variables hold them until the next forward pass has ended",
        allowed=("trainer", "function", "loop"))
    in_backward: bool = knob(IN_BACKWARD, False,
        "update each parameter in the backward pass as soon as it has its gradient, which is "
        "freed (torchtune's optimizer_in_bwd); without accumulation and clipping",
        optional=True)
    ways: tuple[str, ...] = knob("program_ways", NO_NAMES,
        "predictions only: what a program does in its own way: "
        + "; ".join(f"{name}: {text}" for name, text in PROGRAM_WAYS.items()),
        optional=True)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Evaluating(Group):
    """The evaluation between steps, which predictions have after the last one."""

    # fmt: off
    batch: int = knob("eval_batch", 0,
        "predictions only: samples in one forward pass of an evaluation; 0 for no evaluation",
        minimum=0, optional=True)
    kept: int = knob("eval_kept", 0,
        "with eval_batch: batches whose logits stay on the GPU, as Trainer with compute_metrics "
        "keeps eval_accumulation_steps of them",
        minimum=0, optional=True)
    # fmt: on


_GROUPS: tuple[type[Group], ...] = (
    Batch, Adapter, Examples, Precision, Loss, Recompute, Update, Evaluating, Process,
    Loader, Ranks,
)  # fmt: skip

EFFECTIVE_BATCH = "effective_batch == micro_batch * grad_accum"

CAUSAL_LM = WorkloadSchema(
    "causal_lm",
    {term.name: term for group in _GROUPS for term in group.terms()},
    always=(EFFECTIVE_BATCH,),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration of workload `causal_lm`, typed and complete."""

    batch: Batch
    adapter: Adapter
    examples: Examples
    precision: Precision
    loss: Loss
    recompute: Recompute
    update: Update
    evaluating: Evaluating
    process: Process
    loader: Loader
    ranks: Ranks
    parallelism: Parallelism

    @classmethod
    def of(cls, configuration: Mapping[str, KnobValue]) -> Self:
        """The setup of a configuration; knobs that it lacks have their documented defaults.

        Raises `InputError` for a value of another kind or out of range.
        """
        parallelism = Parallelism.of(configuration)
        values = CAUSAL_LM.values(configuration)
        groups: dict[str, Any] = {g.__name__.lower(): g.of(values) for g in _GROUPS}
        return cls(**groups, parallelism=parallelism)
