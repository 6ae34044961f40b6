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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.shell_completion import ShellComplete, split_arg_string

from tuner.app.cli.main import cli, load
from tuner.core.files import scratch_folder
from tuner.program.edit.notebook import cell_texts
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
    shell.system(shlex.join([sys.executable, "-m", "tuner", *words]))


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
class _Started:
    """The start of a cell. `cell` is its id, None where the notebook's page gives none."""

    cell: str | None
    at_s: float


class _Runs:
    """The cells that were run."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._loaded_s = time.time()
        self._started: dict[int, _Started] = {}

    def before(self, info: Any) -> None:
        """Note the start of a cell; IPython calls it."""
        if info.store_history:
            started = _Started(getattr(info, "cell_id", None), time.time())
            self._started[self.shell.execution_count] = started

    @property
    def cells(self) -> dict[int, str]:
        """The cells by execution count: of one that ran again, the last text; none that is broken.

        The same cell has the same id or the same text.
        """
        latest: dict[str, int] = {}
        sources = dict(enumerate(self.shell.history_manager.input_hist_raw))
        for number, source in sources.items():
            started = self._started.get(number)
            latest[source if started is None or started.cell is None else started.cell] = number
        found = {n: sources[n] for n in sorted(latest.values()) if self._is_python(sources[n])}
        texts = {source: number for number, source in found.items()}
        return {number: source for number, source in found.items() if texts[source] == number}

    def newest_s(self, known: list[str]) -> float:
        """When the last cell that is not `known` was started; 0 if all are."""
        return max(
            (
                self._started[number].at_s if number in self._started else self._loaded_s
                for number, source in self.cells.items()
                if source.strip() not in known
            ),
            default=0.0,
        )

    def _is_python(self, source: str) -> bool:
        try:
            code = ast.parse(self.shell.transform_cell(source))
        except SyntaxError:
            return False  # it never ran
        return not all(map(_is_magic, code.body))


def _is_magic(statement: ast.stmt) -> bool:
    """True for `get_ipython().system("...")`, as IPython writes what is no Python."""
    return isinstance(statement, ast.Expr) and "get_ipython()." in ast.unparse(statement)[:14]


def _notebook(runs: _Runs, folder: Path) -> tuple[Path, str]:
    """The notebook to check, and for people: where it is from.

    It is the one that is open in Colab, or the saved one if no other cell was run since. Else the
    cells that were run are written to `folder`.
    """
    counted = "cells are counted from the top, with those of text"
    path = folder / f"notebook{NOTEBOOK}"
    if opened := _open_in_colab():
        path.write_text(json.dumps(opened), encoding="utf-8")
        return path, f"the open notebook; {counted}"
    saved, why = _saved(runs.shell), ""
    if saved is not None:
        at_s = saved.stat().st_mtime
        when = time.strftime("%H:%M:%S", time.localtime(at_s))
        known = [text.strip() for text in cell_texts(saved.read_text("utf-8"))]
        if runs.newest_s(known) <= at_s:
            return saved, f"{saved.name}, as saved at {when}; {counted}"
        why = f"; {saved.name} was saved at {when}, before some of them ran"
    cells = runs.cells
    sources = [cells.get(number, "") for number in range(1, max(cells, default=0) + 1)]
    written = [{"cell_type": "code", "source": source} for source in sources]
    path.write_text(json.dumps({"cells": written, "nbformat": 4}), encoding="utf-8")
    return path, f"the {len(cells)} cells of Python run so far, by the number in brackets{why}"


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
