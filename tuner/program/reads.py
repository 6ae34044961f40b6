"""The files that a program reads by itself: modules beside it, and settings that it opens.

Nothing is run. A file counts if the code names it and it exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.program.edit.python_file import PythonText
from tuner.program.edit.source import NOTEBOOK, READERS, SourceFile, read_places
from tuner.space.apply import Path as Keys

SETTINGS_FILES = tuple(suffix for suffix in READERS if suffix not in (".py", NOTEBOOK))

MOST_BYTES_OF_SETTINGS = 1024 * 1024
"""The largest settings file; larger ones hold data."""

_MOST_FILES = 200
"""Modules and settings of one program; more are a library."""

_DEEPEST = 3
"""Folders that code may name below each other on the way to a file."""

_GLOBAL = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
"""The place of a file's values in Hydra, if not below the name of its group."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that a program reads; its values stand `below` these keys of the whole."""

    source: SourceFile
    below: Keys = ()


def read_by(main: SourceFile, roots: Sequence[Path], words: Sequence[str]) -> dict[Path, ReadFile]:
    """The files that the script `main` and its modules read, by absolute path.

    Modules lie below `roots`, settings also below the current folder, the last of them; Hydra's
    choices come from `words`.
    """
    found: dict[Path, ReadFile] = {}
    waiting = [main]
    done = {main.path.resolve()}
    while waiting:
        script = waiting.pop(0)
        tree = PythonText(script.python.text).tree
        for path in modules_of(tree, script.path, roots):
            if path in done or len(found) >= _MOST_FILES:
                continue
            done.add(path)
            source = opened(path)
            if source is not None:
                found[path] = ReadFile(source)
                waiting.append(source)
        for path, below in (
            *_of_hydra(tree, script.path.resolve().parent, words),
            *((path, ()) for path in _named(tree, (script.path.parent, *roots))),
        ):
            if path not in done and len(found) < _MOST_FILES:
                done.add(path)
                source = opened(path)
                if source is not None:
                    found[path] = ReadFile(source, below)
    return found


def opened(path: Path) -> SourceFile | None:
    """The file at `path`; None for what holds no settings: a folder, data, broken text."""
    try:
        data = read_file(path, MOST_BYTES_OF_SETTINGS)
        return SourceFile(path, data, read_places(data, path))
    except (OSError, ValueError, InputError):
        return None


# -- modules -----------------------------------------------------------------------------------


def module_path(name: str, level: int, importer: Path, roots: Sequence[Path]) -> Path | None:
    """The file of a module below `roots`, or of a relative one with `level` dots; None if none."""
    bases = [importer.resolve().parents[level - 1]] if level else list(roots)
    parts = name.split(".") if name else []
    for base in bases:
        place = base.joinpath(*parts)
        for path in (place.with_suffix(".py") if parts else place, place / "__init__.py"):
            if path.suffix == ".py" and path.is_file():
                return path.resolve()
    return None


def modules_of(tree: ast.Module, importer: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """The files of the modules below `roots` that the code of `importer` imports."""
    for node in ast.walk(tree):
        names: list[tuple[str, int]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            below = f"{module}." if module else ""
            names = [(module, node.level), *((below + a.name, node.level) for a in node.names)]
        for name, level in names:
            path = module_path(name, level, importer, roots)
            if path is not None:
                yield path


# -- settings ----------------------------------------------------------------------------------


def _named(tree: ast.Module, folders: Sequence[Path]) -> Iterator[Path]:
    """The files of settings that strings of the code name, in folders that strings name."""
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_name(node.value)
    }
    names = sorted(text for text in texts if Path(text).suffix in SETTINGS_FILES)
    if not names:
        return
    reached = list(dict.fromkeys(folder.resolve() for folder in folders))
    layer = reached
    for _ in range(_DEEPEST):
        layer = [
            path
            for base in layer
            for text in sorted(texts - {"."})
            if (path := base / text).is_dir() and path not in reached
        ][:_MOST_FILES]
        reached += layer
    for name in names:
        place = next((base / name for base in reached if (base / name).is_file()), None)
        if place is not None:
            yield place.resolve()


def _is_name(text: str) -> bool:
    return 0 < len(text) < 200 and "\n" not in text and "\0" not in text


# -- Hydra -------------------------------------------------------------------------------------


def _of_hydra(tree: ast.Module, folder: Path, words: Sequence[str]) -> Iterator[tuple[Path, Keys]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("hydra.main", "main")):
            continue
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        place = _option(words, "--config-path", "-cp") or given.get("config_path")
        name = _option(words, "--config-name", "-cn") or given.get("config_name")
        if isinstance(place, str) and isinstance(name, str):
            chosen = dict(word.lstrip("+").partition("=")[::2] for word in words if "=" in word)
            yield from _composed((folder / place).resolve(), name, (), (), chosen)


def _option(words: Sequence[str], *names: str) -> str | None:
    for number, word in enumerate(words):
        head, equals, value = word.partition("=")
        if head in names:
            return value if equals else next(iter(words[number + 1 :]), None)
    return None


def _composed(
    folder: Path,
    name: str,
    group: Keys,
    below: Keys,
    chosen: Mapping[str, str],
    left: int = _DEEPEST,
) -> Iterator[tuple[Path, Keys]]:
    path = folder.joinpath(*map(str, group), f"{name}.yaml")
    if left == 0 or not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    package = _GLOBAL.search(text)
    yield path, below if package is None or package[1] == "_group_" else _package(package[1])
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError, LookupError, TypeError):
        return  # it is told where the file is read
    for entry in (content.get("defaults") or ()) if isinstance(content, dict) else ():
        # "group@package: option", or in one word "group/option@package"
        given, option = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
        words = str(given).split()
        if not words or words[0] == "override" or words[-1] == "_self_":
            continue
        own, _, put = words[-1].partition("@")
        steps = [*map(str, group), *(step for step in own.split("/") if step)]
        if not isinstance(entry, dict):
            option = steps.pop()
        option = chosen.get("/".join(steps), option)
        if isinstance(option, str):
            keys = (*below, *_package(put)) if put else tuple(steps)
            yield from _composed(folder, option, tuple(steps), keys, chosen, left - 1)


def _package(text: str) -> Keys:
    return () if text == "_global_" else tuple(text.split("."))
