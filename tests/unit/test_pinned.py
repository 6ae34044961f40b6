"""The releases that a prediction stands for, and those that a program pins."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tuner.app.cli.main import run
from tuner.app.pinned import (
    OLDEST,
    _origin,
    pinned_doubts,
    pinned_notes,
    pins_near,
    pins_of,
    wanted_releases,
    with_pinned,
)
from tuner.core.records import Doubt
from tuner.predict.releases import BREAKS, EXPERTS, SFT, STACK, breaks_between, other_releases
from tuner.program.planned import plan_program
from tuner.program.program import read_program
from tuner.program.releases import Library
from tuner.program.trainers import trl

ROOT = Path(__file__).parents[2]

UV_LOCK = """\
version = 1
[[package]]
name = "transformers"
version = "4.45.2"
[[package]]
name = "idle"
source = { virtual = "." }
[[package]]
name = "PEFT"
version = "0.13.2"
"""

PROJECT = """\
[project]
name = "mine"
dependencies = ["transformers>=4.40,<5", "numpy", "torch ; python_version < '3'"]
[dependency-groups]
train = ["peft~=0.13.0", { include-group = "dev" }]
"""

REQUIREMENTS = """\
# pinned
--extra-index-url https://example.com
transformers[torch] == 4.45.2 \\
    --hash=sha256:00
