"""Completion as shells do it: the printed script, run by the real shell, finds the real values."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import make_trial, write_samples

from tuner.app.cli.main import COMMANDS, run
from tuner.searches.store import ResultsFolder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A space, results of it on one GPU type, and a program `tuner` to find."""
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        writer.append(make_trial(tmp_path, 20, 100, micro_batch=1, precision="fp16"))
    program = tmp_path / "bin" / "tuner"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tuner "$@"\n')
    program.chmod(0o755)
    return tmp_path


def shell(name: str, *arguments: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [name, *arguments], capture_output=True, text=True, check=False, env=environment,
        timeout=300,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def bash_words(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`, split as bash splits them."""
    line = " ".join(shlex.quote(word) for word in words)
    script = (
        "source <(tuner completion bash)\n"
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()\n"
        '_tuner_completion tuner "" ""\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return shell("bash", "--norc", "-c", script, folder=folder).split()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
class TestBash:
    def test_commands_and_options(self, folder):
        assert set(bash_words(folder, "tuner", "be")) == {"best"}
        assert "--max-memory" in bash_words(folder, "tuner", "best", "--m")

    def test_values_of_what_is_there(self, folder):
        assert "qlora27b" in bash_words(folder, "tuner", "search", "--space", "ql")
        assert "a100_80gb" in bash_words(folder, "tuner", "search", "--gpu", "a100")
        assert bash_words(folder, "tuner", "best", "--space", "tiny", "--gpu", "") == [
            "all",
            "a6000",
        ]
        assert bash_words(folder, "tuner", "best", "--objective", "thr") == ["throughput"]
        found = bash_words(folder, "tuner", "show", "--space", "tiny", "--gpu", "a6000", "")
        assert len(found) == 1
        assert run(["show", "--space", "tiny.yaml", "--gpu", "a6000", *found]) == 0

    def test_knob_and_value_which_bash_takes_for_three_words(self, folder):
        space = ["tuner", "search", "--space", "qlora27b", "--set"]
        assert bash_words(folder, *space, "preci") == ["precision="]
        assert "nf4" in bash_words(folder, *space, "precision", "=", "n")


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_take_the_script(folder, name):
    if not shutil.which(name):
        pytest.skip(f"needs {name}")
    path = folder / "script"
    path.write_text(shell("bash", "-c", f"tuner completion {name}", folder=folder))
    shell(name, "-n", str(path), folder=folder)  # reads it, and runs nothing


def test_no_heavy_library_is_loaded_to_complete_a_word(folder):
    code = (
        "import sys, atexit\n"
        "heavy = {'torch', 'ray', 'optuna', 'transformers', 'numpy', 'plotly'}\n"
        "atexit.register(lambda: print('heavy', *sorted(heavy & set(sys.modules))))\n"
        "sys.argv = ['tuner']\n"
        "from tuner.app.cli.main import main\n"
        "main()"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_TUNER_COMPLETE": "bash_complete",
        "COMP_WORDS": "tuner best --space q",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment,
        timeout=300,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "heavy"
    assert len(done.stdout.splitlines()) > 1


def test_the_script_is_of_the_shell_that_was_asked_for(capsys):
    for name, mark in (("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --")):
        assert run(["completion", name]) == 0
        assert mark in capsys.readouterr().out
    assert run(["completion", "tcsh"]) == 2


def test_every_command_is_offered(folder):
    from click.shell_completion import ShellComplete

    from tuner.app.cli.main import cli

    offered = ShellComplete(cli, {}, "tuner", "_X").get_completions([], "")
    assert {item.value for item in offered} <= set(COMMANDS)
    assert "search" in {item.value for item in offered}
