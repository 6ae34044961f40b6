"""Reads the arguments of a trainer into parameters of workload `causal_lm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.records import KnobValue
from tuner.core.setup.common import OPTIMIZERS, QUANTIZED, TORCH_DTYPES
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, SYNC
from tuner.core.setup.schemas import ALL_LINEAR, is_pattern
from tuner.program import releases
from tuner.program.arguments import (
    COMMAND_LINE,
    DTYPES,
    EMULATE,
    TABLES,
    Argument,
    Arguments,
    ProgramTraining,
    Undecided,
    decided_by,
    knob_of,
)
from tuner.program.edit.place import OFFLOADED
from tuner.program.trainers.accelerate import sharding
from tuner.space.lengths import steps_per_epoch
from tuner.space.models.catalogue import stored_format

STORED = "stored"
"""In place of a dtype: the one that the checkpoint has."""

PEFT_DEFAULT = "peft's default"
"""In place of names of modules: those that peft has for the kind of model."""

NOT_COMPARED = "this is not compared with the emulated program yet"
"""A note beside numbers that nothing was held against."""

_OFF = (None, False, 0, "none", "no", "false", "", ())
"""Values of a setting that is not set, or turned off."""


def number(arguments: Arguments, name: str, default: int | float) -> Any:
    """A number; anything else is noted as a problem."""
    value = arguments.take(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        arguments.refuse(name, f"is {value!r}, which is not a number")
        return default
    return value


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of a training: `max_steps` optimizer steps; where that is None, `epochs`."""

    max_steps: int | None = None
    epochs: float | None = None

    def steps(self, examples: int | None, batch: int) -> tuple[int, bool] | None:
        """The optimizer steps of `batch` examples each, and if they are the whole training's.

        They are an epoch's where the number of epochs is not known; None if the data is not either.
        """
        if self.max_steps is not None:
            return self.max_steps, True
        if examples is None:
            return None
        of_epoch = steps_per_epoch(examples, batch)
        return math.ceil(of_epoch * (self.epochs or 1)), self.epochs is not None


def schedule_of(training: ProgramTraining) -> Schedule:
    """The schedule that a training's arguments say, as far as they are known."""
    arguments = training["arguments"]

    def said(*names: str) -> int | float | None:
        values, defaults = arguments.values, arguments.defaults
        known = (values[n].value if n in values else defaults.get(n) for n in names)
        numbers = (one for one in known if isinstance(one, int | float) and one > 0)
        return next(numbers, None)

    if arguments.is_unknown("max_steps"):
        return Schedule()
    steps = said("max_steps")
    if steps is not None:
        return Schedule(int(steps))
    return Schedule(epochs=said("num_train_epochs", "num_epochs", "max_epochs", "epochs"))


def with_method(training: ProgramTraining, given: Mapping[str, Any]) -> ProgramTraining:
    """A script's training with the quantisation and the adapters that are `given`.

    What follows from them is the trainer's: TRL keeps the adapters of a quantised model in bf16.
    """
    if not training.has("trainer"):
        return training
    precision, rank, groups = given.get("precision"), given.get("lora_rank"), dict(training.groups)
    dtype = TORCH_DTYPES.get(str(given.get("compute_dtype")), "bfloat16")
    in_4bit = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    bits = {"load_in_8bit": True} if precision == "int8" else {"load_in_4bit": True, **in_4bit}
    config = ("BitsAndBytesConfig", bits) if precision in QUANTIZED else None
    targets = given.get("lora_targets", "all-linear")
    lora = ("LoraConfig", {"r": rank, "target_modules": targets}) if rank else None
    for name, is_said, call in (
        ("quantization", precision is not None, config),
        ("lora", rank is not None, lora),
    ):
        if is_said and call is None:
            groups.pop(name, None)
        elif call is not None and name not in groups:
            values = {key: Argument(value, COMMAND_LINE) for key, value in call[1].items()}
            groups[name] = Arguments(call[0], values, training.found)
    return replace(training, groups=groups)


