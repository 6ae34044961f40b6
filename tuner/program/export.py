"""The recommended configuration as the settings of another tool."""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from tuner.core.errors import InputError, unknown
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue
from tuner.program.trainer import Format, trainers
from tuner.program.writing import SettingsReader, without_none

_COMMAND = Format(
    "command", lambda chosen, model: {}, "the arguments of a training script", ".txt", ()
)
_FOUND = (_COMMAND, *(trainer.format for trainer in trainers() if trainer.format is not None))

FORMATS: Mapping[str, Format] = {one.name: one for one in sorted(_FOUND, key=lambda f: f.name)}
"""The formats by name."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of a file, and what it does not say: "name = value: why"."""

    text: str
    left_out: tuple[str, ...]


def export(
    name: str,
    values: Configuration,
    workload: str,
    model: str | None,
    title: str,
    command: tuple[str, Mapping[str, str]] = ("", {}),
) -> Exported:
    """The settings of the tool `name`. Raises `InputError` for one that cannot train this.

    `command` is the line of format "command", with the names that it does not say and the reasons.
    """
    found = FORMATS.get(name)
    if found is None:
        raise unknown("format", name, FORMATS)
    if found.workloads and workload not in found.workloads:
        able = ", ".join(n for n, f in FORMATS.items() if not f.workloads)
        raise InputError(f"{name} does not train workload {workload!r}", hint=f"allowed: {able}")
    chosen = SettingsReader(values)
    settings = without_none(found.build(chosen, model))
    if name == "command":
        body, unsaid = command[0] + "\n", {n: (values[n], why) for n, why in command[1].items()}
    else:
        unsaid = chosen.unsaid
        body = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)
        if found.suffix == ".json":
            body = json.dumps(settings, indent=2) + "\n"
        elif found.suffix == ".py":
            parts = [f"{n} = {pprint.pformat(v, sort_dicts=False)}\n" for n, v in settings.items()]
            body = "\n".join(parts)
    left_out = tuple(f"{n} = {show(value)}: {why}" for n, (value, why) in unsaid.items())
    use = found.use if isinstance(found.use, str) else found.use(settings)
    lines = [title, f"For: {use}", *(["Not representable here:"] if left_out else [])]
    lines += [f"  {line}" for line in left_out]
    if found.suffix in (".yaml", ".py"):  # others have no comments
        body = "".join(f"# {' '.join(line.split(chr(10)))}\n" for line in lines) + "\n" + body
    return Exported(body, left_out)


def command_line(flags: Mapping[str, KnobValue]) -> str:
    """`--name value` for each flag, quoted for a shell; a list as several words."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--{name}")
        words += list(value) if isinstance(value, tuple) else [show(value)]
    return shlex.join(words)