-r more.txt
git+https://example.com/trl
accelerate
"""

FILES = {
    "uv.lock": (UV_LOCK, {"transformers": "==4.45.2", "peft": "==0.13.2"}),
    "pyproject.toml": (PROJECT, {"transformers": "<5,>=4.40", "peft": "~=0.13.0"}),
    "requirements.txt": (REQUIREMENTS, {"transformers": "==4.45.2", "peft": "==0.13.2"}),
}


@pytest.mark.parametrize("name", FILES)
def test_pins_are_read_from_each_kind_of_file(tmp_path, name):
    text, pinned = FILES[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "more.txt").write_text("peft==0.13.2\n-r requirements.txt\n")
    assert pins_of(tmp_path / name, STACK).releases == pinned


def test_an_environment_pins_what_is_installed_in_it(tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "peft-0.13.2.dist-info").mkdir()
    (packages / "peft-0.13.2.dist-info" / "METADATA").write_text("Name: peft\nVersion: 0.13.2\n")
    for path in (tmp_path / "env", tmp_path / "env" / "bin" / "python"):
        assert pins_of(path, STACK).releases == {"peft": "==0.13.2"}


MALFORMED = {
    "uv.lock": ("package = [1]", "package = [{name = 1, version = {}}]", "[" * 5000, "\xff"),
    "pyproject.toml": (
        "project = 1",
        "[project]\ndependencies = 5",
        "[project]\noptional-dependencies = [1]",
        "dependency-groups = [2]",
        "[project]\ndependencies = ['peft; " + "(" * 5000 + "']",
    ),
    "requirements.txt": ("peft===foo", "-r \0", "-r .", "-r /dev/zero", "peft; python_version < 1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_costs_its_pins_and_nothing_else(tmp_path, monkeypatch, name):
    monkeypatch.delenv("HOME")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "requirements-gpu.txt").write_text("torch==1.13.1\n")
    program = read_program([str(tmp_path / "train.py")], is_run=False)
    for text in MALFORMED[name]:
        (tmp_path / name).write_text(text, encoding="latin-1")
        assert pinned_doubts(wanted_releases(program)) == {Doubt.OLD_RELEASES}
        assert pinned_notes(wanted_releases(program), plan_program(program))


def test_requirements_that_name_each_other_are_read_once(tmp_path):
    for number in range(30):
        following = f"-r {(number + 1) % 30}.txt\n"
        (tmp_path / f"{number}.txt").write_text(f"{following}{following}trl==0.{number}\n")
    assert pins_of(tmp_path / "0.txt", STACK).releases == {"trl": "==0.29"}


def test_pins_are_looked_for_up_to_the_root_of_the_project(tmp_path):
    (tmp_path / "requirements.txt").write_text("trl==0.12.0\n")  # of another project
    folder = tmp_path / "project" / "src"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").write_text(PROJECT)
    (folder.parent / "requirements-gpu.txt").write_text("transformers==4.45.2\n")
    (folder.parent / "uv.lock").write_text("version =")  # none that can be read
    (folder / "train.py").write_text("")
    found = pins_near(read_program([str(folder / "train.py")], is_run=False), STACK)
    assert [pins.path.name for pins in found] == ["requirements-gpu.txt", "pyproject.toml"]


@pytest.mark.parametrize(
    ("pinned", "release", "differs"),
    [
        ("==5.12.1", "5.12.0", False),  # the third number changes no results
        ("==5.12.1", "5.13.0", True),
        ("~=2.8.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13.0+cpu", False),
        (">=4.45,<5", "4.57.1", False),
        (">=4.45,<5", "5.0.0", True),
        ("==4.*", "4.50.0", False),
    ],
)
def test_only_releases_that_the_pins_exclude_differ(pinned, release, differs):
    found = list(other_releases({"transformers": pinned}, {"transformers": release}))
    assert bool(found) is differs


@pytest.mark.parametrize(
    ("pinned", "release", "said"),
    [
        ("==4.57.1", "5.0.0", "before transformers 5.0 each expert is a linear layer"),
        ("<5", "5.23.0", "before transformers 5.0 each expert is a linear layer"),
        ("==5.3.0", "4.57.1", "since transformers 5.0 experts are one parameter"),
        ("==5.3.0", "5.23.0", ""),
        ("<6", "5.23.0", ""),  # may be on either side
    ],
)
def test_a_break_is_said_if_it_lies_between(pinned, release, said):
    names = {"transformers": pinned}, {"transformers": release}
    found = list(breaks_between(*names, {EXPERTS}))
    assert len(found) == bool(said)
    assert all(text.startswith(said) for text in found)
    assert not list(breaks_between(*names, {SFT}))


def test_every_break_names_a_release_and_its_source():
    for row in BREAKS:
        assert Version(row.release)
        assert row.library in STACK
        assert row.source.startswith("https://")


PROGRAM = """\
from trl import SFTConfig, SFTTrainer
SFTTrainer(model="tiny-llama-3m", args=SFTConfig(max_length=64)).train()
"""


def test_a_program_that_pins_others_is_told_them_and_the_breaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    program = read_program(["train.py"], is_run=False)
    plan = plan_program(program)
    assert pinned_notes(wanted_releases(program), plan) == ()
    assert pinned_doubts(wanted_releases(program)) == set()
    Path("requirements.txt").write_text("torch==1.13.1\n")
    assert pinned_doubts(wanted_releases(program)) == {Doubt.OLD_RELEASES}
    Path("requirements.txt").write_text("trl==0.12.0\n")
    assert pinned_doubts(wanted_releases(program)) == {Doubt.RELEASES}
    first, second, *_ = pinned_notes(wanted_releases(program), plan)
    assert first.startswith("requirements.txt pins trl==0.12.0 (predicted: ")
    assert "before trl 1.7 SFTTrainer has the whole logits" in second


@pytest.mark.parametrize(("release", "loss"), [("1.16.0", "chunked"), ("1.6.0", "transformers")])
def test_the_loss_of_sft_is_that_of_the_installed_release(tmp_path, monkeypatch, release, loss):
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setattr(trl, "library", lambda name: Library(name, release, {}))
    found = plan_program(read_program([str(tmp_path / "train.py")], is_run=False)).configuration
    assert found["loss"] == loss


def test_older_releases_that_cannot_be_traced_are_replaced_or_stay_a_note(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    program = read_program([str(tmp_path / "train.py")], is_run=False)
    (tmp_path / "requirements.txt").write_text("transformers==4.45.2\nbitsandbytes==0.43.3\n")
    packages = ("--with", "transformers==4.45.2", "--with", f"tuner-fit[predict]{_origin()}")
    assert with_pinned(wanted_releases(program)) == ("uv", "run", "--no-project", *packages)
    for text in ("transformers==4.30.0\n", "torch==2.4.1\n", "torch>=2.4\n"):
        (tmp_path / "requirements.txt").write_text(text)
        assert with_pinned(wanted_releases(program)) == ()


def test_the_oldest_releases_are_those_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["predict"])
    needed = {one.name: str(one.specifier) for one in extra}
    assert {name: f">={oldest}" for name, oldest in OLDEST.items() if name != "trl"}.items() <= (
        needed.items()
    )
    assert (needed["peft"], needed["accelerate"]) == ("", "")


UV = """\
#!/bin/sh
while [ "$1" != tuner ]; do echo "$1" >> "$0.words"; shift; done
shift; exec "{python}" -m tuner "$@"
"""
"""It has no other environment: it writes down its own words, and runs those after them."""


def test_the_printed_line_is_the_command_with_the_pinned_releases(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my train.py").write_text(PROGRAM)
    Path("requirements.txt").write_text("transformers>=4.45,<4.50\ntrl==0.12.0\n")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable))
    uv.chmod(0o755)
    code = run(["check", "--gpu", "t4", "--set", "lora_rank=8", "my train.py"])
    said = capsys.readouterr().out
    line = said.partition("Predict with the pinned releases:\n")[2]
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stdout) == (
        code,
        said.replace("check --gpu", "check --predict --gpu"),
    )
    assert uv.with_name("uv.words").read_text().splitlines() == [
        "run", "--no-project", "--with", "transformers<4.50,>=4.45", "--with", "trl==0.12.0",
        "--with", f"tuner-fit[predict]{_origin()}",
    ]  # fmt: skip


@pytest.mark.proof  # installs from the package index: a minute
def test_experts_of_transformers_4_are_quantised_where_it_is_installed(tmp_path):
    """The environment has all that this one has, beside the older releases."""
    venv.create(tmp_path / "env", with_pip=False)
    older = str(tmp_path / "env" / "bin" / "python")
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text("\n".join(sys.path))
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages))
    releases = ("transformers==4.45.2", "peft==0.13.2", "tokenizers<0.21", "huggingface-hub<1")
    subprocess.run([*pip, *releases], check=True)
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 1024,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = []
    for python in (older, sys.executable):
        words = ("--model", ".", "--gpu", "rtx4090", "--set", "precision=nf4", "--json")
        command = [python, "-m", "tuner", "estimate", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert (found["versions"]["transformers"] == "4.45.2") is (python == older)
        weights.append(found["memory"]["breakdown"]["weights"])
    assert 3 * weights[0] < weights[1]
