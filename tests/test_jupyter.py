"""tuner in Jupyter: the example notebook, `%tuner`, and the check of the notebook one is in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import same_output

pytest.importorskip("nbclient", reason="needs the extra `test`")

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from jupyter_example import EXAMPLE, executed
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from traitlets.config import Config

from tuner.core.environment import own_python

LOAD = "%load_ext tuner"
CHECK = "%tuner check --gpu rtx3060"


class Text(HTMLParser):
    """The text of HTML, its tags and what could ask for something or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.active = "", set(), []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.active += [name for name, _ in attrs if name not in ("style", "open")]
        self.text += "\n" * (tag in ("p", "span", "tr"))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(cell: Any) -> str:
    """What stands below a cell: streams (of a terminal, if a process wrote), and HTML or text."""
    text = ""
    for output in cell.outputs:
        data = output.get("data", {})
        text += output.get("text") or Text(data.get("text/html", data.get("text/plain"))).text
    return text.replace("\r\n", "\n")


# -- the example --------------------------------------------------------------------------------


def test_the_example_runs_from_its_install_to_a_better_script_and_shows_what_is_kept(
    tmp_path: Path,
) -> None:
    kept = nbformat.read(EXAMPLE, 4)
    # Installed already: its first cell installs nothing.
    ran = executed(nbformat.read(EXAMPLE, 4), tmp_path, TUNER="/nowhere")
    for was, now in zip(kept.cells, ran.cells, strict=True):
        if was.cell_type == "code":
            assert same_output(shown(was), shown(now), numbers=False), shown(now)
    checks = [shown(c) for c in ran.cells if c.cell_type == "code" and "check(" in c.source]
    assert [re.findall("\xa0(.*)\xa0", text) for text in checks] == [["does not fit"], ["fits"]]
    script = (tmp_path / "here" / "train.py").read_text()
    (backup,) = (tmp_path / "here").glob("train.py.*.bak")
    changed = [line for line in script.splitlines() if line not in backup.read_text()]
    assert [line.strip() for line in changed] == [
        "per_device_train_batch_size=8,",
        "gradient_accumulation_steps=4,",
    ]


# -- the notebook one is in ---------------------------------------------------------------------

# Stand-ins for the libraries, so that the cells can run here.
LIBRARIES = """\
import sys, types
for _name in ("torch", "transformers", "trl", "peft"):
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__getattr__ = lambda name: lambda *a, **k: types.SimpleNamespace()"""
SETTINGS = "# A card of\n# 24 GB\nBATCH = 32"
TRAINER = """\
!echo from the shell
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model="Qwen/Qwen3-4B",
    args=SFTConfig(
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        max_length=2048,
        bf16=True,
        model_init_kwargs={
            "dtype": torch.bfloat16,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        },
    ),
    train_dataset=[],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)"""


def test_the_cells_run_so_far_are_predicted_and_the_change_is_that_of_a_cell(
    tmp_path: Path,
) -> None:
    cells = [
        LOAD,
        f"%%capture\n!pip --version\n{LIBRARIES}",
        SETTINGS,
        TRAINER,
        "%tuner check --gpu t4",
        "_exit_code",
    ]
    book = new_notebook(cells=[new_code_cell(source) for source in cells])
    *_, answer, code = executed(book, tmp_path).cells
    lines = shown(answer).splitlines()
    assert lines[0] == "read    3 cells of Python that ran so far, by the number in brackets"
    assert lines[1].startswith("does not fit: ")
    assert lines[lines.index(" cell 3, line 3") + 1] == "-BATCH = 32"
    assert re.search(r"^\+BATCH = \d+$", shown(answer), re.MULTILINE)
    assert lines[lines.index(" cell 4, line 10") + 1] == "-gradient_accumulation_steps=1,"
    assert any(line.startswith("source  predicted;") for line in lines)
    assert "cell 4, line 12: bf16=True -> fp16=True" in " ".join(shown(answer).split())
    assert shown(code) == "1"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """IPython with `%tuner`, in an empty folder."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.HistoryManager.enabled = False
    config.IPCompleter.use_jedi = False
    made = InteractiveShell(config=config)
    run(made, LOAD)
    yield made
    made.restore_sys_module_state()


def run(shell: InteractiveShell, source: str, cell: str | None = None) -> None:
    """A cell as a notebook runs it."""
    done = shell.run_cell(source, store_history=True, cell_id=cell)
    assert done.error_in_exec is None


def test_a_module_beside_the_notebook_does_not_stand_for_a_library(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('not the library')")
    done = subprocess.run(
        own_python("tuner", "--version"), cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def asked(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a line of `%tuner`: the words of its command, and the notebook that they name."""

    def ask(line: str = CHECK) -> SimpleNamespace:
        found = SimpleNamespace(words=[], cells=None, path=None)

        def system(command: str) -> None:
            start = own_python("tuner")
            assert shlex.split(command)[: len(start)] == start
            found.words = shlex.split(command)[len(start) :]
            if found.words and found.words[-1].endswith(".ipynb"):
                found.path = Path(found.words.pop())
                cells = json.loads(found.path.read_text())["cells"]
                found.cells = ["".join(cell["source"]) for cell in cells]

        monkeypatch.setattr(shell, "system", system)
        run(shell, line)
        return found

    return ask


