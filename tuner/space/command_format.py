"""The part of a space file that names a command of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from yaml.nodes import Node, SequenceNode

from tuner.core.errors import InputError
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.space.command import COMMAND, PROGRAM, Command, check_placeholders, split
from tuner.space.document import Entry, Problems, mapping, scalar, sequence

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
                problems.add(entries[name].key, f"{name} is for a command, and there is none")
        return None
    if kind == PROGRAM and COMMAND in entries:
        problems.add(entries[COMMAND].key, "there is also a program", at=COMMAND, hint="keep one")
    # The settings of a program take the values: braces among its words mean nothing.
    argv = _argv(entries[kind].value, names if kind == COMMAND else None, problems, kind)
    folder = path.parent if path is not None else Path()
    texts = {name: _text(entries.get(name), problems) for name in _BESIDE if name != "env"}
    cwd = _folder(folder, texts["cwd"] or ".")
    if cwd is None:
        text = f"there is no folder {(texts['cwd'] or '.')[:200]!r}"
        problems.add(entries["cwd"].value if "cwd" in entries else None, text, at="cwd")
    return Command(
        argv,
        str(cwd or folder),
        env=_environment(entries.get("env"), names, problems),
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
    except (OSError, RuntimeError, ValueError):  # too long a name, ~nobody, a null byte
        return None


def _text(entry: Entry | None, problems: Problems) -> str | None:
    return scalar(entry.value, problems, entry.at) if entry else None


def _argv(node: Node, names: frozenset[str] | None, problems: Problems, at: str) -> tuple[str, ...]:
    """The words; `names` may be placeholders in them, and None means that there are none."""
    if isinstance(node, SequenceNode):
        items = sequence(node, problems, at) or []
        words = [(item, scalar(item, problems, at)) for item in items]
        found = [(item, text) for item, text in words if text is not None]
    else:
        line = scalar(node, problems, at)
        try:
            found = [(node, word) for word in split(line or "")]
        except InputError as error:
            problems.add_error(node, error, at=at)
            return ()
    if not found:
        problems.add(node, f"the {at} is empty", at=at)
    for item, text in found if names is not None else ():
        _check(item, text, names or frozenset(), problems, at)
    return tuple(text for _, text in found)


def _environment(entry: Entry | None, names: frozenset[str], problems: Problems) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in mapping(entry.value, problems, entry.at).values() if entry else ():
        text = scalar(item.value, problems, item.at)
        if text is not None:
            _check(item.value, text, names, problems, item.at)
            values[item.name] = text
        if "=" in item.name or item.name.startswith("TUNER_"):
            problems.add(item.key, f"{item.name!r} cannot be set", at=entry.at if entry else "")
    return values


def _check(node: Node, text: str, names: frozenset[str], problems: Problems, at: str) -> None:
    try:
        check_placeholders(text, names)
    except InputError as error:
        problems.add_error(node, error, at=at)
