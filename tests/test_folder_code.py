"""No code of the current folder runs but for the program that a command promises to run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.app.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]

PLANTED = (
    *("random.py", "json.py", "signal.py", "click.py", "msgspec.py", "numpy.py", "torch.py"),
    *("tuner/__init__.py", "sitecustomize.py", "usercustomize.py", "planted.pth", "uv.toml"),
)
"""The standard library, dependencies, tuner itself, and the files that Python and uv look for."""

RUN_YOUR_PROGRAM = {"diff", "emulate"}

SPACE = ("--space", "qlora27b", "--gpu", "a6000", "--results", str(ROOT / "results"))
QUICK = (
    ("check", "--predict", "--gpu", "rtx4090", "train.py", "qwen3-8b"),
    ("tune", "--predict", "--gpu", "rtx4090", "train.py", "qwen3-8b"),
    ("estimate", "--space", "qlora27b", "--gpu", "a6000"),
    ("best", *SPACE),
    ("show", *SPACE),
    ("export", *SPACE, "--format", "trl"),
    ("apply", *SPACE, "--yes", "train.py"),
    ("data", "--space", "qlora27b"),
    *((name,) for name in ("gpus", "models", "spaces")),
    *((name,) for name in ("doctor", "mcp", "calibrate")),
)
CPU = ("--space", "tiny_cpu", "--gpu", "cpu")
LONG = (
    ("calculator",),
    ("search", *CPU, "--trials", "1", "--workers", "1", "--dashboard"),
    ("report", *CPU),
    ("trial", *CPU),
)


@pytest.fixture
def tuner(
    tmp_path: Path, installed_python: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs a command of the installed wheel in a folder of a stranger, which must be left alone."""
    folder, ran, programs = tmp_path / "folder", tmp_path / "ran", tmp_path / "bin"
    for name in PLANTED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        code = f"open({str(ran)!r}, 'a').write({name!r} + '\\n')\n"
        (folder / name).write_text(f"import os; {code}" if name.endswith(".pth") else code)
    shutil.copy(ROOT / "examples" / "programs" / "sft.py", folder / "train.py")
    programs.mkdir()
    (programs / "uv").write_text(f"#!/bin/sh\necho uv >> {ran}\n")
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path / "profiles"))  # a search then measures all

    def run(*words: str) -> None:
        done = subprocess.run(
            [installed_python.with_name("tuner"), *words],
            cwd=folder, capture_output=True, text=True, input="", check=False,
        )  # fmt: skip
        assert not ran.exists(), f"{ran.read_text()}ran in {words}"
        without_gpu = words == ("calibrate",)
        assert done.returncode in ((2, 3) if without_gpu else (0, 1)), done.stdout + done.stderr

    return run


def test_every_command_is_tried():
    assert {words[0] for words in QUICK + LONG} == COMMANDS.keys() - RUN_YOUR_PROGRAM


@pytest.mark.parametrize("words", QUICK, ids=lambda words: words[0])
def test_nothing_of_the_folder_runs(tuner, words):
    tuner(*words)


@pytest.mark.proof
def test_nothing_of_the_folder_runs_where_trials_do(tuner):
    for words in LONG:
        tuner(*words)


def test_a_process_of_its_own_leaves_out_the_folders_of_the_script(tmp_path):
    """As the predictions that `TunerCallback` asks for, beside a training's own modules."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "train.py").write_text(
        "import pathlib, subprocess\n"
        "from tuner.core.environment import own_python\n"
        "for folder in (pathlib.Path(__file__).parent, pathlib.Path()):\n"
        "    (folder / 'click.py').write_text('raise SystemExit(7)')\n"
        "subprocess.run(own_python('tuner', 'gpus'), check=True)\n"
    )
    subprocess.run(
        [sys.executable, "script/train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f".{os.pathsep}{ROOT}"}, check=True,
    )  # fmt: skip
