"""`%tuner` in a notebook: the command line, and the check of the notebook that one is in.

Commands run in a process of their own: libraries that the notebook has patched, and the GPU that it
uses, have no part in the answer.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.shell_completion import ShellComplete, split_arg_string

from tuner.app.cli.main import cli, load
from tuner.core.environment import own_python
from tuner.core.errors import InputError
from tuner.core.files import scratch_folder
from tuner.program.edit.notebook import cell_texts, notebook_python
from tuner.program.edit.source import NOTEBOOK

_COLAB_ANSWERS_WITHIN_S = 10


def add_magic(shell: Any) -> None:
    """Add `%tuner` and its completion to an `InteractiveShell`."""
    runs = _Runs(shell)

    def tuner(line: str) -> None:
        """Run a command of tuner: `%tuner check --gpu t4`; see `%tuner --help`.

        `%tuner check` without a program predicts this notebook.
        """
        words = shlex.split(line)
        if words[:1] != ["check"] or {"-h", "--help"} & set(words) or _names_a_program(words[1:]):
            _run(shell, words)
            return
        with scratch_folder() as folder:
            path, read = _notebook(runs, folder)
            print(f"read    {read}")  # a notebook shows what is printed
            _run(shell, [*words, *([] if "--predict" in words else ["--predict"]), str(path)])

    shell.events.register("pre_run_cell", runs.before)
    shell.register_magic_function(tuner, "line", "tuner")
    shell.set_hook("complete_command", _completions, str_key="%tuner")


def _run(shell: Any, words: list[str]) -> None:
    shell.system(shlex.join(own_python("tuner", *words)))


def _names_a_program(words: list[str]) -> bool:
    context = load("check").make_context("check", list(words), resilient_parsing=True)
    return bool(context.params.get("program"))


def _completions(_: Any, event: Any) -> list[str]:
    line = event.text_until_cursor
    words = split_arg_string(line)[1:]
    typed = "" if line[-1:].isspace() or not words else words.pop()
    found = ShellComplete(cli, {}, "tuner", "").get_completions(words, typed)
    return [item.value for item in found if item.type == "plain"]


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a cell. `cell` is its id; None before the extension was loaded, or without ids."""

    source: str
    cell: str | None
    at_s: float


class _Runs:
    """The cells that were run."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._loaded_s = time.time()
        self._started: list[tuple[str | None, float]] = []

    def before(self, info: Any) -> None:
        """Note the start of a cell; IPython calls it."""
        if info.store_history:
            self._started.append((getattr(info, "cell_id", None), time.time()))

    @property
    def cells(self) -> dict[int, _Run]:
        """The cells with Python, by execution count; of one that ran again, the last run.

        The same cell has the same id or the same text.
        """
        sources = list(self.shell.history_manager.input_hist_raw)
        unknown = [(None, self._loaded_s)] * len(sources)
        started = [*unknown, *self._started][-len(sources) :]
        runs = [_Run(source, *each) for source, each in zip(sources, started, strict=True)]
        latest: dict[str, int] = {}
        for number, run in enumerate(runs):
            latest[run.cell or run.source] = number
        texts = {runs[number].source: number for number in sorted(latest.values())}
        return {number: runs[number] for source, number in texts.items() if _is_python(source)}


def _is_python(source: str) -> bool:
    """True for a cell with a statement; not for one that is broken, which never ran."""
    try:
        body = ast.parse(notebook_python(_as_notebook([source]), "cell").text).body
    except (SyntaxError, InputError):
        return False
    return not all(isinstance(each, ast.Pass) for each in body)


def _as_notebook(sources: Iterable[str]) -> str:
    cells = [{"cell_type": "code", "source": source} for source in sources]
    return json.dumps({"cells": cells, "nbformat": 4})


def _notebook(runs: _Runs, folder: Path) -> tuple[Path, str]:
    """The notebook to check, and for people: where it is from.

    It is the one that is open in Colab, or the saved one if no other cell was run since. Else the
    cells that were run are written to `folder`.
    """
    counted = "cells are counted from the top, text cells too"
    path = folder / f"notebook{NOTEBOOK}"
    if opened := _open_in_colab():
        path.write_text(json.dumps(opened), encoding="utf-8")
        return path, f"the open notebook; {counted}"
    saved, why = _saved(runs.shell), ""
    if saved is not None:
        at_s = saved.stat().st_mtime
        when = time.strftime("%H:%M:%S", time.localtime(at_s))
        known = [text.strip() for text in cell_texts(saved.read_text("utf-8"))]
        others = (run.at_s for run in runs.cells.values() if run.source.strip() not in known)
        if max(others, default=0.0) <= at_s:
            return saved, f"{saved.name}, as saved at {when}; {counted}"
        why = f"; save {saved.name} to have all cells read: some ran since {when}"
    cells = runs.cells
    numbers = range(1, max(cells, default=0) + 1)
    sources = (cells[number].source if number in cells else "" for number in numbers)
    path.write_text(_as_notebook(sources), encoding="utf-8")
    number = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
    return path, f"{number} of Python that ran so far, by the number in brackets{why}"


def _saved(shell: Any) -> Path | None:
    """The file of the notebook, as VS Code and Jupyter's server name it."""
    names = (shell.user_ns.get("__vsc_ipynb_file__"), os.environ.get("JPY_SESSION_NAME"))
    paths = (Path(name) for name in names if isinstance(name, str) and name.endswith(NOTEBOOK))
    return next((path for path in paths if path.is_file()), None)


def _open_in_colab() -> Mapping[str, Any] | None:
    """The notebook as Colab's page has it; None elsewhere, and if the page doesn't answer."""
    if "google.colab" not in sys.modules:
        return None
    try:
        page = importlib.import_module("google.colab._message")
        asked = page.blocking_request("get_ipynb", timeout_sec=_COLAB_ANSWERS_WITHIN_S)
        return dict(asked["ipynb"])
    except Exception:  # noqa: BLE001 - not a public interface: the cells that were run are read
        return None