def length_of_rows(training: ProgramTraining) -> dict[str, KnobValue]:
    """The length that the program's own calls cut its rows to, if they say one."""
    unknown = next((one for one in training.lengths if one.problem), None)
    if unknown is not None:
        text = f"{unknown.problem}: {decided_by('max_length')}"
        where = f"{unknown.where} max_length"
        training.found.problems.append(Undecided(text, where, "max_length"))
        return {"max_length": 1024}
    found = {repr(one.value): one.value for one in training.lengths}
    return {"max_length": next(iter(found.values()))} if len(found) == 1 else {}


def note_effects(
    arguments: Arguments, table: str, names: Mapping[str, str] | None = None, prefix: str = ""
) -> None:
    """Note each setting of a table of effects that is set: "saves: Liger's kernels".

    `names` are the trainer's own for those of the table, and `prefix` begins them.
    What saves memory makes the prediction an upper bound, what adds some a lower one, and what is
    refused is not predicted; ranks are sizes of groups, of which 1 is off.
    """
    for own, text in TABLES["effects"][table].items():
        name = prefix + (names or {}).get(own, own)
        effect, _, what = text.partition(": ")
        if effect in ("saves", "adds") and arguments.is_unknown(name):
            arguments.undecided(name, "saves" if effect == "saves" else "adds")
            continue
        value = arguments.take(name)
        if value in _OFF or (effect == "ranks" and value == 1):
            continue
        if effect == "saves":
            arguments.bound(name, what)
        elif effect == "adds":
            arguments.adds(name, what)
        else:
            arguments.refuse(name, f"{what} is not predicted: {EMULATE}")


def only_run(arguments: Arguments, name: str, what: str) -> None:
    """Note that what `name` says is another training than those that are modelled."""
    text = f"{what} isn't modelled, and only a run tells its memory"
    arguments.found.problems.append(Undecided(text, arguments.where(name)))


