"""What is behind the words that start a program."""

from __future__ import annotations

import sys

import pytest
from program_samples import make_tools

from tuner.core.errors import InputError, UnavailableError
from tuner.core.host import find_program
from tuner.program.program import read_program

FILES = {
    "Axolotl": ("base_model: m\nmicro_batch_size: 2\n", ("axolotl", "train")),
    "LLaMA-Factory": ("model_name_or_path: m\nfinetuning_type: lora\n",
                      ("llamafactory-cli", "train")),
    "torchtune": ("model: {_component_: m}\nbatch_size: 2\n",
                  ("tune", "run", "lora_finetune_single_device", "--config")),
    "TRL": ("model_name_or_path: m\ndataset_name: d\n", ("trl", "sft", "--config")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    make_tools(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_the_file_of_a_trainer_is_run_by_it(name, folder):
    text, command = FILES[name]
    (folder / "c.yaml").write_text(text)
    read = read_program(["c.yaml", "--more"])
    assert read.trainer == name
    assert read.command == (*command, "c.yaml", "--more")
    assert list(read.files) == ["c.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_a_trainer_that_is_not_installed_is_named(name, folder, monkeypatch):
    text, command = FILES[name]
    (folder / "c.yaml").write_text(text)
    (folder / "empty").mkdir()
    monkeypatch.setenv("PATH", str(folder / "empty"))
    monkeypatch.setattr(sys, "executable", str(folder / "empty" / "python"))
    with pytest.raises(UnavailableError, match=f"a file of {name}, and '{command[0]}' is not"):
        read_program(["c.yaml"])


def test_a_trainer_beside_python_is_found(folder, monkeypatch):
    (folder / "c.yaml").write_text(FILES["Axolotl"][0])
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setenv("PATH", str(folder))
    trainer = read_program(["c.yaml"]).command[0]
    assert find_program(trainer) == str(folder / "bin" / "axolotl")


def test_a_script_is_run_by_this_python_with_its_arguments(folder):
    (folder / "t.py").write_text("B = 4\n")
    (folder / "c.yaml").write_text("a: 1\n")
    read = read_program(["t.py", "--config", "c.yaml", "--other=c.yaml", "-x", "no.yaml"])
    assert read.command[:2] == (sys.executable, "t.py")
    assert list(read.files) == ["t.py", "c.yaml"]
    assert (read.trainer, read.main) == ("", "t.py")


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        ("axolotl train c.yaml", "Axolotl"),
        ("uv run axolotl train c.yaml", "Axolotl"),
        ("llamafactory-cli train c.yaml", "LLaMA-Factory"),
        ("poetry run trl sft --config c.yaml", "TRL"),
        ("tune run lora_finetune_single_device --config c.yaml", "torchtune"),
        ("trl dpo --config c.yaml", "TRL"),
        ("accelerate launch t.py --config c.yaml", ""),
    ],
)
def test_a_trainer_that_a_command_starts_is_known(words, trainer, folder):
    (folder / "c.yaml").write_text("batch_size: 2\n")
    (folder / "t.py").write_text("")
    read = read_program(words.split())
    assert (read.trainer, list(read.files)[-1]) == (trainer, "c.yaml")


LAUNCHED = ["python", "uv run", "uv run python", "torchrun --nproc-per-node 2",
            "accelerate launch", "poetry run python -u"]  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_module_is_found_by_its_name(launcher, folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "train.py").write_text("from .b import x\nfrom a.b.y import *\nimport os\n")
    (folder / "a" / "b" / "x.py").write_text("B = 4\n")
    (folder / "a" / "b" / "y.py").write_text("C = open('a/c.json')\n")
    (folder / "a" / "c.json").write_text('{"batch_size": 4}')
    (folder / "other.py").write_text("")
    read = read_program([*launcher.split(), "-m", "a.train", "other.py"])
    assert read.main == "a.train"
    assert {str(source.path) for source in read.sources} == {"a/train.py", "other.py"}


def test_a_program_may_be_read_only_and_linked(folder):
    (folder / "t.py").write_text("B = 4\n")
    (folder / "u.py").hardlink_to(folder / "t.py")
    (folder / "t.py").chmod(0o444)
    assert read_program(["t.py"]).sources[0].places


def test_arguments_that_hold_data_are_left_alone(folder):
    (folder / "t.py").write_text("B = 4\n")
    (folder / "d.json").write_text('{"a": "' + "x" * 2_000_000 + '"}')
    (folder / "broken.json").write_text("{")
    (folder / "folder.yaml").mkdir()
    words = ["t.py", "d.json", "broken.json", "folder.yaml", "a\0b.yaml", "x" * 5000 + ".yaml"]
    assert list(read_program(words).files) == ["t.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no program was named"),
        (["t.py"], "file not found: t.py"),
        (["n.ipynb"], "file not found: n.ipynb"),
        (["c.yml"], "file not found: c.yml"),
        (["f.py"], "is a folder, not a program: f.py"),
        (["nothing-like-it"], "there is no program 'nothing-like-it'"),
        (["unknown.yaml"], "unknown.yaml is not known as the file of a trainer"),
        (["broken.py"], "broken.py:1: broken Python"),
        (["broken.yaml"], "broken.yaml:2: broken YAML"),
        (["latin.py"], "latin.py:1: not text in UTF-8"),
        (["rot13.py"], "rot13.py:1: broken Python: it says that it is rot13"),
        (["."], "'.' is a folder, not a program"),
        (["notes.txt"], "'notes.txt' is not a program"),
        (["brokn.py"], "did you mean 'broken.py'?"),
    ],
)
def test_what_is_no_program_is_said_so(words, message, folder):
    (folder / "f.py").mkdir()
    (folder / "notes.txt").write_text("a: 1\n")
    (folder / "unknown.yaml").write_text("a: 1\n")
    (folder / "broken.py").write_text("B = = 4\n")
    (folder / "broken.yaml").write_text("a: [1\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "rot13.py").write_text("# coding: rot13\n")
    with pytest.raises(InputError) as refused:
        read_program(words)
    assert message in str(refused.value)


def test_variables_before_a_command_are_its_own(folder):
    (folder / "t.py").write_text("")
    for words in (["A=1", "B=", "t.py", "C=2"], ["env", "A=1", "B=", "t.py", "C=2"]):
        read = read_program(words)
        assert read.environment == {"A": "1", "B": ""}
        assert read.command == ("env", "A=1", "B=", sys.executable, "t.py", "C=2")
