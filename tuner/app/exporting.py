"""The recommended configuration as the settings of another tool."""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner.app.target import Target
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.schemas import ALL_LINEAR
from tuner.core.units import format_gib
from tuner.program.changes import change
from tuner.program.edit.assign import assignments
from tuner.program.export import Exported, ExportInput, export
from tuner.program.program import read_program
from tuner.program.setting import NAMES
from tuner.program.settings import find_settings
from tuner.searches.best import BestTrial
from tuner.space.command import Command, placeholders
from tuner.space.models.catalogue import get_entry, resolve_config


def export_recommended(
    target: Target,
    best: BestTrial,
    name: str,
    *,
    targets: tuple[str, ...] = (),
    maps: tuple[str, ...] = (),
) -> Exported:
    """The settings of the tool `name`. Raises `InputError` for one that cannot train this.

    `targets` and `maps` name the flags of a command line, as `--as` and `--map` do.
    """
    entry = get_entry(target.space.model) if target.space.model else None
    flags: dict[str, KnobValue] = {}
    command, own_command = target.space.command, ""
    if command is not None and not targets and not maps:
        own_command, unflagged = _own_command(command, best.configuration)
    else:
        flags, unflagged = _flags(target, best, targets=targets, maps=maps)
    subject = ExportInput(
        configuration=_with_names(target, best.configuration),
        workload=target.space.workload,
        model=(entry.hub_id if entry and entry.hub_id else target.space.model),
        title=f"{target.space.name} on {target.gpu.name}: trial {best.record.trial_id}, "
        f"{format_gib(best.evidence.memory.device_bytes)} ({best.source})",
        flags=flags,
        unflagged=unflagged,
        own_command=own_command,
    )
    return export(name, subject)


def _with_names(target: Target, values: Configuration) -> Configuration:
    """The configuration, with names in place of all-linear for models outside the catalogue."""
    model = target.space.model
    if (
        target.space.workload != "causal_lm"
        or values.get("lora_targets") != ALL_LINEAR
        or not values.get("lora_rank")
        or not model
        or get_entry(model) is not None
    ):
        return values
    from tuner.predict.training.quantized import adaptable_names

    names = adaptable_names(resolve_config(model))
    return Configuration({**values, "lora_targets": names}) if names else values


def _own_command(command: Command, values: Configuration) -> tuple[str, dict[str, str]]:
    if not command.is_program:
        told = command.environment(values)
        environment = [f"{n}={shlex.quote(told[n])}" for n in command.env]
        line = " ".join([*environment, shlex.join(command.arguments(values))])
        said = {n for text in (*command.argv, *command.env.values()) for n in placeholders(text)}
        return line, {n: "the command has no place for it" for n in values if n not in said}
    program = read_program(command.argv, Path(command.cwd))
    settings = find_settings(program)
    wanted = {n: v for n, v in values.items() if n in NAMES}
    after = change(program, settings, wanted).after
    unsaid = {
        n: f"it stands in {settings[n].where}: `tuner apply` writes it"
        if n in settings
        else "the program does not set it"
        for n in values
        if n not in settings or settings[n].word is None
    }
    return shlex.join(after.command), unsaid


def _flags(
    target: Target, best: BestTrial, *, targets: tuple[str, ...], maps: tuple[str, ...]
) -> tuple[dict[str, KnobValue], dict[str, str]]:
    space, values = target.space, best.configuration
    named = assignments(space, values, targets=targets, maps=maps)
    named = [a for a in named if targets or a.required]
    flags = {str(a.key.steps[-1]): a.value for a in named}
    spoken = {name for a in named for name in space.condition(a.expression).names}
    if targets:
        why = "--as names no flag for it"
        return flags, {n: why for n in values if n not in spoken}
    # Without names of its own a flag is called as the knob; defaults of the vocabulary are none.
    left_out = {text.rpartition("=")[0].strip() for text in maps if text.endswith("=")}
    own = [n for n in values if n not in space.defaulted and n not in {*spoken, *left_out}]
    flags = {**{n: values[n] for n in own}, **flags}
    silent = {n: "a default of the workload" for n in values if n in space.defaulted}
    return flags, {**silent, **{n: "--map leaves it out" for n in values if n in left_out}}
