"""TRL's trainers of a fixed data set: SFT, DPO, KTO, ORPO, CPO and reward models.

Read from TRL 1.16: trainer/{sft,dpo,kto,reward}_trainer.py, experimental/{orpo,cpo},
base_config.py, utils.py (`create_model_from_path`, `add_fused_lm_head`) and scripts/.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.core.errors import UnavailableError
from tuner.core.setup.common import QUANTIZED
from tuner.program import reading
from tuner.program.arguments import DTYPES, EMULATE, TABLES, ProgramTraining, Undecided
from tuner.program.edit.source import opened
from tuner.program.program import Program, tool_settings, tool_words
from tuner.program.releases import default, installed, known, library, meant, takes
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.trainers.accelerate import launch as accelerate_launch
from tuner.program.writing import MACHINE, TRAINING, Settings, SettingsReader
from tuner.space.models.catalogue import NF4, stored_format

TRL_LAUNCHES = ("accelerate_config", "config_file", "num_processes", "num_machines")
"""Settings that `trl sft` passes on to `accelerate launch` (trl/cli, 1.16)."""

_CONFIGS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO",
            "rloo": "RLOO", "distillation": "Distillation"}  # fmt: skip
"""The classes of the arguments of each of `trl`'s scripts, without "Config"."""

_VERSIONS = {"trl": "1.16", "transformers": "5.23", "peft": "0.21"}


def _plan(training: ProgramTraining) -> Planned:
    name = training.trainer.rpartition(" ")[2]  # of Unsloth's, too
    planned = Planned(*_trained(training))
    arguments, knobs, notes = training["arguments"], planned.knobs, training.found.notes
    losses = TABLES["losses"].get(name, "").split()
    kinds = arguments.take("loss_type", losses[0], quietly=True) if losses else ()
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if kind not in losses:
            arguments.refuse("loss_type", f"is {kind}: expected one of {', '.join(losses)}")
    if name == "SFTTrainer":
        strategy = arguments.take("packing_strategy", "bfd", quietly=True)
        is_packed = arguments.take("packing", False) and strategy != "wrapped"
        if arguments.take("padding_free") or is_packed:  # one row of a batch, else full ones
            reading.pack(knobs, notes)
        _as_release_does(training, knobs, kinds)
    elif name == "KTOTrainer":
        passes = (
            "pass" if arguments.take("precompute_ref_log_probs", quietly=True) else "two passes"
        )
        notes += [reading.WITHOUT_KL.format(passes)] if kinds == "kto" else []
    else:
        _compare(training, planned)
    if name in ("DPOTrainer", "KTOTrainer"):
        _refer(training, knobs)
    if name != "SFTTrainer" and arguments.take("disable_dropout", True, quietly=True):
        knobs["lora_dropout"] = 0.0
    arguments.leave_out("", "TRL")
    return planned


def _as_release_does(training: ProgramTraining, knobs: dict[str, Any], loss: object) -> None:
    """The behaviour of SFTTrainer by its release, and by a template."""
    arguments = training["arguments"]
    if is_before("1.7") and loss != "chunked_nll":
        knobs["loss"] = "liger" if knobs.get("liger") else "transformers"
    if is_before("0.27") and knobs["precision"] in QUANTIZED:
        knobs["kbit_preparation"] = "trl" if knobs["mixed_precision"] == "bf16" else "peft"
    template, saved = arguments.take("chat_template_path"), knobs.get("modules_to_save", ())
    if template is not None and knobs["lora_rank"] and "lm_head" not in saved:
        # Tokens that the template adds are trained, and the head with them.
        what = "training of lm_head, if the template has new tokens,"
        arguments.adds("chat_template_path", what, "modules_to_save")


def _compare(training: ProgramTraining, planned: Planned) -> None:
    """Chosen and rejected answers in one pass, with all logits but for DPO."""
    knobs, name, notes = planned.knobs, training.trainer, training.found.notes
    if not name.endswith("DPOTrainer"):
        knobs["loss"] = "transformers"
    elif training["arguments"].take("padding_free"):
        reading.pack(knobs, notes)
    if name == "RewardTrainer":
        knobs["num_labels"] = 1
    planned.sequences = reading.preference(knobs, notes, refers=False)


def _refer(training: ProgramTraining, knobs: dict[str, Any]) -> None:
    """Set the knobs of a reference, as TRL's DPOTrainer and KTOTrainer have one."""
    arguments = training["arguments"]
    reading.note_effects(arguments, "TRL's reference")
    given = training["trainer"].take("ref_model") is not None or training.has("reference")
    if training.has("reference"):
        _as_model(training, knobs)
    if not arguments.take("precompute_ref_log_probs", False, quietly=True):
        knobs["reference_pass"] = True
        knobs["reference_model"] = given or not knobs["lora_rank"]


def _as_model(training: ProgramTraining, knobs: dict[str, Any]) -> None:
    """Note where the reference isn't the trained model as it is loaded."""
    reference, trainer, own = training["reference"], training["trainer"], knobs["precision"]
    names, words = ("pretrained_model_name_or_path", "0"), ("quantization_config", "load_in_4bit")
    is_quantized = any(map(reference.take, (*words, "load_in_8bit")))
    its = DTYPES.get(str(reference.take("dtype", reference.take("torch_dtype"))))
    model = training["model"].take("0", training.model_by_name)
    if model not in map(reference.take, names) or is_quantized != training.has("quantization"):
        trainer.refuse("ref_model", f"isn't the trained model as it is loaded: {EMULATE}")
    elif its == "fp32" != own:
        trainer.adds("ref_model", "a reference in fp32")
    elif own == "fp32" != its:
        trainer.bound("ref_model", "a reference of fewer bits")


