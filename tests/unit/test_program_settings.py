"""Which settings are found in people's programs, and where each of them is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program_samples import EXPECTED, FOLDER, described, make_tools, program, sections

from tuner.core.errors import InputError
from tuner.program.program import read_program
from tuner.program.settings import Settings, settings_of
from tuner.program.space_text import knobs_of

SECTIONS = sections()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    make_tools(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


def found(folder: Path, monkeypatch, text: str, *words: str) -> Settings:
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    return settings_of(program(" ".join(("train.py", *words))))


def test_every_program_is_expected_to_be_something():
    named = {word for command in SECTIONS for word in command.split()}
    programs = {p.name for p in FOLDER.iterdir() if p.is_file()} - {EXPECTED.name}
    assert len(programs) >= 20
    assert programs <= named


def each_program_once() -> Iterator[Any]:
    """The commands; with other options and launchers, a program of an earlier one is a proof."""
    seen: set[str] = set()
    for command in SECTIONS:
        name = next(word for word in command.split() if "." in word)
        yield pytest.param(command, marks=[pytest.mark.proof] * (name in seen))
        seen.add(name)


@pytest.mark.parametrize("command", [*each_program_once()])
def test_the_settings_and_two_changes_of_a_program(command, monkeypatch, tools):
    for library in ("hydra", "omega"):
        if library in command:
            pytest.importorskip(library.replace("omega", "omegaconf"))
    monkeypatch.chdir(FOLDER)
    assert described(command).strip() == SECTIONS[command]


ARGUMENTS = """\
from transformers import Trainer, TrainingArguments
{}
Trainer("gpt2", TrainingArguments("out", per_device_train_batch_size={})).train()
"""


@pytest.mark.parametrize(
    ("text", "given", "line"),
    [
        ("B = 2\nB = 4", "B", 3),
        ("B = 4\nif B > 100:\n    B = 5", "B", 2),
        ("C = {}\nC['b'] = 4", "C['b']", 3),
        ("K = 'big'\nC = {'big': {'b': 4}, 'small': {'b': 2}}", "C[K]['b']", 3),
        ("D = {'b': 4}\nC = {**D, 'c': 1}", "C['b']", 2),
        ("class C:\n    b = 4\nclass D(C):\n    pass", "D().b", 3),
        ("class C:\n    def __init__(self, b=9):\n        self.b = b", "C(4).b", 5),
        ("from functools import partial\nf = partial(int, 4)", "f()", 3),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('-b', type=int)\n"
         "a = p.parse_args(['-b', '4'])", "a.b", 5),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--b', default=2)\n"
         "p.set_defaults(b=4)\na = p.parse_args()", "a.b", 5),
        ("from dataclasses import dataclass, replace\n@dataclass\nclass C:\n    b: int = 2\n"
         "c = replace(C(), b=4)", "c.b", 6),
        ("class C:\n    b = 2\nc = C()\nsetattr(c, 'b', 4)", "c.b", 5),
        ("import shlex\nw = shlex.split('--batch 4')", "int(w[1])", 3),
        ("", "(4)", 3),
    ],
)  # fmt: skip
def test_the_place_of_a_value_is_the_one_that_changes_it(text, given, line, tmp_path, monkeypatch):
    setting = found(tmp_path, monkeypatch, ARGUMENTS.format(text, given))["micro_batch"]
    assert (setting.value, setting.problem) in ((4, None), (4096, None))
    assert setting.where == f"train.py:{line}"


@pytest.mark.parametrize(
    ("text", "given", "problem"),
    [
        ("import sys", "len(sys.argv)", "is computed"),
        ("from parts import batch", "batch", "is known only when it runs"),
        ("B = 4", "B, gradient_accumulation_steps=B", "sets grad_accum too"),
        ("B = 4", "B, max_grad_norm=B", "sets arguments.max_grad_norm too"),
        ("B = 4", "B, per_device_eval_batch_size=B", None),
    ],
)
def test_a_value_without_a_place_of_its_own_is_said(text, given, problem, tmp_path, monkeypatch):
    setting = found(tmp_path, monkeypatch, ARGUMENTS.format(text, given))["micro_batch"]
    assert (setting.problem or "none").startswith(problem or "none")


def test_what_no_training_gets_is_no_setting(tmp_path, monkeypatch):
    text = "from transformers import TrainingArguments\nTrainingArguments('o')\nbatch_size = 4\n"
    assert not found(tmp_path, monkeypatch, text)


OPTIONS = """\
import argparse
from transformers import Trainer, TrainingArguments
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=8)
p.add_argument("--eval-batch-size", type=int, default=9)
p.add_argument("--packing", action="store_true")
p.add_argument("data", nargs="*")
args = p.parse_args()
Trainer("gpt2", TrainingArguments("out", per_device_train_batch_size=args.batch_size)).train()
"""


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", 8),
        ("--batch-size 4", 4),
        ("--batch-size=4", 4),
        ("--batch 4", 4),
        ("-b 4", 4),
        ("-b4", 4),
        ("--batch-size 4 --batch-size 5", 5),
        ("--eval-batch-size 4", 8),
        ("--packing rows", 8),
    ],
)
def test_an_option_is_what_the_command_says(words, value, tmp_path, monkeypatch):
    settings = found(tmp_path, monkeypatch, OPTIONS, *words.split())
    assert settings["micro_batch"].value == value
    assert "packing" not in settings  # the option reaches nothing


def test_words_and_files_reach_the_training_or_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("train:\n  batch_size: 4\neval:\n  batch_size: 4\n")
    text = ARGUMENTS.format("import yaml\nC = yaml.safe_load(open('c.yaml'))",
                            "C['train']['batch_size']")  # fmt: skip
    setting = found(tmp_path, monkeypatch, text, "--batch-size", "4")["micro_batch"]
    assert (setting.value, setting.where) == (4, "c.yaml:2")


def test_a_program_that_ends_with_an_error_has_no_settings_and_says_why(tmp_path, monkeypatch):
    settings = found(tmp_path, monkeypatch, "import sys\nprint(sys.argv[9])\n")
    assert not settings
    assert "train.py:2: the program needs an argument" in str(settings.trial.error)


def test_adapters_or_arguments_of_data_are_settings_that_are_unknown(tmp_path, monkeypatch):
    head = "from datasets import load_dataset\nfrom trl import SFTTrainer\nd = load_dataset('d')\n"
    settings = found(tmp_path, monkeypatch, head + "SFTTrainer('gpt2', peft_config=d.lora).train()")
    assert settings["micro_batch"].value == 8
    assert settings["lora_rank"].value is None
    assert "train.py:3" in str(settings["lora_rank"].problem)
    settings = found(tmp_path, monkeypatch, head + "SFTTrainer('gpt2', args=d.arguments).train()")
    assert "micro_batch" not in settings


def test_a_loop_without_a_loader_says_that_its_batch_is_not_read(tmp_path, monkeypatch):
    text = """\