def test_a_cell_that_ran_again_counts_once_and_a_broken_one_not(
    shell: InteractiveShell, asked: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "batch = 8", "a")
    shell.run_cell("batch = = 4", store_history=True, cell_id="b")
    run(shell, "length = 512")
    run(shell, "batch = 4", "a")
    run(shell, "length = 512")
    run(shell, "!true")
    found = asked()
    assert found.words == ["check", "--gpu", "rtx3060", "--predict"]
    assert found.cells == ["", "", "", "", "batch = 4", "length = 512"]
    assert "2 cells of Python that ran so far, by the number" in capsys.readouterr().out
    assert not found.path.exists()


def saved(path: Path, *sources: str, at_s: float) -> None:
    cells = [new_markdown_cell("# Training"), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), path)
    os.utime(path, (at_s, at_s))


@pytest.mark.parametrize("of", ["vscode", "jupyter"])
def test_the_saved_notebook_is_read_if_nothing_else_ran_since(
    of: str,
    shell: InteractiveShell,
    asked: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.ipynb"
    if of == "vscode":
        shell.user_ns["__vsc_ipynb_file__"] = str(path)
    else:
        monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    saved(path, "batch = 4", "not_run = 1", at_s=1e9)
    run(shell, "batch = 4")
    assert asked().path == path
    out = capsys.readouterr().out
    assert "run.ipynb, as saved at " in out
    assert "counted from the top" in out
    run(shell, "batch = 8")
    assert asked().cells == ["", "batch = 4", "", "batch = 8"]
    assert "; save run.ipynb to have all cells read: some ran since " in capsys.readouterr().out
    saved(path, "batch = 9", at_s=2e10)  # a cell that is gone from the file ran before
    assert asked().path == path


def test_colab_is_asked_for_the_open_notebook(
    shell: InteractiveShell, asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(shell, "batch = 4")
    page = types.ModuleType("google.colab._message")
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, page.__name__, page)
    book = {"ipynb": {"cells": [{"cell_type": "code", "source": ["batch = 5"]}]}}
    page.blocking_request = lambda what, timeout_sec: {"get_ipynb": book}[what]
    assert asked().cells == ["batch = 5"]
    page.blocking_request = lambda what, timeout_sec: None  # it does not answer
    assert asked().cells == ["", "batch = 4"]


@pytest.mark.parametrize(
    "line",
    [
        "check train.py --gpu t4",
        "check --gpu h100_sxm -- torchrun --nproc-per-node 2 train.py",
        "check --help",
        "estimate --model 'qwen3-8b' --gpu t4",
        "",
    ],
)
def test_other_lines_are_those_of_the_command(line: str, asked: Callable[..., Any]) -> None:
    assert asked(f"%tuner {line}").words == shlex.split(line)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("%tuner ch", "check"),
        ("%tuner check --gpu rtx40", "rtx4090"),
        ("%tuner check --pre", "--predict"),
    ],
)
def test_lines_are_completed(line: str, wanted: str, shell: InteractiveShell) -> None:
    word = line.rpartition(" ")[2]
    assert wanted in shell.complete(word, line, len(line))[1]


# -- the display --------------------------------------------------------------------------------


EVIL = "<script>alert(1)</script><img src=x onerror=y>"
SCRIPT = TRAINER.partition("\n")[2].replace("BATCH,", f"32,  # {EVIL}")
CHECKED = """\
import tuner
found = tuner.check("train.py", gpu="rtx3060", predict=True)
text = repr(found)
found"""
APPLIED = """\
[path] = found.apply()
again = tuner.check(path, gpu="rtx3060", predict=True, changes=False)
errors = []
for each in (found, again):
    try:
        each.apply()
    except tuner.TunerError as error:
        errors.append(f"{type(error).__name__} {error}")
print(text, path, again.found.fits, *errors, sep="\\n\\n")"""


def test_a_check_is_shown_without_scripts_with_its_text_escaped_and_is_applied(
    tmp_path: Path,
) -> None:
    cells = [f"%%writefile train.py\n{SCRIPT}", CHECKED, APPLIED]
    book = new_notebook(cells=[new_code_cell(source) for source in cells])
    _, checked, applied = executed(book, tmp_path).cells
    html = Text(checked.outputs[0].data["text/html"])
    assert html.tags <= {"p", "b", "pre", "span", "table", "tbody", "tr", "td", "details",
                         "summary", "ul", "li"}  # fmt: skip
    assert html.active == []
    assert html.text.count(EVIL) == 2
    assert html.text.startswith("\n\xa0does not fit\xa0 ")
    assert re.search(r"\n\+ +per_device_train_batch_size=\d+,", html.text)
    assert "predicted; torch" in html.text
    text, path, fits, changed, nothing = shown(applied).strip().split("\n\n")
    assert text == checked.outputs[0].data["text/plain"]
    assert text.startswith("does not fit: ")
    assert "note    assumed: " in text
    assert (path, fits) == ("train.py", "True")
    assert changed.startswith("InputError nothing was written")
    assert nothing == "NothingFitsError there is no change to write: none was found"
