"""From a published run to a configuration of this tool, by the program that ran it.

What a program does is read from its source, named at each function; nothing here looks at a
measured value. A row that cannot be expressed gets the reason instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.rows import Row
from tuner.core.records import Configuration
from tuner.core.setup.causal_lm import PEFT_OPTIONS
from tuner.core.setup.schema import NO_NAMES

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Measured:
    """What the run measured: bytes and seconds; None is unknown."""

    allocated: float | None = None
    reserved: float | None = None
    device: float | None = None
    loaded: float | None = None
    forward: float | None = None
    resident: float | None = None
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
    grade: str = ""
    """The row's, or C where only the mean of the sequences' lengths is known."""
    fitted: bool = False
    """Whether the priors of the package's intervals were fitted with rows of this program."""

    def __post_init__(self) -> None:
        if not self.grade:
            object.__setattr__(self, "grade", self.row.grade)


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
            **({"lora_targets": row.lora_targets} if row.lora_targets else {}),
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
        fitted=True,
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
        fitted=True,
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
    cross entropies, norms and rotary embeddings are expressed, and LoRA products are not.
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
    targets = tuple(sorted(set(row.lora_targets) - {"c_attn"}))
    way = "keeps_cache" if is_bigcode else "fused_norms" if fused else ""
    return Case(
        row,
        fitted=True,
        group="A100, trl" + (" + fused kernels" if fused else "") + (", Liger" if chunked else ""),
        gpu="a100_80gb",
        model=row.model,
        configuration=_configuration(
            row,
            # peft adapts those of the named modules that the model has.
            **({"lora_targets": ("c_attn",) if is_bigcode else targets} if targets else {}),
            mixed_precision="bf16" if has_autocast else "no",
            attention="flash_attention_2",
            lora_dropout=0.1,
            loss="unwidened" if is_bigcode else "liger" if chunked else widened,
            fused_loss=fused and not chunked,
            kbit_preparation="none" if plugin.startswith("accelerated") else "trl",
            **({"program_ways": (way,)} if way else {}),
        ),
        measured=Measured(
            allocated=_bytes(row.peak_gib),
            device=None if ran_out else _bytes((row.note("nvidia_smi_mib") or 0) / 1024) or None,
            step_s=1 / steps_per_s if steps_per_s else None,
        ),
        ran_out=ran_out,
    )


