"""A command of the user's own that trains: how it is written in a space, and filled in."""

from __future__ import annotations

import hashlib
import json
import shlex
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from yaml.nodes import SequenceNode

from tuner.core.errors import InputError
from tuner.core.expressions import compile_expression, show
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.space.document import Entry, Place, Problems, suggestion, text_of

COMMAND = "command"
"""The workload of a space that has a command."""

PROGRAM = "program"
"""The key of a space whose command is a program with settings of its own."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, in which "{micro_batch}" stands for the value of a knob.

    - `cwd` is the absolute path of the folder that it runs in.
    - `env` is set beside the environment that the search itself has; values may have
      placeholders too.
    - `samples_per_step` is an expression over the names of the configuration: how many samples a
      step of its progress bar trains. None where it says so itself.
    - `progress` is what the line of the right progress bar begins with, where it has several.
    - With `is_program` the words name a program as `tuner check` takes it, without placeholders:
      the values of knobs are written into copies of its own settings.
    """

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    samples_per_step: str | None = None
    progress: str | None = None
    is_program: bool = False

    def arguments(self, configuration: Mapping[str, KnobValue]) -> list[str]:
        """Program and arguments with the values of `configuration`.

        An argument that is nothing but a placeholder is left out where the value is empty.
        """
        filled = [(text, fill(text, configuration)) for text in self.argv]
        return [value for text, value in filled if value or not text]

    def line(self, configuration: Mapping[str, KnobValue]) -> str:
        """The command for `configuration`, in one line for a shell."""
        return str(self) if self.is_program else shlex.join(self.arguments(configuration))

    def environment(self, configuration: Configuration) -> dict[str, str]:
        """The variables of the command: `env`, and the configuration as JSON (TUNER_CONFIG)."""
        own = {name: fill(text, configuration) for name, text in self.env.items()}
        return {"TUNER_CONFIG": json.dumps(configuration.to_dict()), **own}

    def samples(self, configuration: Mapping[str, KnobValue]) -> float | None:
        """Samples of one step; None where the space does not say.

        Raises `InputError` where the expression is not a number above 0.
        """
        if self.samples_per_step is None:
            return None
        expression = compile_expression(self.samples_per_step, configuration.keys())
        value = expression.evaluate(dict(configuration))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(
                f"samples_per_step {self.samples_per_step!r} is {show(value)}, and must be a "
                "number above 0"
            )
        return float(value)

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that change with the command and with the files that it names.

        Files that those import are not looked at.
        """
        told = [list(self.argv), self.cwd, sorted(self.env.items()), self.samples_per_step]
        sha = hashlib.sha256(json.dumps(told).encode())
        for word in self.argv:
            path = Path(self.cwd, word)
            if word and (self.is_program or "{" not in word) and _is_file(path):
                sha.update(path.read_bytes())
        return sha.hexdigest()[:12]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name: an argument that is no path
        return False


def placeholders(text: str) -> Iterator[str]:
    """The names in braces. Raises `InputError` for braces that are no placeholder."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise InputError(
            f"{text[:60]!r} has braces that are not a placeholder: {error}", hint=_BRACES
        ) from error
    for _, name, style, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or style or conversion:
            raise InputError(f"{text[:60]!r} has braces that are not a placeholder", hint=_BRACES)
        yield name


_BRACES = "write {micro_batch} for the value of a knob, and {{ }} for braces themselves"


def check_placeholders(text: str, names: frozenset[str]) -> None:
    """Raise `InputError` for a placeholder that is not one of `names`."""
    for name in placeholders(text):
        if name not in names:
            text = f"{{{name}}} is no knob, fixed or derived value of this space"
            raise InputError(text, hint=suggestion(name, names))


def fill(text: str, values: Mapping[str, KnobValue]) -> str:
    """`text` with the values in place of their names: true, 0.0002, q_proj,v_proj."""
    shown = {
        name: ",".join(value) if isinstance(value, tuple) else show(value)
        for name, value in values.items()
    }
    return text.format_map(shown)


def split(text: str) -> tuple[str, ...]:
    """The words of a command in one line, quoted as in a shell. Raises `InputError`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(f"the command cannot be split into words: {error}") from error


_BESIDE = ("cwd", "env", "samples_per_step", "progress")


def read_command(
    entries: Mapping[str, Entry], names: frozenset[str], problems: Problems, path: Path | None
) -> Command | None:
    """The command of the space, None where it has none. `names` may be in its placeholders.

    Relative folders start from the folder of the file. An expression is checked with the others.
    """
    kind = PROGRAM if PROGRAM in entries else COMMAND
    if kind not in entries:
        for name in _BESIDE:
            if name in entries:
                entries[name].key.add(f"{name} is for a command, and there is none")
        return None
    if kind == PROGRAM and COMMAND in entries:
        replace(entries[COMMAND].key, at=COMMAND).add("there is also a program", hint="keep one")
    # The settings of a program take the values: braces among its words mean nothing.
    argv = _argv(entries[kind], names if kind == COMMAND else None)
    folder = path.parent if path is not None else Path()
    texts = {name: text_of(entries.get(name)) for name in _BESIDE if name != "env"}
    cwd = _folder(folder, texts["cwd"] or ".")
    if cwd is None:
        problems.place("cwd").add(f"there is no folder {(texts['cwd'] or '.')[:200]!r}")
    return Command(
        argv,
        str(cwd or folder),
        env=_environment(entries.get("env"), names),
        samples_per_step=texts["samples_per_step"] or (_batch(names) if kind == PROGRAM else None),
        progress=texts["progress"],
        is_program=kind == PROGRAM,
    )


def _batch(names: frozenset[str]) -> str | None:
    """The samples of an optimizer step, by the names that they have in programs."""
    factors = ("micro_batch", "grad_accum", GPUS_PER_TRIAL)
    return " * ".join(name for name in factors if name in names) or None


def _folder(base: Path, text: str) -> Path | None:
    """The folder that `text` names, from `base` on; None where there is none."""
    try:
        path = (base / Path(text).expanduser()).resolve()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown ~user, a null byte
        return None


def _argv(entry: Entry, names: frozenset[str] | None) -> tuple[str, ...]:
    """The words; `names` may be placeholders in them, and None means that there are none."""
    found: list[tuple[Place, str]] = []
    if isinstance(entry.node, SequenceNode):
        words = [(item, item.scalar()) for item in entry.sequence() or []]
        found = [(item, text) for item, text in words if text is not None]
    else:
        line = entry.scalar()
        try:
            found = [(entry, word) for word in split(line or "")]
        except InputError as error:
            entry.add_error(error)
            return ()
    if not found:
        entry.add(f"the {entry.at} is empty")
    for item, text in found if names is not None else ():
        with item.noting():
            check_placeholders(text, names or frozenset())
    return tuple(text for _, text in found)


def _environment(entry: Entry | None, names: frozenset[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in entry.mapping().values() if entry else ():
        text = item.scalar()
        if text is not None:
            with item.noting():
                check_placeholders(text, names)
            values[item.name] = text
        if "=" in item.name or item.name.startswith("TUNER_"):
            item.key.add(f"{item.name!r} cannot be set")
    return values
