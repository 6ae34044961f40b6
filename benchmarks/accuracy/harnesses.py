"""From a published run to a configuration of this tool, by the program that ran it.

What a program does is read from its source, named at each function; nothing here looks at a
measured value. A row that cannot be expressed gets the reason instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.rows import Row
from tuner.core.records import Configuration

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Measured:
    """What the run measured: bytes and seconds; None is unknown."""

    allocated: float | None = None
    reserved: float | None = None
    device: float | None = None
    loaded: float | None = None
    forward: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A run that the tool can express. `gpu` is an id of the catalogue or of gpus.yaml."""

    row: Row
    group: str
    gpu: str
    model: str
    configuration: Configuration
    measured: Measured
    with_optimizer: bool = True
    """Whether the measured step time includes the optimizer step."""
    ran_out: bool = False
    """Whether the run ended without a value, which its source puts down to memory."""
    keeps_cache: bool = False
    """Whether the model's version kept its key-value cache in training; see caching.py."""
    chunked_loss: bool = False
    """Whether head and loss are computed together, a chunk at a time; see chunked_loss.py."""


def express(row: Row) -> Case | str:
    """The case of a row, or why the tool cannot express it."""
    for prefix, harness in _HARNESSES.items():
        if row.framework.startswith(prefix):
            return harness(row)
    for prefix, reason in _REASONS.items():
        if row.framework.startswith(prefix):
            return reason
    return f"no harness for {row.framework}"


def _configuration(row: Row, **settings: Any) -> Configuration:
    return Configuration(
        {
            "micro_batch": row.micro_batch,
            "grad_accum": row.grad_accum,
            "max_length": row.length,
            "lora_rank": row.lora_rank,
            "lora_targets": row.lora_targets,
            "gradient_checkpointing": row.checkpointing,
            "precision": row.precision.split("+")[0].split("-")[0].split(" ")[0],
            "mixed_precision": "no",
            "optimizer": "adamw_torch",
            **settings,
        }
    )


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB


def _fitcheck(row: Row) -> Case | str:
    """The scripts/measure.py of fitcheck-llm 0.3.1: a step in a function, no clipping, no autocast.

    Its sdpa rows pin the memory-efficient kernel and repeat the key and value heads by hand.
    """
    attention = "repeated_heads" if row.attention == "sdpa" else row.attention
    tokens_per_s = row.throughput
    return Case(
        row,
        group="T4, transformers 5 + peft",
        gpu="t4",
        model=row.model,
        configuration=_configuration(
            row,
            compute_dtype="fp16",
            double_quant=False,
            attention=attention,
            max_grad_norm=0,
            training_loop="function",
        ),
        measured=Measured(
            allocated=_bytes(row.peak_gib),
            reserved=_bytes(row.note("peak_reserved_gib")),
            device=_bytes(row.note("process_gib")),
            loaded=_bytes(row.note("after_load_gib")),
            forward=_bytes(row.note("peak_forward_gib")),
            step_s=row.tokens / tokens_per_s if tokens_per_s else None,
        ),
    )


def _canifinetune(row: Row) -> Case | str:
    """The bench/runner.py of canifinetune 0.3: a plain loop, no clipping, no autocast."""
    return Case(
        row,
        group="RTX 4080, transformers 5 + peft",
        gpu="rtx4080",
        model=row.model,
        configuration=_configuration(
            row,
            compute_dtype="bf16",
            optimizer=row.optimizer,
            attention=row.attention,
            max_grad_norm=0,
            training_loop="loop",
        ),
        measured=Measured(
            allocated=_bytes(row.peak_gib),
            reserved=_bytes(row.note("peak_reserved_gib")),
            step_s=row.note("avg_step_time_s"),
        ),
    )


def _fms(row: Row) -> Case | str:
    """fms-acceleration, scripts/benchmarks (scenarios*.yaml, defaults.yaml) over trl's SFTTrainer.

    Its bnb plugin skips k-bit preparation; `foak` and `liger` replace kernels, of which the
    cross entropies are expressed and rotary embeddings, norms and LoRA products are not.
    """
    if "granite" in row.model or "moe" in row.model:
        return "the mixture-of-experts models of these rows are not public or not in the catalogue"
    if row.length is None:
        return "no packing: the token lengths of the batches are not in the table"
    plugin = row.framework.partition("framework_config=")[2]
    is_bigcode = "bigcode" in row.model
    is_old = row.notes["transformers"].startswith("4.45")
    widened = "transformers_4_45" if is_old else "transformers_4_46"
    has_autocast = "AMP" in row.precision or row.method == "qlora"
    steps_per_s = row.note("steps_per_s")
    fused, chunked = "foak" in plugin, "liger" in plugin
    ran_out = row.peak_gib is None
    return Case(
        row,
        group="A100, trl" + (" + fused kernels" if fused else "") + (", Liger" if chunked else ""),
        gpu="a100_80gb",
        model=row.model,
        configuration=_configuration(
            row,
            # peft adapts those of the named modules that the model has.
            lora_targets=("c_attn",)
            if is_bigcode
            else tuple(sorted(set(row.lora_targets) - {"c_attn"})),
            mixed_precision="bf16" if has_autocast else "no",
            attention="flash_attention_2",
            lora_dropout=0.1,
            loss="unwidened" if is_bigcode else "transformers" if chunked else widened,
            fused_loss=fused and not chunked,
            kbit_preparation="none" if plugin.startswith("accelerated") else "trl",
        ),
        measured=Measured(
            allocated=_bytes(row.peak_gib),
            device=None if ran_out else _bytes((row.note("nvidia_smi_mib") or 0) / 1024) or None,
            step_s=1 / steps_per_s if steps_per_s else None,
        ),
        ran_out=ran_out,
        keeps_cache=is_bigcode,
        chunked_loss=chunked,
    )


