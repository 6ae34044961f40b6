"""A model of two layers, a space about it, and a journal for it: nothing takes seconds."""

import json
from dataclasses import replace
from pathlib import Path

import click
from results_samples import make_prediction
from shared_cases.tiny_model import CONFIG
from tune_fakes import record_of

from tuner.app.cli.main import cli
from tuner.core.records import Configuration, MemoryBudget, Outcome, Status, TrialRecord
from tuner.core.units import GIB
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

SPACE = """\
name: tiny
description: a model of two layers
workload: causal_lm
model: ./tiny-model
knobs:
  micro_batch: [1, 2, 4]
  lora_rank: [4, 8]
  precision: [fp16, bf16]
  max_length: [16, 32, 64, 96, 128]
fixed:
  effective_batch: 4
derived:
  grad_accum: effective_batch // micro_batch
floors:
  - lora_rank >= 8
data: {examples: 1000, epochs: 2, token_lengths: {mean: 20, max: 30}, padding: longest}
baseline: {micro_batch: 1, lora_rank: 8, precision: fp16, max_length: 32}
"""


def write_samples(folder: Path) -> None:
    """`tiny-model/config.json` and `tiny.yaml` in `folder`."""
    (folder / "tiny-model").mkdir()
    (folder / "tiny-model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tiny.yaml").write_text(SPACE)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for bytecode."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def command_of(name: str) -> click.Command:
    """The command of this name."""
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def make_trial(folder: Path, gib: float, tokens_per_s: float, **settings: object) -> TrialRecord:
    """A trial of `tiny.yaml` in `folder` on the A6000 with these numbers."""
    gpu = get_gpu("a6000")
    configuration = configure(load_space(str(folder / "tiny.yaml")), settings)
    device_bytes, margin_bytes = round(gib * GIB), GIB
    budget = MemoryBudget(gpu.memory_bytes, margin_bytes)
    prediction = make_prediction(device_bytes, tokens_per_s, gpu=gpu, budget=budget)
    oom = device_bytes > gpu.memory_bytes
    outcome = Outcome(Status.OOM if oom else Status.OK, prediction=prediction)
    return trial_of(configuration, outcome)


def trial_of(configuration: Configuration, outcome: Outcome) -> TrialRecord:
    """The record of `outcome`."""
    record = record_of(configuration, outcome, space="tiny")
    return replace(record, trial_id=f"run1-{configuration.key[:4]}")
