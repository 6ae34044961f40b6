"""`tuner check` on real programs: it runs them on an emulated GPU, and changes nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tests.started import run_python

MIB = 1 << 20

LOOP = """\
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ACCUMULATION = 1

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    return parser.parse_args()

class Data(Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        return torch.full((1024,), index % 1000)

args = parse()
model = nn.Sequential(nn.Embedding(1000, 1024), nn.Linear(1024, 1024), nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Data(), batch_size=args.batch_size)
grad_accum = ACCUMULATION
for step, tokens in enumerate(loader, 1):
    outputs = model(tokens.cuda())
    (outputs.mean() / grad_accum).backward()
    if step % grad_accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def check(folder: Path, *words: str, gpu_memory: str | None = None) -> Any:
    """What `tuner check --json` answers; its exit code is "exit"."""
    memory = ["--gpu-memory", gpu_memory] if gpu_memory else []
    ran = run_python(
        "-m", "tuner", "check", "--gpu", "t4", "--json", *memory, "--", *words, cwd=folder
    )
    assert ran.stdout, ran.stderr
    return {**json.loads(ran.stdout), "exit": ran.returncode, "stderr": ran.stderr}


@needs_emulator
def test_a_program_that_does_not_fit_gets_a_change_that_does(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    found = check(tmp_path, "train.py", gpu_memory="1GiB")

    assert (found["exit"], found["fits"], found["source"]) == (1, False, "emulated")
    assert found["needed"]["fits"] is False
    assert found["needed"]["devices"][0]["peak_allocated_bytes"] > 700 * MIB
    suggestion = found["suggestion"]
    assert suggestion["found"]["fits"] is True
    size, rounds = suggestion["values"]["micro_batch"], suggestion["values"]["grad_accum"]
    assert size * rounds == 64
    assert size < 64
    assert "-    parser.add_argument(\"--batch-size\", type=int, default=64)" in suggestion[
        "difference"
    ].splitlines()  # fmt: skip
    assert f"+ACCUMULATION = {rounds}" in suggestion["difference"].splitlines()
    assert any("in-batch negatives" in note for note in found["notes"])
    assert program.read_text() == LOOP
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "__pycache__"}


@needs_emulator
@pytest.mark.proof
def test_a_change_that_the_run_ignores_is_not_suggested(tmp_path: Path) -> None:
    """Reading finds the batch of the loader; the loop takes 16 rows of any."""
    text = LOOP.replace("default=64", "default=16").replace("N = 1", "N = 4")
    (tmp_path / "train.py").write_text(text.replace("tokens.cuda()", "tokens[:16].cuda()"))
    found = check(tmp_path, "train.py")

    assert found["program"]["inputs"] == [[16, 1024]] * 4
    assert found["suggestion"] is None
    assert "micro_batch=64 has no effect in this program" in found["notes"]


@pytest.mark.proof
@needs_emulator
def test_a_notebook_runs_and_its_lines_are_those_of_its_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Training"]},
        {"cell_type": "code", "source": ["%%writefile sizes.py\n", "BATCH = 8"]},
        {"cell_type": "code", "source": ["!pip install it\n", "from sizes import BATCH"]},
        {
            "cell_type": "code",
            "source": LOOP.replace("args.batch_size", "BATCH").replace("args = parse()\n", ""),
        },
    ]
    path = tmp_path / "run.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))
    found = check(tmp_path, "run.ipynb")

    assert (found["exit"], found["fits"]) == (0, True)
    lines = {row["line"] for row in found["program"]["devices"][0]["allocations"]}
    assert "run.ipynb[4]:19" in lines, lines  # the model
    assert found["program"]["inputs"] == [[8, 1024]]


TRAINER = """\
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
{before}
class Data(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        row = torch.full((128,), index % 100)
        return {{"input_ids": row, "labels": row}}

config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1000, use_cache=False,
)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    gradient_checkpointing={checkpointing},
    max_steps=50,
    report_to="none",
    save_strategy="no",
)
{after}
Trainer(model=model, args=arguments, train_dataset=Data()).train()
"""


@needs_emulator
def test_settings_are_told_as_they_reach_the_trainer(tmp_path: Path) -> None:
    after = (
        "arguments.gradient_accumulation_steps = 2\n"
        "model.gradient_checkpointing_enable()\narguments.gradient_checkpointing = True"
    )
    (tmp_path / "train.py").write_text(TRAINER.format(before="", after=after, checkpointing=True))
    found = check(tmp_path, "train.py")

    settings = found["settings"]
    assert settings["micro_batch"]["arrived"] == settings["micro_batch"]["value"] == 8
    assert (settings["grad_accum"]["value"], settings["grad_accum"]["arrived"]) == (2, 2)
    assert found["program"]["settings"]["use_reentrant"] is False
    assert found["program"]["inputs"] == [[8, 128], [8, 128]]
    assert settings["gradient_checkpointing"]["problem"] == "is computed"  # the model's call stays
    assert found["suggestion"]["values"] == {"micro_batch": 16, "grad_accum": 1}
    lines = found["suggestion"]["difference"].splitlines()
    assert "+arguments.gradient_accumulation_steps = 1" in lines


@needs_emulator
@pytest.mark.proof
def test_tune_searches_the_programs_own_settings_and_apply_writes_them(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    words = ["--gpu", "t4", "--gpu-memory", "1GiB", "--results", "out"]
    ran = run_python(
        "-m", "tuner", "tune", *words, "--trials", "3", "--json", "train.py", cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    text = (tmp_path / "tune-train.yaml").read_text()
    assert "grad_accum: effective_batch // micro_batch" in text
    assert "micro_batch: batch-size, train.py:10" in text
    journal = (tmp_path / "out/tune-train/t4/trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in journal]
    trials = [trial for trial in trials if "configuration" in trial]
    assert len(trials) == 3
    # Of many micro-batches a step two ran, whose time is not that of the step.
    for trial in trials:
        rounds = trial["configuration"]["grad_accum"]
        assert ("2 micro-batches ran" in str(trial["emulated"]["notes"])) == (rounds > 2)
    assert any(trial["configuration"]["grad_accum"] > 2 for trial in trials)
    # 64 does not fit, which the prior knew: nothing ran out of memory.
    assert all(trial["configuration"]["micro_batch"] < 64 for trial in trials)
    assert answer["best"]["configuration"]["micro_batch"] < 64

    ran = run_python(
        "-m", "tuner", "apply", "--space", "tune-train.yaml", "--yes", *words, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    size = answer["best"]["configuration"]["micro_batch"]
    assert f"type=int, default={size})" in program.read_text()
    assert f"ACCUMULATION = {64 // size}" in program.read_text()
