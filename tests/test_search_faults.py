"""A measured search on the processor in which values of a knob raise, hang and eat memory."""

import json
from pathlib import Path

import pytest
from started import start

from tuner.core.records import Status
from tuner.searches.journal import latest, read_journal

ROOT = Path(__file__).parents[1]

WORKLOAD = """\
import time
import torch
from tuner.predict.training.causal_lm import CausalLM

def eat():
    held = []
    while True:
        held.append(torch.ones(64 << 20, dtype=torch.uint8))

def fail():
    raise NotImplementedError("no kernel of this kind on this processor")

WAYS = {"plain": lambda: None, "raises": fail, "hangs": lambda: time.sleep(600), "eats": eat}

class Faulty(CausalLM):
    def open(self, model_config, configuration, environment):
        WAYS[str(configuration["way"])]()
        return super().open(model_config, configuration, environment)
"""

SPACE = """\
name: faulty
workload: "faulty_ways:Faulty"
model: tiny-llama-3m
gpus: [cpu]
knobs:
  way: [raises, hangs, eats, plain]
  micro_batch: [2, 4, 8]
  lora_rank: [4, 8]
fixed:
  effective_batch: 8
  max_length: 32
  precision: fp32
  gradient_checkpointing: false
  optimizer: adamw_torch
  attention: sdpa
  lora_targets: [q_proj, v_proj]
derived: {grad_accum: effective_batch // micro_batch}
data: {examples: 2000, epochs: 1, token_lengths: {mean: 30, max: 32}, padding: longest}
"""


@pytest.mark.proof
def test_three_values_that_fail_are_named_and_the_rest_is_recommended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "faulty_ways.py").write_text(WORKLOAD)
    (tmp_path / "faulty.yaml").write_text(SPACE)
    process = start(
        "search", "--space", "faulty.yaml", "--gpu", "cpu", "--trials", "14", "--budget", "0.3s",
        "--timeout", "30s", "--memory-limit", "2GiB", "--no-verify", "--json", "--quiet",
    )  # fmt: skip
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, out + err
    assert "Traceback" not in out + err
    answer = json.loads(out)
    records = read_journal(tmp_path / "results" / "faulty" / "cpu" / "trials.jsonl").records
    ended = {(r.configuration["way"], r.outcome.status) for r in records}
    assert ended == {
        ("plain", Status.OK), ("raises", Status.CRASHED),
        ("hangs", Status.TIMEOUT), ("eats", Status.OOM),
    }  # fmt: skip
    # The search may measure its fastest once more, and recommends by the mean of both.
    plain = [r for r in latest(records) if r.fits]
    assert len(plain) >= 4  # of the six that there are
    fastest = max(plain, key=lambda r: r.outcome.measurement.speed.samples_per_s)
    assert answer["best"]["configuration"] == fastest.configuration.to_dict()
    for named in ("way=raises failed", "way=hangs failed", "way=eats ran out of memory"):
        assert any(named in note for note in answer["notes"]), answer["notes"]
    assert sum(r.configuration["way"] != "plain" for r in records) <= 8
