"""What `tuner apply` sees of values in a program that it runs, changed, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulating import needs_emulator
from tuner.app.applying import user_program
from tuner.app.arriving import Arrivals, look
from tuner.core.errors import InputError
from tuner.core.records import KnobValue
from tuner.program.edit.assign import Assignment
from tuner.program.edit.plan import make_plan
from tuner.program.edit.source import open_source
from tuner.space.apply import read_key
from tuner.space.gpus import get_gpu

LOOP = """\
import sys
from pathlib import Path
import torch
import yaml
from torch import nn

config = yaml.safe_load(Path(__file__).with_name("config.yaml").read_text())
model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, rounds = config["training"]["batch_size"], config["training"]["accumulation_steps"]
while True:
    for _ in range(rounds):
        tokens = torch.randint(0, 1000, (rows, 256)).cuda()  # max_length of an earlier run
        model(tokens).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONFIG = """\
training: {batch_size: 8, accumulation_steps: 2}
data: {max_length: 512}
"""
CHANGES: dict[str, tuple[str, KnobValue]] = {
    "micro_batch": ("training.batch_size", 4),
    "grad_accum": ("training.accumulation_steps", 3),
    "max_length": ("data.max_length", 128),
}
TRAINER = """\
import torch
from constants import BATCH, OPTIMIZER
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Data(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        row = torch.full((64,), index % 100)
        return {"input_ids": row, "labels": row}

model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1000, use_cache=False,
))
model.gradient_checkpointing_enable()
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=BATCH, gradient_checkpointing=True,
    optim=OPTIMIZER, report_to="none", save_strategy="no",
)
arguments.per_device_train_batch_size = 8
Trainer(model=model, args=arguments, train_dataset=Data()).train()
"""


def arrivals(
    folder: Path, file: str, changes: dict[str, tuple[str, KnobValue]], *words: str
) -> Arrivals:
    """How changes of a file arrive; the folder stays as it is."""
    path = folder / file
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    wanted = [Assignment(read_key(key), knob, value) for knob, (key, value) in changes.items()]
    plan = make_plan([path], wanted)
    values = {knob: value for knob, (_, value) in changes.items()}
    user = user_program([open_source(path)], words)
    found = look(user, plan.files, values, get_gpu("t4"), way="emulate")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return found


@needs_emulator
def test_a_loop_that_reads_its_file_and_has_a_length_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "config.yaml").write_text(CONFIG)
    found = arrivals(tmp_path, "config.yaml", CHANGES, str(tmp_path / "train.py"))

    assert {v.knob: (v.arrived, v.seen) for v in found.values} == {
        "micro_batch": (4, "emulated"),
        "grad_accum": (3, "emulated"),
        "max_length": (256, "emulated"),
    }
    with pytest.raises(InputError, match="max_length is to be 128, and the training gets 256"):
        found.require()


@pytest.mark.proof
@needs_emulator
def test_a_value_that_the_script_sets_again_after_its_trainer_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "constants.py").write_text('BATCH = 4\nOPTIMIZER = "adamw_torch"\n')
    found = arrivals(
        tmp_path,
        "constants.py",
        {"micro_batch": ("BATCH", 2), "optimizer": ("OPTIMIZER", "sgd")},
        str(tmp_path / "train.py"),
    )
    assert {v.knob: (v.arrived, v.seen) for v in found.values} == {
        "micro_batch": (8, "emulated"),
        "optimizer": ("sgd", "emulated"),
    }


@needs_emulator
def test_a_program_without_its_data_is_told_and_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("while True:", 'open("data.jsonl")\nif True:'))
    (tmp_path / "config.yaml").write_text(CONFIG)
    changes = {knob: CHANGES[knob] for knob in ("micro_batch", "max_length")}
    found = arrivals(tmp_path, "config.yaml", changes, str(tmp_path / "train.py"))

    assert {v.knob: v.seen for v in found.values} == {"micro_batch": "read", "max_length": ""}
    [note] = found.notes
    assert "could not be run to its first step: FileNotFoundError" in note
    assert "train.py:11)" in note
    found.require()