def is_before(release: str) -> bool:
    """True if the TRL of the program is older.

    Releases that changed what only the code of SFTTrainer says were read in its wheels
    (sft_trainer.py): k-bit preparation 0.27, chunked loss 1.7.
    """
    trl = library("trl")
    return trl is not None and trl.is_before(release)


def _trained(training: ProgramTraining) -> tuple[str | None, dict[str, Any]]:
    """The model and the knobs, with the defaults of the program's own TRL."""
    arguments = training["arguments"]
    own = training.trainer.replace("Trainer", "Config")
    # TrainingArguments are taken over as they are, with their own defaults.
    is_plain = arguments.title == "TrainingArguments"
    config = "transformers.TrainingArguments" if is_plain else f"trl.{own}"
    narrow = "bf16" in (known(config) or {}).get("contrary", ())
    checkpoints = default(config, "gradient_checkpointing") is True
    precision = "bf16" if narrow else "no"
    model, knobs = reading.training_by_calls(training, checkpoints=checkpoints, precision=precision)
    knobs["loss"], length = "chunked", arguments.values.get("max_length")
    if arguments.take("dataset_kwargs.skip_prepare_dataset", False, quietly=True):
        arguments.taken.add("max_length")
        knobs |= reading.length_of_rows(training)
    elif length is not None and length.value is None and length.problem is None:
        text, at = "is None: the longest example decides; pass --set max_length", "max_length"
        arguments.found.problems.append(Undecided(text, arguments.where(at), at))
    else:
        knobs["max_length"] = reading.number(arguments, "max_length", 1024)
    trainer = training["trainer"]
    if trainer.take("peft_config") is not None or training.has("lora"):
        knobs |= reading.adapters_by_calls(training)
    if knobs["precision"] in QUANTIZED or stored_format(model or "") == NF4:
        knobs["adapter_dtype"] = "bf16"
    trainer.leave_out("", "Trainer")
    return model, knobs


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    chosen.train_as_transformers(loss="")
    chosen.implies("padding", "none")
    why = "its nll loss (TRL 1.16) never has the whole logits: it uses less memory than predicted"
    chosen.implies("loss", "chunked", why)
    chosen.get("kbit_preparation")
    if chosen.is_quantized:
        why = "SFTTrainer keeps the adapters of a quantised model in bf16"
        chosen.implies("adapter_dtype", "bf16", why, default="fp32")
        why = (
            "SFTTrainer (TRL 1.16) doesn't call prepare_model_for_kbit_training; weights keep "
            "their load dtype"
        )
        chosen.implies("kbit_preparation", "none", why)
    else:
        chosen.implies("adapter_dtype", "fp32", "the adapters stay as peft makes them")
    return {
        "model_name_or_path": model,
        "dtype": chosen.dtype,
        **chosen.under("attn_implementation", TRAINING),
        "loss_type": "nll",
        **chosen.under(MACHINE, "max_length"),
        "use_peft": chosen.has_adapters,
        **chosen.lora("use_dora use_rslora lora_r lora_alpha lora_dropout lora_target_modules"),
        **chosen.lora("lora_modules_to_save"),
        **chosen.under("load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant load_in_8bit"),
    }


def _launch(program: Program) -> Launch:
    """`trl sft`, which runs `accelerate launch`; TRL ships some of its configurations."""
    said = tool_settings(program)
    options = {name: said[name].value for name in TRL_LAUNCHES if name in said}
    named = options.pop("accelerate_config", None)
    if named is not None:
        folder, _ = installed("trl")
        shipped = folder and folder / "accelerate_configs" / f"{named}.yaml"
        options["config_file"] = str(shipped if shipped and shipped.is_file() else named)
    return accelerate_launch(program, options)


def _script(program: Program) -> Program:
    """TRL's own script, which `trl sft` starts with the words behind it.

    Raises `UnavailableError` without TRL.
    """
    place = tool_words(program) or slice(0, 0)
    before, rest = program.command[: place.start], program.command[place.stop :]
    name = program.command[place][-1].rpartition(".")[2]
    folder, _ = installed("trl")
    path = (folder or Path()) / "scripts" / f"{name}.py"
    source = opened(path) if folder else None
    if source is None:
        raise UnavailableError(
            f"`trl {name}` runs a script of TRL's, which isn't installed here",
            hint="run tuner in the environment of the trainer, or pip install trl",
        )
    command = [*(before or ("trl",)), str(path), *rest]
    own, said = f"trl.{_CONFIGS[name]}Config", tool_settings(program)
    for name, argument in said.items():
        instead = None if takes(own, name) else meant(own, name, argument.value)
        if instead is not None and instead.argument not in said:
            command.append(f"--{instead.argument}={argument.value}")
    files = {**program.files, str(path): source}
    return replace(program, command=tuple(command), main=str(path), files=files)


TRAINER = Trainer(
    "TRL",
    SettingsFile(
        ("trl", "sft", "--config", FILE),
        (("model_name_or_path",), ("dataset_name", "datasets", "max_length", "packing")),
        (
            *(("trl", name) for name in _CONFIGS),
            *((by, f"trl.scripts.{name}") for name in _CONFIGS for by in ("-m", "--module")),
        ),
    ),
    tuple(
        Reading(f"TRL {name}Trainer", f"{name}Trainer", _VERSIONS, _plan)
        for name in ("SFT", "DPO", "KTO", "ORPO", "CPO", "Reward")
    ),
    Format("trl", _settings, "trl sft --config FILE, with data set and schedule added"),
    _launch,
    _script,
)
