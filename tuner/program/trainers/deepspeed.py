"""DeepSpeed: its launcher, and its settings, which transformers' Trainer and accelerate read.

Read from transformers 5.23 (integrations/deepspeed.py), accelerate 1.15 (`DeepSpeedPlugin`) and
DeepSpeed 0.19 (launcher/runner.py, runtime/zero/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem
from tuner.core.records import KnobValue
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    REDUCE_BUCKET,
    REDUCE_BUCKET_ELEMENTS,
    ZERO_STAGES,
)
from tuner.program.arguments import EMULATE, TABLES, WITHOUT_MEMORY, options_of, values_of_files
from tuner.program.edit.source import opened
from tuner.program.trainer import Format, Launch, Trainer
from tuner.program.writing import Settings, SettingsReader

AUTO = "auto"
"""In place of a number: Trainer fills it in."""

ZERO = "zero_optimization"
_STRATEGIES = {stage: name for name, stage in ZERO_STAGES.items()}
_FILLED = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Numbers that Trainer fills in from the hidden size, below DeepSpeed's own."""


def zero_of(
    config: Mapping[str, Any] | Path, at_most: list[str] | None = None
) -> tuple[dict[str, KnobValue], list[Problem]]:
    """Parameters of DeepSpeed's settings, by names such as "bf16.enabled" or of a file; problems.

    `reduce_bucket_size` may be `AUTO`. Settings that only save memory go into `at_most`, if given.
    """
    if isinstance(config, Path):
        path, source = str(config), opened(config)
        if source is None:
            return {}, [Problem("cannot be read: expected DeepSpeed's settings in JSON", path)]
        said = {name: found.value for name, found in values_of_files([source]).items()}
    else:
        path, said = "deepspeed", dict(config)
    problems = []
    if "optimizer.type" in said and said.get("optimizer.params.torch_adam") is not True:
        text = f"is DeepSpeed's own optimizer, which is not predicted: {EMULATE}"
        problems.append(Problem(text, f"{path} optimizer"))
    if said.get("bf16.enabled") not in (True, AUTO):
        text = f"is not enabled, and other types are not predicted under DeepSpeed: {EMULATE}"
        problems.append(Problem(text, f"{path} bf16"))
    settings = {
        key: value
        for name, value in said.items()
        if (key := name.removeprefix(f"{ZERO}.")) != name and not (value == AUTO and key in _FILLED)
    }
    if at_most is not None:
        saving = {n: what for n, what in TABLES["zero_saves"].items() if _saves(settings, n)}
        at_most += [
            f"{path} {ZERO}.{name}: {what} isn't modelled, and only saves memory"
            for name, what in saving.items()
        ]
        settings = {n: v for n, v in settings.items() if n.partition(".")[0] not in saving}
    knobs, more = zero_knobs(settings, f"{path} {ZERO}")
    return knobs, [*problems, *more]


def _saves(settings: Mapping[str, Any], name: str) -> bool:
    if name in _HOST:
        return not _is_off(settings, name)
    if name == "overlap_comm":
        return settings.get(name) is False and settings.get("stage") == ZERO_STAGES["zero3"]
    return settings.get(name) == 0


def zero_knobs(
    settings: Mapping[str, Any], where: str
) -> tuple[dict[str, KnobValue], list[Problem]]:
    """Knobs of `zero_optimization`; and what of it is not predicted."""
    stage = settings.get("stage", 0)
    if stage not in _STRATEGIES:
        text = f"is {stage}, and {', '.join(map(str, _STRATEGIES))} are predicted: {EMULATE}"
        return {}, [Problem(text, f"{where}.stage")]
    problems = []
    defaults = {**TABLES["zero"], "overlap_comm": stage == ZERO_STAGES["zero3"]}
    bucket = settings.get(REDUCE_BUCKET, REDUCE_BUCKET_ELEMENTS)
    has_two = settings.get("overlap_comm") is True and not defaults["overlap_comm"]
    if has_two and bucket != AUTO:
        # One bucket fills while the other is sent (`ipg_buffer` of stage_1_and_2.py).
        settings = {**settings, REDUCE_BUCKET: 2 * int(float(bucket))}
        defaults["overlap_comm"] = True
    for name, value in settings.items():
        if name in ("stage", REDUCE_BUCKET, *WITHOUT_MEMORY["DeepSpeed"]) or _is_off(
            settings, name
        ):
            continue
        if value != defaults.get(name, value if name.endswith(".pin_memory") else None):
            known = f"predicted is {defaults[name]}" if name in defaults else "not predicted"
            problems.append(Problem(f"is {value}; {known}: {EMULATE}", f"{where}.{name}"))
    knobs: dict[str, KnobValue] = {DISTRIBUTED: _STRATEGIES[stage]}
    if REDUCE_BUCKET in settings:
        size = settings[REDUCE_BUCKET]
        knobs[REDUCE_BUCKET] = AUTO if size == AUTO else int(float(size))
    return knobs, problems


_HOST = ("offload_optimizer", "offload_param")


def _is_off(settings: Mapping[str, Any], name: str) -> bool:
    """True for settings of what would be on the host: those of `offload_optimizer.device: none`."""
    outer = name.partition(".")[0]
    return outer in _HOST and str(settings.get(f"{outer}.device", "none")).lower() == "none"


def launch(words: Sequence[str]) -> Launch:
    """Reads the words behind `deepspeed`."""
    options = options_of(words)
    found = Launch(processes=None)
    if "num_gpus" in options:
        found.processes = found.whole("deepspeed --num_gpus", str(options["num_gpus"]))
    elif "include" in options:
        hosts = str(options["include"]).split("@")
        found.processes = len([n for n in hosts[0].partition(":")[2].split(",") if n]) or None
        found.set_machines("deepspeed --include", str(len(hosts)))
    found.set_machines("deepspeed --num_nodes", str(options.get("num_nodes", 1)))
    return found


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    del model  # named by the script that is launched
    return {
        **chosen.under("train_batch_size train_micro_batch_size_per_gpu"),
        **chosen.under("gradient_accumulation_steps gradient_clipping"),
        **{name: {"enabled": value} for name, value in chosen.under("bf16 fp16").items()},
        ZERO: chosen.zero or {"stage": 0},
    }


TRAINER = Trainer(
    "DeepSpeed",
    format=Format(
        "deepspeed", _settings, "deepspeed train.py --deepspeed_config FILE", ".json", ()
    ),
)
