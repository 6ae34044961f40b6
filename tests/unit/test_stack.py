"""The releases that a prediction stands for, those that a program pins, and `--stack`."""

from __future__ import annotations

import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tuner.app import in_stack
from tuner.app.cli.main import run
from tuner.app.in_stack import run_in_stack, wanted_releases
from tuner.app.other_stack import stack_doubts, stack_notes
from tuner.core.errors import InputError, Note, UnavailableError
from tuner.core.records import Doubt
from tuner.predict.releases import (
    BREAKS,
    EXPERTS,
    SFT,
    STACK,
    breaks_between,
    other_releases,
    predicted_stack,
)
from tuner.program.pins import pins_near, pins_of
from tuner.program.planned import plan_program
from tuner.program.program import read_program
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
def test_pins_are_read_from_each_kind_of_file(tmp_path: Path, name: str) -> None:
    text, pinned = FILES[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "more.txt").write_text("peft==0.13.2\n-r requirements.txt\n")
    assert pins_of(tmp_path / name, STACK).releases == pinned


def test_an_environment_pins_what_is_installed_in_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "peft-0.13.2.dist-info").mkdir()
    (packages / "peft-0.13.2.dist-info" / "METADATA").write_text("Name: peft\nVersion: 0.13.2\n")
    for path in (tmp_path / "env", tmp_path / "env" / "bin" / "python"):
        assert pins_of(path, STACK).releases == {"peft": "==0.13.2"}


@pytest.mark.parametrize(
    ("name", "text"), [("absent.txt", None), ("uv.lock", "version ="), ("nothing.txt", "numpy\n")]
)
def test_a_stack_without_pins_is_bad_input(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        wanted_releases(tmp_path / name)
    assert name in caught.value.message
    assert caught.value.hint


def test_pins_are_looked_for_up_to_the_root_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl==0.12.0\n")  # of another project
    folder = tmp_path / "project" / "src"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").write_text(PROJECT)
    (folder.parent / "requirements-gpu.txt").write_text("transformers==4.45.2\n")
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
def test_only_releases_that_the_pins_exclude_differ(
    pinned: str, release: str, differs: bool
) -> None:
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
def test_a_break_is_said_if_it_lies_between(pinned: str, release: str, said: str) -> None:
    names = {"transformers": pinned}, {"transformers": release}
    found = list(breaks_between(*names, {EXPERTS}))
    assert len(found) == bool(said)
    assert all(text.startswith(said) for text in found)
    assert not list(breaks_between(*names, {SFT}))


def test_every_break_names_a_release_and_its_source() -> None:
    for row in BREAKS:
        assert Version(row.release)
        assert row.library in STACK
        assert row.source.startswith("https://")


PROGRAM = """\
from trl import SFTConfig, SFTTrainer
SFTTrainer(model="tiny-llama-3m", args=SFTConfig(max_length=64))
"""


def test_a_program_that_pins_others_is_told_the_option_and_the_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    program = read_program(["train.py"], is_run=False)
    plan = plan_program(program)
    assert stack_notes(program, plan) == ()
    assert stack_doubts(program) == set()
    Path("requirements.txt").write_text("torch==1.13.1\n")
    assert stack_doubts(program) == {Doubt.OLD_RELEASES}
    Path("requirements.txt").write_text("trl==0.12.0\n")
    assert stack_doubts(program) == {Doubt.RELEASES}
    first, second, *_ = stack_notes(program, plan)
    assert first.startswith("add --stack requirements.txt: it pins trl==0.12.0 (predicted: ")
    assert "before trl 1.7 SFTTrainer has the whole logits" in second


@pytest.mark.parametrize(
    ("release", "loss", "checkpoints"),
    [
        ("1.16.0", "chunked", True),
        ("1.6.0", "transformers", True),
        ("0.21.0", "transformers", False),
    ],
)
def test_sft_is_read_with_the_defaults_of_the_installed_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, loss: str, checkpoints: bool
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setattr(trl, "version", lambda name: release)
    found = plan_program(read_program([str(tmp_path / "train.py")], is_run=False)).configuration
    assert (found["loss"], found["gradient_checkpointing"]) == (loss, checkpoints)


def test_the_stack_names_tuner_and_the_installed_releases() -> None:
    found = predicted_stack()
    assert {"tuner", "torch", "transformers", "peft"} <= found.keys()


def test_releases_that_cannot_be_traced_are_refused_or_replaced(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("transformers==4.30.0\n")
    with pytest.raises(UnavailableError, match=r"4\.45 is the oldest"):
        wanted_releases(file)
    file.write_text("transformers==4.45.2\nbitsandbytes==0.43.3\n")
    with pytest.warns(Note, match="bitsandbytes==0.43.3 cannot be traced"):
        assert wanted_releases(file)["bitsandbytes"] == "~=0.48.0"


def test_the_oldest_operators_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {one.name: one for one in map(Requirement, project["optional-dependencies"]["all"])}
    for library in in_stack.REPLACED:
        assert str(needed[library].specifier) == f">={in_stack.OLDEST[library]}"


def test_the_child_gets_the_command_line_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its answer and its exit code are those of the command."""
    (tmp_path / "tuner_child.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['TUNER_STACK'])\nsys.exit(4)\n"
    )
    monkeypatch.chdir(tmp_path)
    Path("pins.txt").write_text("transformers==5.12.1\n")
    monkeypatch.setattr(in_stack, "CHILD", "tuner_child")
    monkeypatch.setattr(in_stack, "environment_of", lambda wanted: Path(sys.executable))
    words = ["estimate", "--model", "tiny-llama-3m", "--stack=pins.txt", "--gpu", "t4"]
    assert run(words) == 4
    assert capfd.readouterr().out == (
        "['estimate', '--model', 'tiny-llama-3m', '--gpu', 't4'] pins.txt\n"
    )


def test_an_environment_that_cannot_be_built_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_stack, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(in_stack, "_OWN", ())
    monkeypatch.setattr(in_stack, "_TRACED", ())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(in_stack.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match="cannot be built"):
        in_stack.environment_of({"torch": "==99.0"})
    assert not list((tmp_path / "stacks").iterdir())


def test_releases_that_are_installed_need_no_other_process(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("transformers>=4.40\ntorch>=2.4\n")
    assert run_in_stack(file, []) is None


@pytest.mark.slow  # installs from the package index: a minute
def test_experts_of_transformers_4_are_quantised_in_their_own_stack(tmp_path: Path) -> None:
    import json
    import subprocess

    (tmp_path / "requirements.txt").write_text("transformers==4.45.2\npeft==0.13.2\n")
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 1024,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def weights(*options: str) -> int:
        words = ("--model", ".", "--gpu", "rtx4090", "--set", "precision=nf4", "--json", *options)
        command = [sys.executable, "-m", "tuner", "estimate", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert (found["versions"]["transformers"] == "4.45.2") is bool(options)
        return int(found["memory"]["breakdown"]["weights"])

    assert 3 * weights("--stack", "requirements.txt") < weights()
