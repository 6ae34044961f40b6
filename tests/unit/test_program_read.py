"""What is behind the words that start a program."""

from __future__ import annotations

import sys

import pytest
from program_samples import TOOLS, make_tools

from tuner.errors import InputError, UnavailableError
from tuner.host import find_program
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
    assert read.trainer == ""


def test_a_notebook_is_run_by_this_python(folder):
    (folder / "n.ipynb").write_text('{"cells": []}')
    assert read_program(["n.ipynb"]).command == (sys.executable, "n.ipynb")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_command_is_as_it_is(tool, folder):
    (folder / "t.py").write_text("B = 4\n")
    read = read_program([tool, "t.py"])
    assert read.command == (tool, "t.py")
    assert list(read.files) == ["t.py"]


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
        (["t.py"], "the program 't.py' is not there"),
        (["n.ipynb"], "the program 'n.ipynb' is not there"),
        (["c.yml"], "the program 'c.yml' is not there"),
        (["f.py"], "the program 'f.py' is a folder"),
        (["nothing-like-it"], "there is no program 'nothing-like-it'"),
        (["unknown.yaml"], "unknown.yaml is not known as the file of a trainer"),
        (["broken.py"], "broken.py:1: broken Python"),
        (["broken.yaml"], "broken.yaml:2: broken YAML"),
        (["latin.py"], "latin.py:1: not text in UTF-8"),
    ],
)
def test_what_is_no_program_is_said_so(words, message, folder):
    (folder / "f.py").mkdir()
    (folder / "unknown.yaml").write_text("a: 1\n")
    (folder / "broken.py").write_text("B = = 4\n")
    (folder / "broken.yaml").write_text("a: [1\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(InputError) as refused:
        read_program(words)
    assert message in str(refused.value)
