"""How a program is started: on how many GPUs, and what its launcher says of the training.

Read from torch.distributed.run (PyTorch 2.13), accelerate 1.15 (commands/launch.py,
utils/dataclasses.py), DeepSpeed 0.19 (launcher/runner.py) and transformers 5.23
(`_process_fsdp_args`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem
from tuner.core.records import KnobValue
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    MACHINES,
    REDUCE_BUCKET,
    RESHARD,
)
from tuner.program.arguments import EMULATE, values_of_files, values_of_words
from tuner.program.program import Program, file_in
from tuner.program.reads import opened
from tuner.program.zero_file import zero_knobs, zero_of_file

_START_RANKS = ("Axolotl", "LLaMA-Factory")
"""Tools whose command starts a process on each GPU that there is."""

TRL_LAUNCHES = ("accelerate_config", "config_file", "num_processes", "num_machines")
"""What `trl sft` hands on to `accelerate launch`, from its words and its file (trl/cli, 1.16)."""

_ALL = ("gpu", "auto")
"""In place of a number of processes: as many as there are GPUs."""


@dataclass(slots=True)
class Launch:
    """How a program is started.

    `processes` are those on each of the `machines`, None for as many as there are GPUs. `knobs`
    are what the launcher says of sharding. `mixed_precision` is its word for it, None where it has
    none.
    """

    processes: int | None = 1
    machines: int = 1
    knobs: dict[str, KnobValue] = field(default_factory=dict)
    mixed_precision: str | None = None
    problems: list[Problem] = field(default_factory=list)
    starts_ranks: bool = True
    """Whether it can start more than one process."""

    def on(self, gpus: int | None) -> int:
        """The number of ranks on machines that have `gpus` each; problems are noted."""
        ranks = self.processes or gpus or 1
        if gpus is not None and not self.starts_ranks and gpus > 1:
            text = (
                f"starts one process on {gpus} GPUs, where a trainer uses DataParallel, which is "
                f"not predicted: start it with torchrun --nproc-per-node {gpus}"
            )
            self.problems.append(Problem(text, "the command"))
        elif gpus is not None and gpus != ranks:
            text = f"starts {ranks} processes, and --gpus is {gpus}: both have to be the same"
            self.problems.append(Problem(text, "the command"))
        return ranks * self.machines


def read_launch(program: Program) -> Launch:
    """How `program` is started; what cannot be read is among the problems."""
    words = [Path(word).name for word in program.command]
    end = words.index(Path(program.main).name) if Path(program.main).name in words else len(words)
    for start, word in enumerate(words[:end]):
        module = words[start + 1] if word == "-m" and start + 1 < end else ""
        if word == "torchrun" or module in ("torch.distributed.run", "torch.distributed.launch"):
            return _torchrun(program.command[start + 1 : end])
        is_accelerate = words[start : start + 2] == ["accelerate", "launch"]
        if is_accelerate or module == "accelerate.commands.launch":
            return _accelerate(program, _options(program.command[start + 2 : end]))
        if word == "deepspeed":
            return _deepspeed(program.command[start + 1 : end])
    if program.trainer == "TRL":
        return _trl(program)
    if program.trainer in _START_RANKS:
        return Launch(processes=None)
    return Launch(starts_ranks=False)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a launcher by name, with underscores for dashes."""
    return {name: argument.value for name, argument in values_of_words(words).items()}


def _torchrun(words: Sequence[str]) -> Launch:
    options = _options(words)
    launch = Launch()
    per_machine = str(options.get("nproc_per_node", 1))
    if per_machine in _ALL:
        launch.processes = None
    else:
        launch.processes = _whole(launch, "torchrun --nproc-per-node", per_machine)
    _machines(launch, "torchrun --nnodes", str(options.get("nnodes", 1)).rpartition(":")[2])
    return launch