def _fitscout(row: Row) -> Case | str:
    """The validation/measure.py of fitscout 0.1.1: one step; library versions are not recorded."""
    return Case(
        row,
        fitted=True,
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
        fitted=True,
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
_NEUSIGHT_OTHERS = ("bert_large", "gpt3_xl", "gpt3_27")


def _neusight(row: Row) -> Case | str:
    """NeuSight's labels: forward and backward of a Hugging Face model in fp32, no optimizer.

    neusight/Tracing/trace.py, `measure_e2e`: the mean of the fastest 5 of 25. The model gets
    tokens alone, and BERT is the model for pretraining; the loss between the passes is not timed.
    """
    known = row.model in _NEUSIGHT_MODELS
    if not known and row.model not in _NEUSIGHT_OTHERS:
        return "experts of Switch Transformers, whose code the program replaces by its own"
    gpus = {"NVIDIA L4": "l4", "Tesla V100-PCIE-32GB": "v100_32gb_pcie"}
    bert = row.model == "bert_large"
    return Case(
        row,
        group="fp32 forward and backward (NeuSight)" + ("" if known else ", BERT and GPT-3"),
        gpu=gpus.get(row.gpu, "a100_80gb_pcie"),
        model=_NEUSIGHT_MODELS.get(row.model, row.model),
        configuration=_configuration(
            row,
            attention="eager",
            optimizer="sgd",
            max_grad_norm=0,
            training_loop="function",
            **({"num_labels": 2} if bert else {}),
            **({} if known else {"program_ways": ("pretraining",) * bert + ("loss_outside",)}),
        ),
        measured=Measured(step_s=(row.throughput or 0) / 1000 or None),
        with_optimizer=False,
        fitted=known,
    )


_LAMBDA_GPUS = {
    "A10": "a10",
    "A100-PCIe-40GB": "a100_40gb_250w",
    "A100-PCIe-80GB": "a100_80gb_pcie",
    "A100-SXM4-40GB": "a100_40gb_400w",
    "A100-SXM4-80GB": "a100_80gb",
    "A40": "a40",
    "Quadro RTX 6000 24GB": "rtx6000",
    "Quadro RTX 8000 48GB": "rtx8000",
    "GTX 1080 Ti": "gtx1080ti",
    "RTX 2080 Ti": "rtx2080ti",
    "RTX 3070": "rtx3070",
    "RTX 3080": "rtx3080",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "RTX 6000 Ada": "rtx6000_ada",
    "RTX A4000": "a4000",
    "RTX A4500": "a4500",
    "RTX A5000": "a5000",
    "RTX A5500": "a5500",
}
_WITHOUT_TF32 = ("gtx1080ti", "rtx6000", "rtx8000", "rtx2080ti")


def _run_squad(row: Row) -> Case | str:
    """NVIDIA's PyTorch/LanguageModeling/BERT/run_squad.py, as Lambda's benchmark starts it.

    100 steps of SQuAD, padded to 384 tokens; fp16 is apex's amp O2 with FusedAdam, fp32 its own
    BertAdam, which clips each parameter's gradient; from 20.06 on all are clipped together too.
    The containers multiply fp32 in tf32 where the GPU can (NGC's default), which their logs do
    not say: grade B. GELU and LayerNorm are fused, as here.
    """
    gpu = _LAMBDA_GPUS.get(row.gpu)
    if gpu is None:
        return f"{row.gpu}: rates of GPUs before Volta are not modelled"
    half = row.precision.startswith("fp16")
    day, month, year = row.notes["log"].partition("_")[0].split("-")
    before = (year, month, day) < ("2020", "07", "04")
    code = "2022" if row.notes["system"].endswith("_v1") else "2019" if before else "2020"
    return Case(
        row,
        group=f"BERT SQuAD, {'fp16' if half else 'fp32'}, code of {code}",
        gpu=gpu,
        model=row.model.partition(" ")[0],
        configuration=_configuration(
            row,
            precision="fp16" if half else "fp32" if gpu in _WITHOUT_TF32 else "tf32",
            attention="eager",
            max_grad_norm=0 if code == "2019" else 1.0,
            training_loop="function",
            num_labels=2,
            program_ways=("question_answering", "master_weights" if half else "bert_adam"),
        ),
        measured=Measured(
            device=_bytes(row.peak_gib), step_s=(row.micro_batch or 0) / (row.throughput or 1)
        ),
    )


_CONTEXT_OF_DOCS = 1343 * 2**20
"""Memory of the process before the model, as the same page of transformers measures it."""


def _bert_classifier(row: Row) -> Case | str:
    """Transformers' perf_train_gpu_one.mdx: Trainer on 512 random sequences of 512 tokens.

    NVML's memory less the context that the page shows: old CUDA versions loaded every kernel.
    """
    optimizers = {"adamw": "adamw_torch", "8-bit Adam (bnb)": "adamw_8bit"}
    held = _bytes(row.peak_gib)
    return Case(
        row,
        group="BERT classification, Trainer",
        gpu="v100_16gb",
        model=row.model.partition(" ")[0],
        configuration=_configuration(
            row,
            precision="fp32",
            mixed_precision="fp16" if "AMP" in row.precision else "no",
            optimizer=optimizers.get(row.optimizer, row.optimizer),
            attention="eager",
            use_reentrant=True,
            num_labels=2,
            program_ways=("adamw_hf" if row.optimizer == "adamw" else "plain_optimizer",),
        ),
        measured=Measured(
            reserved=None if held is None else held - _CONTEXT_OF_DOCS,
            step_s=(row.micro_batch or 0) * row.grad_accum / (row.throughput or 1),
        ),
    )


_FROM_VALUES = ("ADAMSS", "FROD", "SHIRA", "WAVEFT")


ADAPTERS = Path(__file__).parent / "peft_adapters.json"
"""Adapters of PEFT's method comparison by run: its `adapter_config.json` without empty fields."""

_TARGETS = {"IA3": ("k_proj", "v_proj", "down_proj")}
"""Modules that a method adapts in a Llama where its configuration names none, if not q and v."""


def _adapters(run: str) -> dict[str, Any] | str:
    """The adapters of a run as parameters, or why no parameter says them."""
    fields = json.loads(ADAPTERS.read_text("utf-8"))[run]
    kind, untyped = fields["peft_type"], []
    found: dict[str, Any] = {
        "lora_rank": fields.get("r", _RANKS.get(kind, 8)),
        "lora_targets": tuple(
            fields.get("target_modules", _TARGETS.get(kind, ("q_proj", "v_proj")))
        ),
    }
    if "use_bdlora" in fields:
        fields, kind = fields["use_bdlora"], "bdlora"
    if kind == "LORA":
        found["adapter"] = "lora_fa" if "lorafa" in run else "lora"
        found["adapter"] = "rslora" if fields.get("use_rslora") else found["adapter"]
    else:
        found["adapter"] = kind.lower()
        rest = {n: v for n, v in fields.items() if n not in _UNTYPED}
        untyped = [name for name in rest if name not in PEFT_OPTIONS]
        if options := ",".join(f"{name}:{_typed(value)}" for name, value in rest.items()):
            found["adapter_options"] = options
    return f"no parameter says {', '.join(untyped)} of peft's configuration" if untyped else found


_UNTYPED = (
    "peft_type", "task_type", "r", "target_modules", "scaling", "alpha", "psoft_alpha",
    "random_seed", "num_subspaces",
)  # fmt: skip
"""Fields that other parameters say, or that change neither memory nor time."""
_RANKS = {"GRALORA": 32, "HIRA": 32, "MISS": 64, "TINYLORA": 2, "VERA": 256}
"""Ranks of methods whose configuration names none, if not 8."""


def _typed(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _peft(row: Row) -> Case | str:
    """PEFT's method_comparison/MetaMathQA/run.py, at the mean length of its sequences.

    Batches are padded to their longest, of 80 sorted at a time: the padded length is not known,
    and somewhat more. `mem_alloc_avg_last250` is what is allocated when a step has ended, with
    gradients (zeroed at the next) and the outputs with their cache: it follows the length less
    than a peak does.
    """
    kind = row.method.rpartition(":")[2]
    if kind in _FROM_VALUES:
        return f"adapters of kind {kind} need values that a trace does not have"
    steps = row.note("steps") or 1
    run = row.notes["variant"]
    full = row.method == "full"
    adapters = {} if full else _adapters(run)
    if isinstance(adapters, str):
        return adapters
    length = round((row.note("total_tokens") or 0) / steps / (row.micro_batch or 1))
    return Case(
        row,
        group="PEFT method comparison, "
        + ("full" if full else "LoRA" if row.lora_rank else "rest"),
        gpu="l40s",
        model=row.model,
        configuration=_configuration(
            row,
            max_length=length,
            **({"lora_rank": 0} if full else adapters),
            attention="sdpa",
            optimizer="adamw_torch",
            training_loop="loop",
            program_ways=("padded", "cache_in_outputs", "gradients_until_next"),
        ),
        measured=Measured(
            resident=row.note("mem_alloc_avg_last250"),
            step_s=(row.note("train_step_time_sum_s") or 0) / steps,
        ),
        grade="C",
    )


def _qwen(row: Row) -> Case | str:
    """QwenLM/Qwen, finetune.py by finetune_lora_single_gpu.sh: Trainer, bf16, every input as long.

    The model computes the loss in the precision of its logits (modeling_qwen.py), peft 0.5 has
    adapters in that of the weights. What its "memory (GB)" counts is not said: only time compares.
    """
    if row.method == "qlora":
        return "GPTQ's 4-bit layers: their kernels are not modelled"
    if row.method == "full":
        return "full fine-tuning under DeepSpeed on one GPU: its fp32 copies are not modelled"
    targets = {"c_attn", "o_proj", "gate_proj", "up_proj", "down_proj"}
    saved = ("embed_tokens", "lm_head") if "wte" in row.lora_targets else NO_NAMES
    return Case(
        row,
        group="Qwen finetune.py, LoRA",
        gpu="a100_80gb",
        model=row.model,
        configuration=_configuration(
            row,
            lora_targets=tuple(sorted(targets)),
            lora_dropout=0.05,
            adapter_dtype="bf16",
            mixed_precision="bf16",
            attention="flash_attention_2",
            loss="unwidened",
            use_reentrant=True,
            modules_to_save=saved,
            program_ways=("fused_attention",),
        ),
        measured=Measured(step_s=row.throughput),
    )


def _torchtune(row: Row) -> str:
    """Rows of torchtune's README (rows.csv, "README.md"): Llama 3.2 3B, most rows compiled."""
    if row.notes["compile"] == "True":
        return "torch.compile: what it fuses is not modelled"
    return "torchtune has model code of its own, which the benchmark does not install"


_HARNESSES: dict[str, Callable[[Row], Case | str]] = {
    "transformers+peft single-step harness": _fitcheck,
    "transformers+peft (canifinetune bench)": _canifinetune,
    "HF SFTTrainer (fms-hf-tuning)": _fms,
    "transformers+peft single-step (validation": _fitscout,
    "universal-llm-trainer": _universal,
    "NeuSight": _neusight,
    "NVIDIA DeepLearningExamples": _run_squad,
    "HF Trainer": _bert_classifier,
    "PEFT method_comparison": _peft,
    "Qwen finetune": _qwen,
    "torchtune": _torchtune,
}
_REASONS = {
    "Lit-GPT": "Lit-GPT has model code of its own, which the benchmark does not install",
    "ms-swift": "padded to lengths of a data set that are not in the table",
    "unsloth": "a longest length that fits: the optimizer is not said, nor the type of card",
    "HF + FA2": "a longest length that fits: the optimizer is not said, nor the type of card",
}