def _fitscout(row: Row) -> Case | str:
    """The validation/measure.py of fitscout 0.1.1: one step; library versions are not recorded."""
    return Case(
        row,
        group="T4, versions not recorded",
        gpu="t4",
        model=row.model,
        configuration=_configuration(
            row,
            compute_dtype="fp16",
            optimizer="adamw_8bit",
            attention="sdpa",
            max_grad_norm=0,
            training_loop="function",
        ),
        measured=Measured(allocated=_bytes(row.peak_gib)),
    )


# The source names a family; its length of 8192 needs the long variant, of the same shape.
_UNIVERSAL_MODELS = {"microsoft/Phi-3-mini": "phi-3-mini-4k"}


def _universal(row: Row) -> Case | str:
    """universal-llm-trainer: memory is reserved bytes over 10^9, printed without decimals.

    trainer.py and models/*.py: the model gets no labels; the loss is nn.CrossEntropyLoss of a
    shifted copy of the logits in their own precision, and `del_logits_after_forward` frees the
    logits before backward. 4-bit models load the rest in fp32, and bitsandbytes 0.45 computes in
    the precision of a layer's input. Its test of GPUs puts random tokens into batches that were
    padded to the length, and leaves their attention masks (data_collection, `_pad`; trainer.py,
    `gpu_test`), of which transformers makes a dense one. transformers 4.49 repeats key and value
    heads for sdpa, which it takes for Gemma 2 too when nothing is asked for.
    """
    if row.peak_gib is None:
        return "the run failed: no value to compare with"
    return Case(
        row,
        group="A100, universal-llm-trainer",
        gpu="a100_80gb",
        model=_UNIVERSAL_MODELS.get(row.model, row.model),
        configuration=_configuration(
            row,
            compute_dtype="fp32" if row.method == "qlora" else "auto",
            attention="masked_heads",
            lora_dropout=0.05,
            loss="unwidened",
            training_loop="trainer",
        ),
        measured=Measured(
            reserved=row.peak_gib * 1e9, step_s=(row.throughput or 0) * row.grad_accum or None
        ),
    )


_NEUSIGHT_MODELS = {"gpt2_large": "gpt2-large", "opt_13": "opt-1.3b"}


def _neusight(row: Row) -> Case | str:
    """NeuSight's labels: forward and backward of a Hugging Face model in fp32, no optimizer."""
    if row.model not in _NEUSIGHT_MODELS:
        return "the architecture is not in the catalogue or not a causal language model"
    gpus = {"NVIDIA L4": "l4", "Tesla V100-PCIE-32GB": "v100_32gb_pcie"}
    return Case(
        row,
        group="fp32 forward and backward (NeuSight)",
        gpu=gpus.get(row.gpu, "a100_80gb_pcie"),
        model=_NEUSIGHT_MODELS[row.model],
        configuration=_configuration(
            row, attention="eager", optimizer="sgd", max_grad_norm=0, training_loop="function"
        ),
        measured=Measured(step_s=(row.throughput or 0) / 1000 or None),
        with_optimizer=False,
    )


_HARNESSES: dict[str, Callable[[Row], Case | str]] = {
    "transformers+peft single-step harness": _fitcheck,
    "transformers+peft (canifinetune bench)": _canifinetune,
    "HF SFTTrainer (fms-hf-tuning)": _fms,
    "transformers+peft single-step (validation": _fitscout,
    "universal-llm-trainer": _universal,
    "NeuSight": _neusight,
}
_REASONS = {
    "Lit-GPT": "Lit-GPT has model code of its own, not transformers' (and pads to the longest)",
    "torchtune": "torchtune has model code and losses of its own, not transformers'",
    "Qwen finetune": "first-generation Qwen: model code from the hub that transformers lacks",
    "ms-swift": "first-generation Qwen, padded to lengths of a data set that is not in the table",
    "PEFT method_comparison": "padded to the longest of each batch: lengths are not in the table",
    "NVIDIA DeepLearningExamples": "BERT question answering, not a causal language model",
    "HF Trainer": "BERT classification, not a causal language model",
    "unsloth": "unsloth's kernels and offloading are not modelled; only a limit is given",
    "HF + FA2": "only the longest length that fits is given, not a measured value",
}
