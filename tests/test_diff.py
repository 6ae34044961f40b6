"""`tuner diff`: a program under two sets of library versions, each an environment of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tests.installed import environment
from tuner.app.cli.main import run as run_cli

PROGRAM = """
import torch
from helperlib import widened

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    hidden = model(torch.randn(4096, 1024, device="cuda"))
    widened(hidden).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LEAN = "def widened(x):\n    return x\n"
GREEDY = "def widened(x):\n    for _ in range(40):\n        x = x.exp()\n    return x\n"
KEPT_BYTES = 40 * 4096 * 1024 * 4
"""What `exp` of this library keeps for the backward pass."""


def make_stack(root: Path, name: str, library: str, version: str, python_of: Path) -> Path:
    """An environment as a folder with a Python in it, which sees one more library than another."""
    packages = root / name / "site-packages"
    (packages / "helperlib").mkdir(parents=True)
    (packages / "helperlib" / "__init__.py").write_text(library)
    about = packages / f"helperlib-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: helperlib\nVersion: {version}\n")
    python = root / name / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{python_of}" "$@"\n')
    python.chmod(0o755)
    return root / name


@pytest.fixture
def stacks(tmp_path: Path, installed_python: Path) -> tuple[Path, Path]:
    (tmp_path / "train.py").write_text(PROGRAM)
    old = make_stack(tmp_path, "old", LEAN, "1.0", installed_python)
    return old, make_stack(tmp_path, "new", GREEDY, "2.0", installed_python)


@pytest.fixture
def diff(tmp_path: Path, installed_python: Path) -> Callable[..., tuple[int, str]]:
    """The exit code and the answer of an installed `tuner diff`, for these options."""

    def answer(*options: str, memory: str = "40GiB") -> tuple[int, str]:
        words = ["--gpu", "a6000", "--gpu-memory", memory, *options, "--", "train.py"]
        ran = subprocess.run(
            [installed_python, "-m", "tuner", "diff", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment(),
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return ran.returncode, ran.stdout

    return answer


@pytest.mark.proof
@needs_emulator
def test_the_library_that_grew_is_named_with_its_line(stacks, diff):
    old, new = map(str, stacks)
    code, text = diff("--stack", old, "--stack", new, "--json")
    found: dict[str, Any] = json.loads(text)
    assert code == 0
    assert found["packages"] == {"helperlib": ["1.0", "2.0"]}
    grown = next(one for one in found["code"] if one["file"] == "helperlib/__init__.py")
    assert (grown["before_bytes"], grown["lines"]) == (0, [3])
    assert KEPT_BYTES <= grown["after_bytes"] <= 1.1 * KEPT_BYTES
    before, after = (
        found[name]["needed"]["devices"][0]["peak_allocated_bytes"] for name in ("before", "after")
    )
    assert after - before >= grown["grown_bytes"] > 0


@needs_emulator
def test_what_fitted_before_and_does_not_now_is_exit_code_1(stacks, diff):
    old, new = map(str, stacks)
    code, text = diff("--stack", old, "--stack", new, memory="600MiB")
    assert code == 1
    assert "helperlib 1.0 -> 2.0" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["fits"] == ["yes", "no"]
    assert "helperlib/__init__.py:3" in text
    assert "after ran out of memory" in text


@pytest.mark.proof
@needs_emulator
def test_a_program_that_fails_in_one_of_them_is_exit_code_2(stacks, diff):
    library = stacks[1] / "site-packages" / "helperlib" / "__init__.py"
    library.write_text("def widened(x):\n    raise ValueError('not in this version')\n")
    code, text = diff("--stack", str(stacks[0]), "--stack", str(stacks[1]))
    assert code == 2
    assert "ValueError: not in this version" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "train.py"], "0 environments were named, and two are compared"),
        (["--stack", "nowhere", "--", "train.py"], "there is no environment 'nowhere'"),
    ],
)
def test_what_is_no_environment_is_an_error(words, says, capsys):
    assert run_cli(["diff", "--gpu", "a6000", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_program_that_the_environment_lacks_is_named(tmp_path, capsys):
    stack = make_stack(tmp_path, "old", LEAN, "1.0", Path(sys.executable))
    assert run_cli(["diff", "--gpu", "t4", "--stack", str(stack), "--", "torchrun", "a"]) == 2
    assert "has no program 'torchrun'" in capsys.readouterr().err
