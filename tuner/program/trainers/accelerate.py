"""accelerate: its launcher, its configuration file and its settings of FSDP.

Read from accelerate 1.15 (commands/launch.py, utils/dataclasses.py) and transformers 5.23
(`_process_fsdp_args`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem
from tuner.core.records import KnobValue
from tuner.core.setup.distributed_knobs import DISTRIBUTED, REDUCE_BUCKET, RESHARD
from tuner.program.arguments import EMULATE, TABLES, file_in
from tuner.program.edit.source import opened
from tuner.program.program import Program
from tuner.program.trainer import Format, Launch, Trainer
from tuner.program.trainers.deepspeed import zero_knobs, zero_of
from tuner.program.writing import Settings, SettingsReader

_KINDS = {
    "NO": "", "MULTI_GPU": "multi_gpu", "FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
}  # fmt: skip
"""accelerate's `distributed_type`, and the option that says the same."""


def launch(program: Program, options: dict[str, Any]) -> Launch:
    """`accelerate launch`: what its options say counts more than its configuration file."""
    found = Launch(processes=None)
    options = _with_file(program, options, found)
    if "num_processes" in options:
        name = "accelerate's num_processes"
        found.processes = found.whole(name, str(options["num_processes"]))
    found.set_machines("accelerate's num_machines", str(options.get("num_machines", 1)))
    if found.processes is not None and found.machines > 1:  # it counts those of all machines
        found.processes = max(1, found.processes // found.machines)
    if options.get("mixed_precision") not in (None, "no"):
        found.mixed_precision = str(options["mixed_precision"])
    backend = str(options.get("dynamo_backend", "no")).lower()
    if backend == "inductor":
        found.knobs = {"torch_compile": True}
    elif backend != "no":
        text = f"is {backend}; only inductor has a bound: {EMULATE}"
        found.problems.append(Problem(text, "accelerate's dynamo_backend"))
    for name, what in TABLES["accelerate"].items():
        if is_true(options.get(name)):
            found.problems.append(Problem(f"{what} is not predicted: {EMULATE}", f"{name}"))
    shared = []
    if is_true(options.get("use_deepspeed")):
        file, where = options.get("deepspeed_config_file"), "accelerate's deepspeed_config"
        names = ("offload_optimizer", "offload_param")
        hosts = {f"{name}.device": options.get(f"{name}_device", "none") for name in names}
        own = {"stage": int(str(options.get("zero_stage", 2))), **hosts}
        shared.append(zero_of(program.folder / str(file)) if file else zero_knobs(own, where))
    if is_true(options.get("use_fsdp")):
        fsdp = {n.removeprefix("fsdp_"): v for n, v in options.items() if n.startswith("fsdp_")}
        defaults = {"version": 1, "auto_wrap_policy": "NO_WRAP"}
        shared.append(sharding({**defaults, **fsdp}, "accelerate's fsdp"))
    for knobs, problems in shared:
        found.knobs |= knobs
        found.problems += problems
    return found


def _with_file(program: Program, options: dict[str, Any], launch: Launch) -> dict[str, Any]:
    """The options, with those of accelerate's file for what they leave open."""
    own = {name for name in (*_KINDS.values(), "cpu") if name in options}
    values = _configured(program, options.get("config_file"), launch)
    kind = str(values.pop("distributed_type", "NO"))
    found = {**values, **options}
    if kind not in _KINDS:
        text = f"is {kind}, and is predicted as {', '.join(_KINDS)}: {EMULATE}"
        launch.problems.append(Problem(text, "accelerate's distributed_type"))
    elif _KINDS[kind] and not own:
        found[_KINDS[kind]] = True
    elif values and not own:
        found.setdefault("num_processes", 1)
    return found


def _configured(program: Program, named: str | None, launch: Launch) -> dict[str, Any]:
    """The values of accelerate's configuration file, by option; by default the user's own file."""
    if named is None:  # the file that `accelerate config` writes; its own name imports torch
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
        path = home / "accelerate" / "default_config.yaml"
        if not path.is_file():
            return {}
    else:
        path = program.folder / file_in(named)
    source = opened(path)
    if source is None:
        text = "cannot be read: expected a YAML or JSON file of `accelerate config`"
        launch.problems.append(Problem(text, str(path)))
        return {}
    values: dict[str, Any] = {}
    for place in source.places:
        section, name = map(str, ("", "", *place.path)[-2:])
        if place.value is None or len(place.path) not in (1, 2):
            continue
        if section == "parallelism_config":
            values["use_parallelism_config"] = True
        elif section in _SECTIONS:
            prefix = _SECTIONS[section]
            values[f"{prefix}{name.removeprefix(prefix)}"] = place.value
    return values


_SECTIONS = {"": "", "fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}
"""Parts of accelerate's file, and how the options for their settings begin."""

_WRAPPED = "TRANSFORMER_BASED_WRAP"
"""The only policy that is predicted: each layer is a unit."""


def is_true(value: object) -> bool:
    """True for a word of a command line or a YAML file that means so."""
    return value is not None and str(value).lower() not in ("false", "none", "0", "")


def sharding(settings: Mapping[str, Any], where: str) -> tuple[dict[str, KnobValue], list[Problem]]:
    """Parameters of FSDP, and problems, from settings of accelerate or `fsdp_config`."""
    problems = [
        Problem(f"{what} is not predicted: {EMULATE}", f"{where} {name}")
        for name, what in TABLES["fsdp"].items()
        if is_true(settings.get(name))
    ]
    if str(settings.get("version", 2)) != "2":
        text = f"is {settings['version']}, and FSDP1 is not predicted: set it to 2; or {EMULATE}"
        problems.append(Problem(text, f"{where} version"))
    policy = str(settings.get("auto_wrap_policy", _WRAPPED)).upper()
    if policy != _WRAPPED:
        text = f"is {policy}, and is predicted as {_WRAPPED}: {EMULATE}"
        problems.append(Problem(text, f"{where} auto_wrap_policy"))
    knobs: dict[str, KnobValue] = {DISTRIBUTED: "fsdp2"}
    if not is_true(settings.get("reshard_after_forward", True)):
        knobs[RESHARD] = False
    if is_true(settings.get("activation_checkpointing")):
        # `checkpoint_wrapper` around each layer, without reentrance.
        knobs |= {"gradient_checkpointing": True, "use_reentrant": False}
    return knobs, problems


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    del model  # named by the script that is launched
    chosen.leave("grad_accum", "belongs to Accelerator(gradient_accumulation_steps=...)")
    return {
        "compute_environment": "LOCAL_MACHINE",
        **_distributed(chosen),
        "mixed_precision": chosen.text("mixed_precision") or "no",
        "num_machines": chosen.get("machines") or 1,
        "num_processes": chosen.get("gpus_per_trial") or 1,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }


def _distributed(chosen: SettingsReader) -> Settings:
    parallelism = chosen.parallelism
    chosen.get("distributed")
    if parallelism.ranks == 1:
        return {"distributed_type": "NO"}
    if parallelism.is_sharded:
        found: Settings = {"distributed_type": "FSDP", "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": _WRAPPED,
            "fsdp_reshard_after_forward": chosen.get(RESHARD) is not False,
        }}  # fmt: skip
        chosen.get("dp_shard_size")
        if parallelism.group < parallelism.ranks:
            found["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": parallelism.ranks // parallelism.group,
                "parallelism_config_dp_shard_size": parallelism.group,
            }
        return found
    if not parallelism.zero_stage:
        return {"distributed_type": "MULTI_GPU"}
    chosen.leave(REDUCE_BUCKET, "belongs to a file of DeepSpeed's: deepspeed_config_file")
    zero = {
        "zero_stage": parallelism.zero_stage,
        "zero3_init_flag": parallelism.shares_weights,
        **chosen.under("gradient_accumulation_steps gradient_clipping"),
    }
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": zero}


TRAINER = Trainer(
    "accelerate",
    format=Format("accelerate", _settings, "accelerate launch --config_file FILE", workloads=()),
)