def read(arguments: Arguments, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that settings of these names set, with the trainer's `defaults`."""
    read_as = {name: optimizer if knob_of(name) == "optimizer" else number for name in defaults}
    return {knob_of(n): read_as[n](arguments, n, default) for n, default in defaults.items()}


def compiled(arguments: Arguments, name: str = "torch_compile") -> dict[str, KnobValue]:
    """The effect of `torch_compile` of TrainingArguments, which its backend or mode implies."""
    if arguments.is_unknown(name):
        arguments.undecided(name, "saves")
        return {}
    backend, mode = (arguments.take(f"{name}_{word}") for word in ("backend", "mode"))
    if backend not in (*_OFF, "inductor"):
        arguments.refuse(f"{name}_backend", f"is {backend}; only inductor has a bound: {EMULATE}")
    if mode not in (*_OFF, "default"):
        text = f"{arguments.where(f'{name}_mode')}: CUDA graphs, and products chosen by trial"
        arguments.found.left_out.append(text)
    values = (arguments.take(name), backend, mode)
    return {"torch_compile": True} if any(value not in _OFF for value in values) else {}


def compiled_by_call(training: ProgramTraining) -> dict[str, KnobValue]:
    """The effect of `torch.compile(model)` and `model.compile()` in a script."""
    if not training.has("compiled"):
        return {}
    call = training["compiled"]
    # `compiled` knows the words of TrainingArguments.
    values = {f"torch_compile_{name}": value for name, value in call.values.items()}
    compiled(Arguments(call.title, values, call.found))
    call.found.left_out += [call.where(n) for n in call.values if n in ("dynamic", "options")]
    return {"torch_compile": True}


PAIRS = "two sequences an example, the chosen and the rejected answer, both of full length"
WITHOUT_KL = "speed is without the {} over unrelated answers that KTO's KL term takes"
"""A note, with "pass" or "two passes"."""


def preference(
    knobs: dict[str, Any], notes: list[str], sequences: int = 2, *, refers: bool = True
) -> int:
    """Turn a model's parameters into those of DPO; KTO has one sequence, ORPO no reference.

    The reference is the model without its adapters, in a second forward pass. Returns `sequences`.
    """
    if refers:
        knobs |= {"reference_pass": True, "lora_dropout": 0.0}
    knobs["micro_batch"] *= sequences
    notes.append(WITHOUT_KL.format("two passes") if sequences == 1 else PAIRS)
    return sequences


PACKED = (
    "packed: each batch is one full row of micro_batch x max_length tokens; attention takes the "
    "time of samples of max_length, and less where they are shorter"
)
MASKED = (
    "packed: each batch is one full row of micro_batch x max_length tokens, and attention without "
    "a flash kernel works on all pairs of them, with a mask"
)


def pack(knobs: dict[str, Any], notes: list[str]) -> None:
    """Pack the samples of a batch into one row, and note it.

    Flash attention gets the ends of the samples and no mask (transformers'
    `_flash_attention_forward` with `position_ids`), so its tensors are those of samples side by
    side. Other kernels get a mask of the whole row (`find_packed_sequence_indices`).
    """
    is_flash = knobs["attention"] == "flash_attention_2"
    if not is_flash:
        knobs["padding"] = "packed"
    note = PACKED if is_flash else MASKED
    notes += [] if note in notes else [note]


def mixed_precision(arguments: Arguments, default: str) -> str:
    """The mixed precision of `bf16` and `fp16` of TrainingArguments."""
    bf16, fp16 = arguments.take("bf16"), arguments.take("fp16")
    chosen = default if bf16 is None else "no"
    if bf16 in (True, "true", "auto"):
        chosen = "bf16"
    elif fp16 is True:
        chosen = "fp16"
    if arguments.values.get("bf16") is None and chosen != "fp16":
        arguments.found.assumed.append(f"mixed_precision={chosen}")
    return chosen


_CHECKPOINTING_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")


def checkpointing(
    arguments: Arguments, *, default: bool, reentrant: bool = False
) -> dict[str, KnobValue]:
    """Gradient checkpointing, and its kind.

    transformers 5 is not reentrant unless arguments say otherwise; `reentrant` is the trainer's own
    default.
    """
    # transformers 5.23 calls it activation_checkpointing, and takes the older name as well.
    new = "activation_checkpointing"
    is_new = new in arguments or arguments.defaults.get(new) is not None
    word = "activation" if is_new else "gradient"
    arguments.taken |= {new, "gradient_checkpointing", *_CHECKPOINTING_KWARGS}
    on: Any = False
    if arguments.is_unknown(f"{word}_checkpointing"):
        arguments.undecided(f"{word}_checkpointing", "saves")
    else:
        on = arguments.take(f"{word}_checkpointing", default)
    if on in OFFLOADED:
        arguments.bound(f"{word}_checkpointing", "offloading of checkpoints")
        on = True
    inner = next(
        (n.partition(".")[0] for n in arguments.values if n.startswith(_CHECKPOINTING_KWARGS)),
        _CHECKPOINTING_KWARGS[0],
    )
    says_how = any(name.partition(".")[0] == inner for name in arguments.values)
    reentrant = reentrant and not says_how
    reentrant = bool(arguments.take(f"{inner}.use_reentrant", reentrant, quietly=True))
    arguments.taken.add(inner)
    for name in arguments.values:
        if name.startswith(f"{inner}.") and name != f"{inner}.use_reentrant":
            arguments.refuse(name, f"is not predicted: {EMULATE}")
    if not isinstance(on, bool):
        arguments.refuse(f"{word}_checkpointing", f"is {on!r}, and is predicted as true or false")
    return {"gradient_checkpointing": bool(on), "use_reentrant": reentrant}


def enabled_by_call(training: ProgramTraining, is_quantized: bool) -> dict[str, KnobValue]:
    """The effect of `gradient_checkpointing_enable()`, and of peft's preparation in k bits."""
    call, usual = training["enabled"], False
    if not training.has("enabled"):
        # Without a word about it PyTorch's own default counts, which is reentrant.
        call, usual = training["preparation"], True
        prepares = training.has("preparation") and is_quantized
        if not (prepares and call.take("use_gradient_checkpointing", True, quietly=True)):
            return {}
    said = [call.take(f"{one}.use_reentrant", quietly=True) for one in _CHECKPOINTING_KWARGS]
    reentrant = next((bool(one) for one in said if one is not None), usual)
    return {"gradient_checkpointing": True, "use_reentrant": reentrant}


def optimizer(arguments: Arguments, name: str, default: str) -> str:
    """An optimizer that is known; others are noted as a problem."""
    chosen = str(arguments.take(name, default))
    if chosen not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        arguments.refuse(name, f"is {chosen}, which is not predicted (predicted: {known})")
    return chosen


_TRAINING = "transformers.TrainingArguments"
_READ = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "max_grad_norm")


