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
from tuner.core.setup.common import OPTIMIZERS
from tuner.core.setup.distributed_knobs import DISTRIBUTED, RESHARD, SYNC
from tuner.program.arguments import EMULATE, TABLES, Arguments, ProgramTraining, options_of
from tuner.program.program import Program
from tuner.program.reading import NOT_COMPARED, PACKED, listed, note_effects, number, read
from tuner.program.trainer import FILE, Launch, Planned, Reading, SettingsFile, Trainer

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

_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Modules of attention by their names in a recipe."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_DTYPES = ("fp32", "bf16")


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
    if dtype not in _DTYPES:
        file.refuse("dtype", f"is {dtype}; predicted: {', '.join(_DTYPES)}")
    defaults = {"batch_size": 1, "gradient_accumulation_steps": 1, "clip_grad_norm": 0}
    knobs: dict[str, Any] = {
        **read(file, defaults),
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
    file.found.notes.append(NOT_COMPARED)
    length = _length(file)
    if length is not None:
        knobs["max_length"] = length
    if file.take("dataset.packed"):
        # `packed_block_causal_mask`: FlexAttention, which keeps no more than FlashAttention.
        file.found.notes.append(PACKED)
    if is_quantized:
        knobs |= {"precision": "nf4", "compute_dtype": dtype, "double_quant": True}
    if has_adapters:
        knobs |= _read_adapters(file, dtype)
    file.leave_out("torchtune")
    return Planned(_BUILDERS.get(plain), knobs, packs_codes=True)


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
    targets = listed(file, "model.lora_attn_modules")
    if not targets or not _ATTENTION.keys() >= {*targets}:
        file.refuse("model.lora_attn_modules", f"expected some of {', '.join(_ATTENTION)}")
    attention = (_ATTENTION[target] for target in targets if target in _ATTENTION)
    has_mlp = file.take("model.apply_lora_to_mlp", False) is True
    is_dora = file.take("model.use_dora", quietly=True) is True
    return {
        **({"adapter": "dora"} if is_dora else {}),
        **({"adapter_dtype": "bf16"} if dtype == "bf16" else {}),
        "lora_rank": number(file, "model.lora_rank", 8),
        "lora_alpha": file.take("model.lora_alpha", 16, quietly=True),
        "lora_dropout": number(file, "model.lora_dropout", 0.0),
        "lora_targets": (*attention, *(_MLP if has_mlp else ())),
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


TRAINER = Trainer(
    "torchtune",
    SettingsFile(
        ("tune", "run", "lora_finetune_single_device", "--config", FILE),
        (("_component_",), ("batch_size",)),
        takes_assignments=True,
    ),
    (Reading("torchtune", "torchtune", _VERSIONS, _plan),),
    launch=_launch,
)
