"""`tuner tune --predict`: the front of a program's settings, of which nothing is run or written."""

import json
from pathlib import Path

from tuner.app.cli.main import run

PROGRAM = """\
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

SFTTrainer(
    model="tiny-llama-3m",
    args=SFTConfig(per_device_train_batch_size=1, gradient_accumulation_steps=4, max_length=64),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
).train()
"""


def test_the_front_and_the_change_to_the_fastest_that_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    knob = ["--knob", "per_device_train_batch_size"]
    words = ["tune", "train.py", "--gpu", "rtx4090", "--predict", "--json", *knob]
    assert run([*words, "--gpu-memory", "2GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["varied"] == {"micro_batch": [1, 2, 4]}
    best = found["best"]["configuration"]
    assert (best["micro_batch"], best["grad_accum"], best["effective_batch"]) == (4, 1, 4)
    assert found["values"] == {"micro_batch": 4, "grad_accum": 1}
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=1" in found["difference"]
    speeds = [one["predicted"]["samples_per_s"] for one in found["front"]]
    assert speeds == sorted(speeds)
    assert speeds[-1] > found["program"]["samples_per_s"]
    assert run([*words, "--gpu-memory", "400MiB"]) == 1
    assert json.loads(capsys.readouterr().out)["best"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert Path("train.py").read_text() == PROGRAM


def test_packing_is_varied_and_a_parameter_that_cannot_be_is_said_with_what_to_do(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    words = ["tune", "train.py", "--gpu", "rtx4090", "--predict", "--knob"]
    assert run([*words, "packing", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    tried = {one["configuration"]["packing"] for one in found["front"]}
    assert tried <= {True, False}
    assert run([*words, "attention"]) == 2
    assert "set attn_implementation in the program first" in capsys.readouterr().err


def test_options_of_trials_contradict_it(capsys):
    words = ["tune", "train.py", "--gpu", "rtx4090"]
    assert run([*words, "--predict", "--trials", "3"]) == 2
    assert "--trials and --predict contradict each other" in capsys.readouterr().err
    assert run([*words, "--model", "qwen3-8b"]) == 2
    assert "--model, --set and --apply need --predict" in capsys.readouterr().err