def trainer_arguments(
    arguments: Arguments, *, checkpoints: bool, precision: str
) -> dict[str, KnobValue]:
    """Parameters of `transformers.TrainingArguments`, with these two defaults.

    The others are those of the program's own release: the optimizer's is another before 4.56.
    """
    note_effects(arguments, "transformers")
    arguments.taken.add("0")  # output_dir, without its name
    return {
        **read(arguments, {name: releases.default(_TRAINING, name) for name in _READ}),
        **checkpointing(arguments, default=checkpoints),
        "mixed_precision": mixed_precision(arguments, precision),
        "training_loop": "trainer",
        **compiled(arguments),
        **sharded(arguments),
        **with_liger(arguments, "use_liger_kernel"),
    }


def with_liger(arguments: Arguments, name: str) -> dict[str, KnobValue]:
    """The parameter of Liger's kernels, all of them; some only are named as what saves memory."""
    if arguments.is_unknown(name):
        arguments.undecided(name, "saves")
    elif arguments.take(name):
        if not arguments.take("liger_kernel_config"):
            return {"liger": True}
        arguments.bound(name, "Liger's kernels, as far as liger_kernel_config names some,")
    return {}


WITH_SYNC = f'accelerator_config={{"gradient_accumulation_kwargs": {{"{SYNC}": True}}}}'
"""The argument by which Trainer exchanges gradients in each micro-step."""

_ACCUMULATION = "accelerator_config.gradient_accumulation_kwargs"


def sharded(arguments: Arguments) -> dict[str, KnobValue]:
    """Parameters of FSDP in TrainingArguments (`_process_fsdp_args`, `accelerator_config`)."""
    knobs: dict[str, KnobValue] = {}
    # A file has it by its whole path; in a script the inner dictionary is text.
    text = str(arguments.take(_ACCUMULATION, quietly=True))
    if arguments.take(f"{_ACCUMULATION}.{SYNC}", quietly=True) is True or f"'{SYNC}': True" in text:
        arguments.take("accelerator_config", quietly=True)
        knobs[SYNC] = True
    said, inner = arguments.take("fsdp", quietly=True), "fsdp_config"
    if said in _OFF:
        return knobs
    settings: dict[str, object] = {
        name.removeprefix(f"{inner}.").removeprefix("fsdp_"): arguments.take(name)
        for name in arguments.values
        if name.startswith(f"{inner}.")
    }
    for word in str(said).split() if isinstance(said, str) else ():
        if word == "offload":
            settings.setdefault("cpu_offload", True)
        elif word == "shard_grad_op":
            settings.setdefault("reshard_after_forward", False)
        elif word not in ("full_shard", "auto_wrap", "true"):
            arguments.refuse("fsdp", f"is {said!r}, and {word} is not predicted: {EMULATE}")
    file = str(arguments.take(inner))
    if file.endswith(".json"):
        arguments.refuse(inner, f"is {file}, a file of its own, which is not read: {EMULATE}")
    its, problems = sharding(settings, arguments.where("fsdp"))
    arguments.found.problems += problems
    return its | knobs


_OF_IMAGES = ("ForImageTextToText", "ForConditionalGeneration", "ForVision2Seq", "FastVisionModel")
"""Words in the names of classes that load models of images."""
_HEADS = ("CausalLM", "SequenceClassification", "PreTraining", *(n[3:] for n in _OF_IMAGES[:3]))
"""Tasks, in names of classes, whose training step is predicted."""


