"""`tuner search` of trainings in stages, predicted and on the processor, in tiny versions."""

import csv
import json
import os
from pathlib import Path

import pytest
import yaml
from encoder_samples import PHASES, TINY_BERT, TINY_ROBERTA
from started import run_python

from tuner.app.cli.main import run
from tuner.core.records import Status
from tuner.searches.journal import read_journal

ROOT = Path(__file__).parents[1]

CURRICULUM = """\
name: curriculum
workload: contrastive
model: ./tiny-bert
knobs:
  micro_batch: [2, 4]
fixed:
  effective_batch: 8
  channels: [title, text]
  short_channels: [title]
  short_length: 8
  max_length: 64
  lora_rank: 4
  mixed_precision: "no"
  optimizer: adamw_torch
stages:
  - {name: warm, set: {n_positives: 4, n_negatives: 3}, examples: 400}
  - {name: hard, set: {n_positives: 2, n_negatives: [24, 48]}, examples: 200, epochs: 2}
  - {name: last, set: {n_positives: 2, n_negatives: 3}, examples: 200}
baseline: {micro_batch: 2, hard.n_negatives: 24}
apply:
  config: {file: config.yaml, keys: {.batch_size: micro_batch}}
  hard: {file: hard.yaml, stage: hard, keys: {.n_negatives: n_negatives}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    TINY_BERT.save_pretrained("tiny-bert")
    TINY_ROBERTA.save_pretrained("tiny-roberta")
    Path("curriculum.yaml").write_text(CURRICULUM)
    Path("phases.yaml").write_text(PHASES)
    return tmp_path


def search(*arguments: str) -> str:
    done = run_python(
        "-m", "tuner", "search", "--workers", "1", *arguments, timeout=900, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.proof
def test_a_predicted_search_says_which_stage_limits(folder, capsys):
    target = ["--space", "curriculum.yaml", "--gpu", "t4"]
    text = search(*target, "--trials", "4", "--price", "0.5")
    for part in ("predicted all 4 configurations in 3 stages", "in hard (n_positives=2,",
                 "the hardest of 3 stages", "an epoch of 3 stages with 800 examples",
                 "Stages (predicted)"):  # fmt: skip
        assert part in text, part
    results = folder / "results" / "curriculum" / "t4"
    records = read_journal(results / "trials.jsonl").records
    assert len(read_journal(results / "predicted.jsonl.gz").records) == 4
    for record in records:
        found = record.outcome.prediction
        sizes = {name: stage.device_bytes for name, stage in found.stages.items()}
        assert record.outcome.limiting_stage == found.limiting_stage == "hard"
        assert found.memory.device_bytes == max(sizes.values()) > sizes["warm"] == sizes["last"]
        samples = {"warm": 400, "hard": 400, "last": 200}
        run_s = sum(n / found.stages[name].samples_per_s for name, n in samples.items())
        assert found.speed.samples_per_s == pytest.approx(1000 / run_s)
    best = yaml.safe_load((results / "best.yaml").read_text())
    assert best["limiting_stage"] == "hard"
    assert best["run"]["time_per_run_s"] > best["run"]["time_per_epoch_s"]
    rows = list(csv.DictReader((results / "pareto.csv").read_text().splitlines()))
    assert {row["limiting_stage"] for row in rows} == {"hard"}
    assert "the hardest" in (results / "report.html").read_text()

    assert run(["show", *target, records[0].trial_id]) == 0
    assert "Stages (predicted)" in capsys.readouterr().out
    assert run(["best", *target, "--where", "hard.n_negatives >= 48", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["configuration"]["hard.n_negatives"] == 48
    assert chosen["stages"]["hard"]["settings"] == "n_positives=2, n_negatives=48"

    (folder / "config.yaml").write_text("batch_size: 1  # small\nlr: 2e-4")
    (folder / "hard.yaml").write_text("n_negatives: 1\nname: ${stage}")
    to = ["config.yaml", "hard.yaml", "--yes"]
    assert run(["apply", *target, "--where", "hard.n_negatives >= 48", *to]) == 0
    size = chosen["configuration"]["micro_batch"]
    assert (folder / "config.yaml").read_text() == f"batch_size: {size}  # small\nlr: 2e-4"
    assert (folder / "hard.yaml").read_text() == "n_negatives: 48\nname: ${stage}"


@pytest.mark.proof
def test_every_stage_trains_on_the_processor(folder):
    text = search(
        "--space", "phases.yaml", "--gpu", "cpu", "--budget", "0.2s", "--trials", "2"
    )  # fmt: skip
    assert "Stages (measured)" in text
    records = read_journal(folder / "results" / "phases" / "cpu" / "trials.jsonl").records
    tried = [record for record in records if not record.verification]
    assert len(tried) == 2
    for record in tried:
        measured = record.outcome.measurement
        assert record.outcome.status is Status.OK, record.outcome.message
        assert list(measured.stages) == ["first", "second"]
        assert record.outcome.prediction is None  # nothing is predicted for a processor
        slowest = min(stage.samples_per_s for stage in measured.stages.values())
        fastest = max(stage.samples_per_s for stage in measured.stages.values())
        assert slowest <= measured.speed.samples_per_s <= fastest
        assert measured.memory.device_bytes == max(
            stage.device_bytes for stage in measured.stages.values()
        )
