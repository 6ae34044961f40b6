"""torchtune's recipes.

Read from 0.6.1: recipes/ (lora and full finetuning, single_device and distributed), models/,
training/_distributed.py, modules/peft/lora.py and training/activations.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem
from tuner.core.setup.causal_lm import IN_BACKWARD, OFFLOAD_ACTIVATIONS
from tuner.core.setup.distributed_knobs import DISTRIBUTED, RESHARD, SYNC
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.program.arguments import EMULATE, TABLES, Arguments, ProgramTraining, options_of
from tuner.program.program import Program
from tuner.program.reading import NOT_COMPARED, PACKED, listed, note_effects, number, read
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.writing import Settings, SettingsReader, single_optimizer

_VERSIONS = {"torchtune": "0.6.1"}

_BUILDERS = {
    f"{builder}{size.lower().replace('.', '_')}": name.format(size) if "{" in name else name + size
    for builder, (name, sizes) in TABLES["torchtune"].items()
    for size in sizes.split()
}
"""Models of the catalogue by their builder in torchtune.models, without lora_ and the like."""

_LONGEST = dict.fromkeys(("alpaca_dataset", "alpaca_cleaned_dataset"), 1304)
"""Tokens of the longest example of data sets that recipes do not cut. Alpaca: with Llama 2's
tokenizer (Lit-GPT, tutorials/resource-tables.md, commit 8641822); with three others 1,034 to 1,079.
"""

_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}

_ROWS = {"batch_size": 1, "gradient_accumulation_steps": 1, "clip_grad_norm": 0}
"""Names that are read and written, and their defaults."""


def _plan(training: ProgramTraining) -> Planned:
    given = training["arguments"]
    # A component is read by its name and its arguments.
    values = {n: a for n, a in given.values.items() if f"{n}._component_" not in given.values}
    file = Arguments(given.title, values, given.found)
    note_effects(file, "torchtune")
    builder = str(file.take("model._component_")).removeprefix("torchtune.models.")
    family, _, name = builder.rpartition(".")
    is_quantized = name.startswith("qlora_") or file.take("model.quantize_base") is True
    has_adapters = name.startswith(("lora_", "qlora_"))
    name = name.removeprefix("q").removeprefix("lora_") if has_adapters else name
    plain = f"{family}.{name}".removesuffix("_base").removesuffix("_instruct")
    dtype = str(file.take("dtype", "bf16"))
    if dtype not in _DTYPES.values():
        file.refuse("dtype", f"is {dtype}; predicted: {', '.join(_DTYPES.values())}")
    knobs: dict[str, Any] = {
        **read(file, _ROWS),
        "gradient_checkpointing": bool(file.take("enable_activation_checkpointing", False)),
        "use_reentrant": False,
        "optimizer": _optimizer(file, has_adapters=has_adapters),
        "precision": dtype,
        "mixed_precision": "no",
        "attention": "sdpa",
        "loss": _loss(file),
        "training_loop": "trainer",  # it deletes the logits before the backward pass
        "kbit_preparation": "none",
        "lora_rank": 0,
    }
    if file.take("enable_activation_offloading") is True:
        knobs[OFFLOAD_ACTIVATIONS] = True
    if file.take("optimizer_in_bwd") is True:
        knobs[IN_BACKWARD] = True  # which the recipes refuse with accumulation and clipping
    # Each layer and the loss, or the parts that are named (`compile.model`).
    parts = [name for name in file.values if name.startswith("compile.")]
    said = [file.take(name) for name in ("compile", *parts)]
    if any(said):
        knobs["torch_compile"] = True
    if file.take("fsdp_reshard_after_forward", quietly=True) is False:
        knobs[RESHARD] = False
    notes = [NOT_COMPARED]
    length = _length(file)
    if length is not None:
        knobs["max_length"] = length
    if file.take("dataset.packed"):
        # `packed_block_causal_mask`: FlexAttention, which keeps no more than FlashAttention.
        notes.append(PACKED)
    if is_quantized:
        knobs |= {"precision": "nf4", "compute_dtype": dtype, "double_quant": True}
    if has_adapters:
        knobs |= _read_adapters(file, dtype)
    file.leave_out("torchtune")
    return Planned(_BUILDERS.get(plain), knobs, notes=notes, packs_codes=True)


def _length(file: Arguments) -> Any:
    """The length of the examples; of uncut data sets the longest, where it is known."""
    if file.take("tokenizer.max_seq_len", quietly=True) is not None:
        return number(file, "tokenizer.max_seq_len", 0)
    name = str(file.take("dataset._component_", quietly=True)).rpartition(".")[2]
    if name not in _LONGEST or file.take("dataset.packed"):
        return None
    text = f"max_length={_LONGEST[name]}: the longest example of {name}"
    file.found.assumed.append(text)
    return _LONGEST[name]


def _read_adapters(file: Arguments, dtype: str) -> dict[str, Any]:
    names = {theirs: ours for ours, theirs in _ATTENTION.items()}
    targets = listed(file, "model.lora_attn_modules")
    unknown = [target for target in targets if target not in names]
    if unknown or not targets:
        file.refuse("model.lora_attn_modules", f"expected some of {', '.join(names)}")
    has_mlp = file.take("model.apply_lora_to_mlp", False) is True
    is_dora = file.take("model.use_dora", quietly=True) is True
    return {
        **({"adapter": "dora"} if is_dora else {}),
        **({"adapter_dtype": "bf16"} if dtype == "bf16" else {}),
        "lora_rank": number(file, "model.lora_rank", 8),
        "lora_alpha": file.take("model.lora_alpha", 16, quietly=True),
        "lora_dropout": number(file, "model.lora_dropout", 0.0),
        "lora_targets": (*(names[t] for t in targets if t in names), *(_MLP if has_mlp else ())),
    }


def _optimizer(file: Arguments, *, has_adapters: bool) -> str:
    """The optimizer of this class whose own settings the file repeats best."""
    path = str(file.take("optimizer._component_"))
    if path == "torch.optim.Muon" and not has_adapters:
        text = "is Muon, which takes matrices only: the recipe, which has no other, stops"
        file.refuse("optimizer._component_", text)
    path = TABLES["torchtune_optimizers"].get(path, path)
    found = {
        name: one.recipe
        for name, one in OPTIMIZERS.items()
        if one.path.replace(":", ".") == path
        and all(file.take(f"optimizer.{key}", False) == value for key, value in one.recipe.items())
    }
    if not found:
        known = ", ".join(dict.fromkeys(o.path.replace(":", ".") for o in OPTIMIZERS.values()))
        text = f"is {path}, which is not predicted (known: {known}): {EMULATE}"
        file.refuse("optimizer._component_", text)
    return max(found, key=lambda name: len(found[name]), default="adamw_torch")


def _loss(file: Arguments) -> str:
    kind = str(file.take("loss._component_", "torch.nn.CrossEntropyLoss"))
    if kind.endswith(".CEWithChunkedOutputLoss"):
        file.found.left_out.append(f"{file.where('loss._component_')}: its chunks of the logits")
    known: Mapping[str, str] = TABLES["torchtune_losses"]
    if kind not in known:
        file.refuse("loss._component_", f"is {kind}; predicted: {', '.join(known)}")
    return known.get(kind, "transformers")


def _launch(program: Program) -> Launch:
    launch = Launch(starts_ranks=False)
    names = [Path(word).name for word in program.command]
    words = names[names.index("run") + 1 :] if "run" in names else []
    recipe = next((word for word in words if "finetune" in word or "single" in word), "")
    if recipe in ("lora_finetune_distributed", "full_finetune_distributed"):
        # `fully_shard` of each layer, whose gathered weights are let go after the forward pass;
        # the recipes never turn the exchange of gradients off (`set_requires_gradient_sync`).
        launch = Launch(knobs={DISTRIBUTED: "fsdp2", SYNC: True})
        count = str(options_of(words[: words.index(recipe)]).get("nproc_per_node", 1))
        launch.processes = launch.whole("tune run --nproc_per_node", count)
    elif recipe not in ("lora_finetune_single_device", "full_finetune_single_device"):
        text = f"is {recipe or 'none that is known'}, which is not predicted: {EMULATE}"
        launch.problems.append(Problem(text, "the recipe"))
    return launch


# -- writing -------------------------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    del model  # torchtune names a builder, which does not follow from the name of the model
    chosen.get("effective_batch")  # the product of micro-batch and accumulation
    optimizer = OPTIMIZERS[single_optimizer(chosen)]
    dtype = _DTYPES.get(chosen.dtype)
    if chosen.text("precision") == "int8" or dtype is None:
        chosen.leave("precision", "the recipes train in fp32 and bf16, quantised to nf4 at most")
    chosen.leave("mixed_precision", "the recipes train in one dtype, without autocast")
    chosen.implies("attention", "sdpa")
    if chosen.text("adapter") == "rslora":
        chosen.leave("adapter", "the recipes scale by lora_alpha / lora_rank: adjust lora_alpha")
    return {
        "model": {
            **_targets(chosen),
            **chosen.lora("use_dora lora_rank lora_alpha lora_dropout"),
            "quantize_base": chosen.text("precision") == "nf4",
        }
        if chosen.has_adapters
        else None,
        "tokenizer": chosen.under("max_seq_len"),
        **chosen.under(*_ROWS),
        "optimizer": {"_component_": optimizer.path.replace(":", "."), **optimizer.recipe},
        "dtype": dtype,
        "enable_activation_checkpointing": chosen.get("gradient_checkpointing"),
        "enable_activation_offloading": chosen.get(OFFLOAD_ACTIVATIONS),
        "optimizer_in_bwd": chosen.get(IN_BACKWARD),
    }


def _targets(chosen: SettingsReader) -> Settings:
    targets = chosen.targets
    names = [*_ATTENTION, *_MLP] if targets == "all-linear" else list(targets or [])
    in_mlp = [name for name in _MLP if name in names]
    unknown = [name for name in names if name not in _ATTENTION and name not in _MLP]
    if unknown or (in_mlp and len(in_mlp) < len(_MLP)):
        chosen.leave("lora_targets", "the MLP gets adapters as a whole, other modules get none")
    return {
        "lora_attn_modules": [_ATTENTION[name] for name in names if name in _ATTENTION],
        "apply_lora_to_mlp": len(in_mlp) == len(_MLP),
        "apply_lora_to_output": False,
    }


def _use(settings: Mapping[str, Any]) -> str:
    recipe = "lora_finetune_single_device" if "model" in settings else "full_finetune_single_device"
    return f"changes to the configuration of tune run {recipe}"


TRAINER = Trainer(
    "torchtune",
    SettingsFile(
        ("tune", "run", "lora_finetune_single_device", "--config", FILE),
        (("_component_",), ("batch_size",)),
        takes_assignments=True,
    ),
    (Reading("torchtune", "torchtune", _VERSIONS, _plan),),
    Format("torchtune", _settings, _use),
    _launch,
)