def loaded_model(training: ProgramTraining, default: str) -> tuple[str | None, dict[str, Any]]:
    """The model and its weights' dtype; `default` applies if the trainer loads it by name."""
    arguments = training["arguments"]
    if training.has("model"):
        source, prefix = training["model"], ""
        name = source.take("0", source.take("pretrained_model_name_or_path"))
        default = STORED  # transformers 5 loads in the dtype of the checkpoint
    else:
        source, prefix = arguments, "model_init_kwargs."
        arguments.taken.add("model_init_kwargs")
        name = training.model_by_name
    if name is not None and not isinstance(name, str):
        source.refuse("0", f"is {name!r}, which is no model's name")
        name = None
    knobs: dict[str, Any] = {
        "precision": dtype(source, (f"{prefix}dtype", f"{prefix}torch_dtype"), default)
    }
    knobs["attention"] = attention(source, f"{prefix}attn_implementation")
    trainer = training["trainer"]
    if "Seq2Seq" in f"{source.title} {trainer.title}" and "CausalLM" not in source.title:
        only_run(trainer, "model", "a model with an encoder and a decoder")
    made = source.title.partition(".")[0]
    task = made.partition("For")[2]
    named = made.removesuffix("LMHeadModel")  # of GPT-2: the class for CausalLM
    is_bare = named.endswith("Model") and not named.startswith(("Fast", "Peft", "AutoPeft"))
    if is_bare or (task and not task.startswith(_HEADS) and "Seq2Seq" not in task):
        only_run(source, "0", "a model of this class")
    given = (trainer.values.get(name) for name in ("processing_class", "tokenizer"))
    tokenizes = "".join(str(one.value) for one in given if one is not None)
    # A trainer that loads a model by its name loads the processor that is published with it.
    takes_images = "Processor" in tokenizes or (source is arguments and not tokenizes)
    if takes_images or any(word in source.title for word in _OF_IMAGES):
        names, name_of_model = (trainer, "model") if source is arguments else (source, "0")
        names.adds(name_of_model, "the memory of images that it may be trained with", "images")
    if "ForSequenceClassification" in source.title:
        knobs["num_labels"] = number(source, "num_labels", 2)  # as PreTrainedConfig has it
    if training.has("quantization"):
        is_widened = training.has("preparation")  # all that is not quantised
        knobs |= quantized(training["quantization"], knobs["precision"], is_widened=is_widened)
    else:
        note_effects(source, "quantization", prefix=prefix)
    note_effects(source, "from_pretrained", prefix=prefix)
    if source is not arguments:
        source.leave_out("", "from_pretrained")
    return name, knobs


def training_by_calls(
    training: ProgramTraining, *, checkpoints: bool, precision: str
) -> tuple[str | None, dict[str, Any]]:
    """The model and the parameters of a script's calls, without its adapters.

    `checkpoints` and `precision` are the defaults of its arguments.
    """
    model, loaded = loaded_model(training, "fp32")
    is_quantized = training.has("quantization") or stored_format(model or "") is not None
    arguments = training["arguments"]
    note_effects(training["trainer"], "Trainer")
    knobs = {
        **trainer_arguments(arguments, checkpoints=checkpoints, precision=precision),
        **loaded,
        "lora_rank": 0,
        "kbit_preparation": "none",
    }
    if training.has("preparation"):  # which widens all weights that are in no k bits
        knobs |= {"kbit_preparation": "peft"} if is_quantized else {"precision": "fp32"}
    if not knobs["gradient_checkpointing"]:
        knobs |= enabled_by_call(training, is_quantized)
    return model, knobs | compiled_by_call(training)


def adapters_by_calls(training: ProgramTraining) -> dict[str, Any]:
    """Parameters of the `LoraConfig` of a script."""
    found = adapters(training["lora"], {})
    training["lora"].leave_out("LoraConfig")
    return found


def dtype(arguments: Arguments, names: tuple[str, ...], default: str) -> str:
    """Tuner's word for a dtype: "bf16", or `STORED`."""
    for name in names:
        value = arguments.take(name)
        if value is None:
            continue
        word = str(value).removeprefix("torch.")
        if word == "auto":
            return STORED
        if word in DTYPES:
            return DTYPES[word]
        arguments.refuse(name, f"is {value}: expected one of {', '.join(DTYPES)} or auto")
    arguments.found.assumed.append(f"the model in {default if default != STORED else 'its dtype'}")
    return default


