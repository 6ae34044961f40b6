"""The recommended configuration as the settings of another tool."""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner.app.applying import value_of
from tuner.app.target import Target
from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.records import Configuration
from tuner.core.setup.schemas import ALL_LINEAR
from tuner.core.units import format_gib
from tuner.program.changes import change
from tuner.program.export import Exported, command_line, export
from tuner.program.program import read_program
from tuner.program.settings import settings_of
from tuner.searches.best import BestTrial
from tuner.space import SearchSpace
from tuner.space.apply import read_key
from tuner.space.command import Command, placeholders
from tuner.space.models.catalogue import get_entry, resolve_config


def export_recommended(target: Target, best: BestTrial, name: str) -> Exported:
    """The settings of the tool `name`. Raises `InputError` for one that cannot train this."""
    space, values = target.space, best.configuration
    entry = get_entry(space.model) if space.model else None
    says = _flags(space, values) if space.command is None else _own_command(space.command, values)
    trial, memory = best.record.trial_id, format_gib(best.evidence.memory.device_bytes)
    return export(
        name,
        _with_names(target, values),
        space.workload,
        entry.hub_id if entry and entry.hub_id else space.model,
        f"{space.name} on {target.gpu.name}: trial {trial}, {memory} ({best.source})",
        says,
    )


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
    settings = settings_of(program)
    wanted = {n: v for n, v in values.items() if n in PROGRAM_NAMES}
    after = change(settings, wanted).after
    unsaid = {
        n: f"it stands in {settings[n].where}: `tuner apply` writes it"
        if n in settings
        else "the program does not set it"
        for n in values
        if n not in settings or not settings[n].is_word
    }
    return shlex.join(after.command), unsaid


def _flags(space: SearchSpace, values: Configuration) -> tuple[str, dict[str, str]]:
    """The options of a script: those of the space's table for scripts, else called as the knobs."""
    table = next((t.keys for t in space.apply.values() if t.is_of_script), None)
    if table is None:
        flags = {name: value for name, value in values.items() if name not in space.defaulted}
        unsaid = {n: "a default of the workload" for n in values if n in space.defaulted}
        return command_line(flags), unsaid
    flags = {str(read_key(key).steps[-1]): value_of(space, e, values) for key, e in table.items()}
    spoken = {name for e in table.values() for name in space.condition(e).names}
    unsaid = {n: "the space names no option for it" for n in values if n not in spoken}
    return command_line(flags), unsaid