def _deepspeed(words: Sequence[str]) -> Launch:
    options = _options(words)
    launch = Launch(processes=None)
    if "num_gpus" in options:
        launch.processes = _whole(launch, "deepspeed --num_gpus", str(options["num_gpus"]))
    elif "include" in options:
        hosts = str(options["include"]).split("@")
        launch.processes = len([n for n in hosts[0].partition(":")[2].split(",") if n]) or None
        _machines(launch, "deepspeed --include", str(len(hosts)))
    _machines(launch, "deepspeed --num_nodes", str(options.get("num_nodes", 1)))
    return launch


_KINDS = {
    "NO": "",
    "MULTI_GPU": "multi_gpu",
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
}
"""accelerate's `distributed_type`, and the option that says the same."""

_NOT_PREDICTED = {
    "use_megatron_lm": "training with Megatron-LM",
    "use_parallelism_config": "tensor or context parallelism",
    "cpu": "training on a processor",
}


def _trl(program: Program) -> Launch:
    """`trl sft`, which runs `accelerate launch`; its configuration may be one that TRL has."""
    said = {**values_of_files(program.sources), **values_of_words(program.command)}
    options = {name: said[name].value for name in TRL_LAUNCHES if name in said}
    named = options.pop("accelerate_config", None)
    if named is not None:
        spec = importlib.util.find_spec("trl")
        folders = spec.submodule_search_locations if spec else None
        shipped = Path(folders[0] if folders else "", "accelerate_configs", f"{named}.yaml")
        options["config_file"] = str(shipped if shipped.is_file() else named)
    return _accelerate(program, options)