import torch
batch_size = 12
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    for micro in range(4):
        (model(torch.randn(batch_size, 4)).mean() / 4).backward()
    optimizer.step()
"""
    settings = found(tmp_path, monkeypatch, text)
    assert settings["grad_accum"].value == 4
    assert settings["micro_batch"].value is None
    why = "isn't read: the loop at train.py:7 has no DataLoader that says it"
    assert settings["micro_batch"].problem == why
    with pytest.raises(InputError, match=f"nothing that can be varied; micro_batch {why}"):
        knobs_of(settings, {}, ())


def test_a_loop_that_splits_its_batches_says_that_their_size_is_not_read(tmp_path, monkeypatch):
    text = """\
import torch
loader = torch.utils.data.DataLoader([1] * 640, batch_size=64)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    for part in PARTS:
        (model(part).mean() / 4).backward()
    optimizer.step()
"""
    for parts in ("batch.split(16)", "[batch[n : n + 16] for n in range(0, 64, 16)]"):
        settings = found(tmp_path, monkeypatch, text.replace("PARTS", parts))
        why = "isn't read: the loop at train.py:7 has several backward passes of one batch"
        assert [settings[knob].problem for knob in ("micro_batch", "grad_accum")] == [why, why]
        assert settings["micro_batch"].value is None


def test_what_a_file_leaves_to_the_script_of_its_tool_is_not_given(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    text = "model_name_or_path: gpt2\ndataset_name: d\nmax_length: 512\n"
    Path("sft.yaml").write_text(text)
    settings = settings_of(read_program(("sft.yaml",), is_run=False))
    assert settings["max_length"].is_given
    assert settings["attention"].value == "sdpa"
    assert not settings["attention"].is_given
