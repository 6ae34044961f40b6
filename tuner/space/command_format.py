"""The part of a space file that names a command of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from yaml.nodes import Node, SequenceNode

from tuner.errors import InputError
from tuner.space.command import COMMAND, Command, check_placeholders, split
from tuner.space.document import Entry, Problems, mapping, scalar, sequence

_BESIDE = ("cwd", "env", "samples_per_step", "progress")


def read_command(
    entries: Mapping[str, Entry], names: frozenset[str], problems: Problems, path: Path | None
) -> Command | None:
    """The command of the space, None where it has none. `names` may be in its placeholders.

    Relative folders start from the folder of the file. An expression is checked with the others.
    """
    if COMMAND not in entries:
        for name in _BESIDE:
            if name in entries:
                problems.add(entries[name].key, f"{name} is about a command, and there is none")
        return None
    argv = _argv(entries[COMMAND].value, names, problems)
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
        samples_per_step=texts["samples_per_step"],
        progress=texts["progress"],
    )


def _folder(base: Path, text: str) -> Path | None:
    """The folder that `text` names, from `base` on; None where there is none."""
    try:
        path = (base / Path(text).expanduser()).resolve()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, ~nobody, a null byte
        return None


def _text(entry: Entry | None, problems: Problems) -> str | None:
    return scalar(entry.value, problems, entry.at) if entry else None


def _argv(node: Node, names: frozenset[str], problems: Problems) -> tuple[str, ...]:
    if isinstance(node, SequenceNode):
        items = sequence(node, problems, COMMAND) or []
        words = [(item, scalar(item, problems, COMMAND)) for item in items]
        found = [(item, text) for item, text in words if text is not None]
    else:
        line = scalar(node, problems, COMMAND)
        try:
            found = [(node, word) for word in split(line or "")]
        except InputError as error:
            problems.add_error(node, error, at=COMMAND)
            return ()
    if not found:
        problems.add(node, "the command is empty", at=COMMAND)
    for item, text in found:
        _check(item, text, names, problems, COMMAND)
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