def attention(arguments: Arguments, name: str) -> str:
    """The attention; transformers takes sdpa where nothing is said."""
    chosen = str(arguments.take(name, "sdpa"))
    if chosen in ("eager", "sdpa", "flash_attention_2"):
        return chosen
    if chosen.startswith("kernels-community/flash-attn2"):
        return "flash_attention_2"
    if chosen.startswith(tuple(TABLES["like_flash"])):
        arguments.found.left_out.append(f"{arguments.where(name)}: {chosen}, as flash_attention_2")
        return "flash_attention_2"
    arguments.refuse(name, f"is {chosen}; predicted are eager, sdpa and flash_attention_2")
    return "sdpa"


LOADED = "loaded"
"""In place of a parameter: the dtype of weights beside those in 4 bits, if it stays; `planned`
compares it with that of the products, as it knows the model."""


def quantized(arguments: Arguments, loaded: str, *, is_widened: bool) -> dict[str, Any]:
    """Knobs of a `BitsAndBytesConfig`; `loaded` is the dtype of what is not quantised."""
    skipped = arguments.take("llm_int8_skip_modules")
    if {*(skipped if isinstance(skipped, tuple) else ())} - {"lm_head"}:
        arguments.adds("llm_int8_skip_modules", "weights that stay in 16 bits")
    arguments.leave_out("BitsAndBytesConfig")
    if arguments.take("load_in_8bit", quietly=True):
        return {"precision": "int8", "compute_dtype": loaded}
    if not arguments.take("load_in_4bit", quietly=True):
        arguments.refuse("load_in_4bit", "is not true, nor is load_in_8bit: what is meant?")
    kind = arguments.take("bnb_4bit_quant_type", "fp4")
    computed = dtype(arguments, ("bnb_4bit_compute_dtype",), "fp32")
    if kind not in ("nf4", "fp4"):
        arguments.refuse("bnb_4bit_quant_type", f"is {kind}: expected nf4 or fp4")
    return {
        "precision": "nf4",  # fp4 has the same sizes
        "compute_dtype": computed,
        "double_quant": bool(arguments.take("bnb_4bit_use_double_quant", False)),
        **({} if is_widened else {LOADED: loaded}),
    }


def adapters(
    lora: Arguments, names: Mapping[str, str], *, every_linear: bool = False
) -> dict[str, Any]:
    """Parameters of an adapter; `names` are the trainer's names for `LoraConfig`'s arguments.

    With `every_linear` the trainer adapts all linear layers.
    """
    targets = names.get("target_modules", "target_modules")
    saved = listed(lora, names.get("modules_to_save", "modules_to_save"))
    note_effects(lora, "LoraConfig", names)
    flags = {word: names.get(f"use_{word}", f"use_{word}") for word in ("dora", "rslora")}
    kind = [word for word, flag in flags.items() if lora.take(flag, quietly=True) is True]
    return {
        **({"adapter": kind[0]} if kind else {}),  # DoRA takes the memory where both are set
        "lora_rank": number(lora, names.get("r", "r"), 8),
        "lora_alpha": lora.take(names.get("lora_alpha", "lora_alpha"), 8, quietly=True),
        "lora_dropout": number(lora, names.get("lora_dropout", "lora_dropout"), 0.0),
        "lora_targets": ALL_LINEAR if every_linear else modules(lora, targets),
        **({"modules_to_save": saved} if saved else {}),
    }


def modules(arguments: Arguments, name: str) -> tuple[str, ...] | str:
    """Names of modules; `PEFT_DEFAULT` where nothing is said."""
    value = arguments.take(name)
    chosen = listed(arguments, name)
    if isinstance(value, str) and any(map(is_pattern, chosen)):
        return (value,)
    if not chosen:
        arguments.found.assumed.append(f"{name}: {PEFT_DEFAULT}")
        return PEFT_DEFAULT
    if chosen in (("all-linear",), ("all",)):
        return ALL_LINEAR
    lost = [part for part in chosen if part.endswith(",")]
    for part in lost:
        text = f"{arguments.where(name)}: {part!r} is no module, for its comma: it gets no adapter"
        arguments.found.left_out.append(text)
    chosen = tuple(part for part in chosen if part not in lost)
    for part in chosen:
        if is_pattern(part):
            arguments.refuse(name, f"is {part}: peft takes a pattern alone, not in a list")
    return chosen


