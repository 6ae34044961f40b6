"""What `tuner apply` says of values that would not reach the training, read without running it.

The traps are those of five real projects: each change below writes a value that the
program then does not train with.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.app.applying import user_program
from tuner.app.arriving import Arrival, Arrivals, look
from tuner.app.cli.main import run
from tuner.core.errors import InputError
from tuner.core.records import KnobValue
from tuner.program.edit.assign import Assignment
from tuner.program.edit.plan import make_plan
from tuner.program.edit.source import open_source
from tuner.space.apply import read_key
from tuner.space.gpus import get_gpu

KBIT = """\
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from trl import SFTConfig, SFTTrainer
CONFIG = {"batch": 4, "grad_ckpt": True}
model = prepare_model_for_kbit_training(load())
args = SFTConfig(
    per_device_train_batch_size=CONFIG["batch"], gradient_checkpointing=CONFIG["grad_ckpt"]
)
SFTTrainer(model, args=args).train()
"""
STAGED = """\
import sys
import yaml
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader
config = yaml.safe_load(open("config.yaml"))
batch_size = 12  # all stages
loader = DataLoader(data, batch_size=batch_size, shuffle=True)
Trainer(accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"]).fit(model, loader)
"""
STAGED_CONFIG = """\
data_loader: {batch_size: 4}
trainer: {accumulate_grad_batches: 16}
"""
LOOP = """\
import torch
import yaml
from torch.utils.data import DataLoader
config = yaml.safe_load(open("config.yaml"))
loader = DataLoader(data, batch_size=config["training"]["batch_size"])
tokens = tokenizer(texts, max_length=256, truncation=True)
"""
LOOP_CONFIG = "training: {batch_size: 32}\ndata: {max_length: 512}\n"
MODULE = """\
import argparse
from config import TRAINING_CONFIG
from transformers import Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--max_seq_length", type=int, default=2048)
args = parser.parse_args()
rows = tokenizer(texts, max_length=args.max_seq_length, padding="max_length")
Trainer(args=TrainingArguments(**TRAINING_CONFIG), train_dataset=rows).train()
"""
CONSTANTS = """\
MAX_SEQ_LENGTH = 512
TRAINING_CONFIG = {"per_device_train_batch_size": 4}
"""
FLAGS = """\
import argparse
from transformers import Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=2)
args = parser.parse_args()
Trainer(args=TrainingArguments(per_device_train_batch_size=args.batch_size)).train()
"""


def arrivals(
    folder: Path,
    file: str,
    changes: dict[str, tuple[str, KnobValue]],
    words: tuple[str, ...] = (),
    way: str | None = "read",
) -> Arrivals:
    path = folder / file
    wanted = [Assignment(read_key(key), knob, value) for knob, (key, value) in changes.items()]
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    user = user_program([open_source(path)], words)
    plan = make_plan([path], wanted)
    values = {knob: value for knob, (_, value) in changes.items()}
    found = look(user, plan.files, values, get_gpu("t4"), way=way)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return found


def of(found: Arrivals, knob: str) -> Arrival:
    return next(value for value in found.values if value.knob == knob)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)


def test_kbit_preparation_keeps_checkpointing_on(tmp_path: Path) -> None:
    write(tmp_path, train_py=KBIT)
    changes: dict[str, tuple[str, KnobValue]] = {
        "micro_batch": ("CONFIG.batch", 2),
        "gradient_checkpointing": ("CONFIG.grad_ckpt", False),
    }
    found = arrivals(tmp_path, "train.py", changes)
    assert of(found, "micro_batch").arrived == 2
    with pytest.raises(InputError) as caught:
        found.require()
    text = str(caught.value)
    assert "1 value doesn't take effect" in text
    assert "train.py:4 model = prepare_model_for_kbit_training(load())" in text
    assert "use_gradient_checkpointing=False" in text

    off = "prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)"
    write(tmp_path, train_py=KBIT.replace("prepare_model_for_kbit_training(load())", off))
    arrivals(tmp_path, "train.py", changes).require()

    write(tmp_path, train_py=KBIT)  # peft checkpoints quantised models only
    arrivals(tmp_path, "train.py", changes | {"precision": ("none", "bf16")}).require()


def test_a_setting_of_the_program_itself_wins_over_its_file(tmp_path: Path) -> None:
    write(tmp_path, train_py=STAGED, config_yaml=STAGED_CONFIG)
    found = arrivals(
        tmp_path,
        "config.yaml",
        {
            "micro_batch": ("data_loader.batch_size", 8),
            "grad_accum": ("trainer.accumulate_grad_batches", 8),
        },
        (str(tmp_path / "train.py"),),
    )
    assert of(found, "grad_accum").arrived == 8
    assert of(found, "micro_batch").arrived == 12
    with pytest.raises(InputError, match="batch_size = 12  # all stages"):
        found.require()


def test_a_length_that_the_loop_has_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, train_py=LOOP, config_yaml=LOOP_CONFIG)
    found = arrivals(
        tmp_path,
        "config.yaml",
        {"micro_batch": ("training.batch_size", 8), "max_length": ("data.max_length", 128)},
        ("python3", str(tmp_path / "train.py")),
    )
    assert of(found, "micro_batch").arrived == 8
    assert of(found, "max_length").seen == ""  # nothing reads the key; a run shows the 256


def test_an_option_that_wins_over_the_module_of_constants(tmp_path: Path) -> None:
    write(tmp_path, train_py=MODULE, config_py=CONSTANTS)
    found = arrivals(
        tmp_path,
        "config.py",
        {
            "max_length": ("MAX_SEQ_LENGTH", 1024),
            "micro_batch": ("TRAINING_CONFIG.per_device_train_batch_size", 2),
        },
    )  # nobody named train.py: it imports config.py
    assert of(found, "micro_batch").arrived == 2
    assert of(found, "max_length").arrived == 2048
    assert any("train.py was read, not run" in note for note in found.notes)
    with pytest.raises(InputError, match=r'add_argument\("--max_seq_length"'):
        found.require()


def test_the_command_line_wins_over_the_default(tmp_path: Path) -> None:
    write(tmp_path, train_py=FLAGS)
    changes: dict[str, tuple[str, KnobValue]] = {"micro_batch": ("batch_size", 4)}
    assert of(arrivals(tmp_path, "train.py", changes), "micro_batch").arrived == 4
    words = (str(tmp_path / "train.py"), "--batch_size", "8")
    lost = of(arrivals(tmp_path, "train.py", changes, words), "micro_batch")
    assert (lost.arrived, lost.where) == (8, "the command line per_device_train_batch_size")


def test_a_constant_that_nothing_reads_is_not_said_to_arrive(tmp_path: Path) -> None:
    write(tmp_path, train_py="import transformers\nbatch_size = 4\n")
    found = arrivals(tmp_path, "train.py", {"micro_batch": ("batch_size", 2)})
    assert of(found, "micro_batch").seen == ""
    found.require()


def test_files_of_no_known_program_are_named(tmp_path: Path) -> None:
    write(tmp_path, config_yaml="training: {batch_size: 4}\n")
    found = arrivals(tmp_path, "config.yaml", {"micro_batch": ("training.batch_size", 2)})
    assert [value.seen for value in found.values] == [""]
    assert "name it after --" in found.notes[0]


def test_the_file_of_a_tool_that_is_not_installed_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    text = "base_model: m\ndatasets: []\nmicro_batch_size: 4\n"
    write(tmp_path, axolotl_yml=text)
    found = arrivals(tmp_path, "axolotl.yml", {"micro_batch": ("micro_batch_size", 2)}, way=None)
    assert [(v.arrived, v.seen) for v in found.values] == [(2, "read")]
    assert "is a file of Axolotl, and 'axolotl' is not installed" in found.notes[0]


def test_a_pipe_beside_a_script_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other.py")
    write(tmp_path, train_py=FLAGS)
    found = arrivals(tmp_path, "train.py", {"micro_batch": ("batch_size", 4)})
    assert of(found, "micro_batch").arrived == 4


def test_what_is_not_known_to_run_is_not_emulated(tmp_path: Path) -> None:
    write(tmp_path, config_yaml="training: {batch_size: 4}\n")
    user = user_program([open_source(tmp_path / "config.yaml")], ())
    with pytest.raises(InputError, match="program to run is not known"):
        look(user, [], {"micro_batch": 2}, get_gpu("t4"), way="emulate")


def test_apply_writes_nothing_that_does_not_arrive(folder_of_kbit: Path, capsys) -> None:
    command = ["apply", "--space", "tiny.yaml", "--gpu", "a6000", "--to", "train.py", "--yes"]
    assert run(command) == 2
    assert (folder_of_kbit / "train.py").read_text() == KBIT
    assert "prepare_model_for_kbit_training" in capsys.readouterr().err
    assert run([*command, "--check", "none"]) == 0
    assert '"grad_ckpt": False' in (folder_of_kbit / "train.py").read_text()


@pytest.fixture
def folder_of_kbit(tmp_path, monkeypatch):
    from cli_samples import SPACE, make_trial, write_samples

    from tuner.searches.store import ResultsFolder

    write_samples(tmp_path)
    keys = "{.batch: micro_batch, .grad_ckpt: gradient_checkpointing}"
    space = SPACE.replace("knobs:\n", "knobs:\n  gradient_checkpointing: [true, false]\n")
    space = space.replace("baseline: {", "baseline: {gradient_checkpointing: true, ")
    (tmp_path / "tiny.yaml").write_text(f"{space}apply: {{script: {{keys: {keys}}}}}\n")
    monkeypatch.chdir(tmp_path)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        writer.append(
            make_trial(
                tmp_path, 40, 300, micro_batch=2, precision="bf16", gradient_checkpointing=False
            )
        )
    write(tmp_path, train_py=KBIT)
    return tmp_path