def _accelerate(program: Program, options: dict[str, Any]) -> Launch:
    """`accelerate launch`: what its options say counts more than its configuration file."""
    launch = Launch(processes=None)
    options = _with_file(program, options, launch)
    if "num_processes" in options:
        name = "accelerate's num_processes"
        launch.processes = _whole(launch, name, str(options["num_processes"]))
    _machines(launch, "accelerate's num_machines", str(options.get("num_machines", 1)))
    if launch.processes is not None and launch.machines > 1:  # it counts those of all machines
        launch.processes = max(1, launch.processes // launch.machines)
    if options.get("mixed_precision") not in (None, "no"):
        launch.mixed_precision = str(options["mixed_precision"])
    if str(options.get("dynamo_backend", "no")).lower() != "no":
        text = f"compiles the model, which is not predicted: {EMULATE}"
        launch.problems.append(Problem(text, "accelerate's dynamo_backend"))
    for name, what in _NOT_PREDICTED.items():
        if is_true(options.get(name)):
            launch.problems.append(Problem(f"{what} is not predicted: {EMULATE}", f"{name}"))
    if is_true(options.get("use_deepspeed")):
        launch.knobs, problems = _deepspeed_of(program, options)
        launch.problems += problems
    if is_true(options.get("use_fsdp")):
        settings = {
            name.removeprefix("fsdp_"): value
            for name, value in options.items()
            if name.startswith("fsdp_")
        }
        defaults = {"version": 1, "auto_wrap_policy": "NO_WRAP", **settings}
        launch.knobs, problems = sharding(defaults, "accelerate's fsdp")
        launch.problems += problems
    return launch


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


def _deepspeed_of(
    program: Program, options: Mapping[str, Any]
) -> tuple[dict[str, KnobValue], list[Problem]]:
    """What accelerate tells DeepSpeed, by itself or with a file of its settings."""
    file = options.get("deepspeed_config_file")
    if file is not None:
        return zero_of_file(program.folder / str(file))
    settings = {"stage": int(str(options.get("zero_stage", 2)))}
    for name in ("offload_optimizer", "offload_param"):
        settings[f"{name}.device"] = options.get(f"{name}_device", "none")
    return zero_knobs(settings, "accelerate's deepspeed_config")


def _configured(program: Program, named: str | None, launch: Launch) -> dict[str, Any]:
    """The values of accelerate's configuration file by the options that they are defaults of.

    Without a name it is the one that `accelerate config` has written, if there is one.
    """
    if named is None:
        from accelerate.commands.config import default_config_file  # imports torch

        path = Path(default_config_file)
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
        match place.path if place.value is not None else ():
            case (str(name),):
                values[name] = place.value
            case ("fsdp_config", str(name)):
                values[f"fsdp_{name.removeprefix('fsdp_')}"] = place.value
            case ("deepspeed_config", str(name)):
                values[name] = place.value
            case ("dynamo_config", str(name)):
                values[f"dynamo_{name.removeprefix('dynamo_')}"] = place.value
            case ("parallelism_config", _):
                values["use_parallelism_config"] = True
    return values


_LEFT_ALONE = ("false", "none", "0", "")


def is_true(value: object) -> bool:
    """Whether a value of a command line or a YAML file is true."""
    return value is not None and str(value).lower() not in _LEFT_ALONE


def sharding(settings: Mapping[str, Any], where: str) -> tuple[dict[str, KnobValue], list[Problem]]:
    """Knobs of FSDP, from accelerate's settings without their "fsdp_"; and what they do not say.

    The same settings are in `fsdp_config` of TrainingArguments, with other defaults.
    """
    problems = []
    refused = {
        "offload_params": "offload of weights",
        "cpu_offload": "offload of weights",
        "activation_checkpointing_offload": "offload of activations",
        "ignored_modules": "sharding without some modules",
        "xla": "training on XLA",
    }
    for name, what in refused.items():
        if is_true(settings.get(name)):
            problems.append(Problem(f"{what} is not predicted: {EMULATE}", f"{where} {name}"))
    if str(settings.get("version", 2)) != "2":
        text = f"is {settings['version']}, and FSDP1 is not predicted: set it to 2; or {EMULATE}"
        problems.append(Problem(text, f"{where} version"))
    policy = str(settings.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    if policy != "TRANSFORMER_BASED_WRAP":
        text = f"is {policy}, and is predicted as TRANSFORMER_BASED_WRAP: {EMULATE}"
        problems.append(Problem(text, f"{where} auto_wrap_policy"))
    knobs: dict[str, KnobValue] = {DISTRIBUTED: "fsdp2"}
    if not is_true(settings.get("reshard_after_forward", True)):
        knobs[RESHARD] = False
    if is_true(settings.get("activation_checkpointing")):
        # `checkpoint_wrapper` around each layer, without reentrance.
        knobs |= {"gradient_checkpointing": True, "use_reentrant": False}
    return knobs, problems


def _whole(launch: Launch, where: str, text: str) -> int | None:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    launch.problems.append(Problem(f"is {text!r}, and a number of processes is wanted", where))
    return None


def _machines(launch: Launch, where: str, text: str) -> None:
    if text not in ("1", "-1"):
        launch.machines = _whole(launch, where, text) or 1


def ranks_and_knobs(launch: Launch, own: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """Knobs of the ranks: those of the launcher, and of the program's `own` where it says more.

    Empty on one GPU. FSDP or ZeRO in one process shares nothing, and is a problem.
    """
    ranks = launch.on(gpus)
    said = {name: own[name] for name in (DISTRIBUTED, RESHARD, REDUCE_BUCKET) if name in own}
    knobs = {**launch.knobs, **said}
    both = own.get("gradient_checkpointing") and knobs.get("gradient_checkpointing")
    if both:
        text = "and the trainer's own checkpointing are both true, which the trainer refuses"
        launch.problems.append(Problem(text, "accelerate's fsdp activation_checkpointing"))
    if ranks > 1:
        several = {MACHINES: launch.machines} if launch.machines > 1 else {}
        strategy = knobs.get(DISTRIBUTED, "ddp")
        return {**knobs, **several, GPUS_PER_TRIAL: ranks, DISTRIBUTED: strategy}
    if DISTRIBUTED in knobs:
        text = "is of one process: start it with torchrun or accelerate launch"
        launch.problems.append(Problem(text, str(knobs[DISTRIBUTED])))
    return {}