def listed(arguments: Arguments, name: str) -> tuple[str, ...]:
    """Words in a list, or with commas between them; none where nothing is set."""
    value = arguments.take(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple | set | frozenset | dict):
        arguments.refuse(name, f"is {value!r}, which is no list of names")
        return ()
    return tuple(map(str, value))


# -- evaluation ----------------------------------------------------------------------

_EVAL_BATCH = 8
"""`per_device_eval_batch_size` of TrainingArguments, whatever the training's is."""

_PRICED = ("Trainer", "SFTTrainer")
"""Trainers whose evaluation is predicted, as `read_training` names them."""

_ASKING = (
    "eval_strategy", "evaluation_strategy", "eval_on_start", "do_eval", "val_set_size",
    "test_datasets", "val_size", "evals_per_epoch", "run_val_every_n_steps", "dataset_val",
)  # fmt: skip
"""Settings that make a trainer evaluate."""


def evaluation_of(
    training: ProgramTraining, knobs: Mapping[str, Any]
) -> tuple[dict[str, int], str]:
    """The knobs of the evaluation of a training, and what of it they do not say; both may be empty.

    `knobs` are those of the training; an `eval_batch` of theirs takes the place of the program's.
    """
    arguments, said = training["arguments"], knobs.get("eval_batch")
    none = {} if said is None else {"eval_batch": 0}
    # In a script evaluation is a call of its own, whatever `do_eval` says.
    asking = [n for n in _ASKING if n != "do_eval" or training.trainer not in _PRICED]
    says = any(_is_on(arguments, name) for name in asking)
    if said == 0 or (said is None and not (says or training.evaluates)):
        return none, ""
    if training.trainer not in _PRICED:
        return none, f"evaluation isn't priced: {training.trainer}'s isn't known"
    if knobs.get(GPUS_PER_TRIAL, 1) > 1:
        return none, "evaluation isn't priced on several GPUs"
    size = arguments.values.get("per_device_eval_batch_size", Argument(_EVAL_BATCH, ""))
    size = size if said is None else Argument(said, "")
    if size.problem is not None or not isinstance(size.value, int):
        why = size.problem or f"is {size.value}"
        text = f"evaluation isn't priced: per_device_eval_batch_size {why}; --set eval_batch=N"
        return none, text
    kept, unknown = _kept(training, knobs)
    return {"eval_batch": size.value, **({"eval_kept": kept} if kept else {})}, unknown


def _kept(training: ProgramTraining, knobs: Mapping[str, Any]) -> tuple[int, str]:
    """The least number of batches whose logits stay on the GPU; what is unknown about it."""
    arguments, trainer = training["arguments"], training["trainer"]
    lossless = not _is_on(trainer, "compute_metrics")
    if lossless or _is_on(arguments, "prediction_loss_only") or knobs.get("num_labels"):
        return 0, ""
    if _is_on(trainer, "preprocess_logits_for_metrics") or _is_on(arguments, "batch_eval_metrics"):
        return 1, ""
    steps = arguments.values.get("eval_accumulation_steps")
    if steps is not None and isinstance(steps.value, int) and steps.value > 0:
        return steps.value, ""
    return 1, (
        "set eval_accumulation_steps: compute_metrics makes the evaluation keep the logits of all "
        "its batches on the GPU, and their number isn't known"
    )


def _is_on(arguments: Arguments, name: str) -> bool:
    """True for a setting that is neither absent nor off; an unreadable one may be on."""
    argument = arguments.values.get(name)
    if argument is None:
        return False
    value = argument.value
    word = value.rpartition(".")[2].lower() if isinstance(value, str) else value
    return argument.problem is not None or word not in _OFF
