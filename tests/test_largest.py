"""`tuner check --largest`: the largest value of a setting, or the largest model, that fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.app.cli.main import run
from tuner.app.programs import highest
from tuner.space.models.catalogue import family_of

PROGRAM = """\
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list([{"text": "word " * 2000}] * 4096)
SFTTrainer(
    model="tiny-llama-3m",
    train_dataset=data,
    args=SFTConfig(
        per_device_train_batch_size=64, max_length=512, max_steps=3, report_to="none",
        save_strategy="no", bf16=True,
    ),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
).train()
"""


@pytest.mark.parametrize("end", [1, 2, 7, 64])
def test_the_highest_that_fits_is_found_from_anywhere(end):
    for most in range(-1, end):
        for start in range(-1, end + 1):
            asked: list[int] = []

            def fits(number: int, most: int = most, asked: list[int] = asked) -> bool:
                asked.append(number)
                return number <= most

            assert highest(fits, start, end) == most
            assert len(set(asked)) == len(asked)
            # An answer that is right already is confirmed by itself and the next.
            assert len(asked) <= 2 or start != most


def test_a_family_is_of_one_task_and_from_small_to_large():
    family = family_of("Qwen/Qwen3-8B")
    assert {"qwen3-0.6b", "qwen3-8b", "qwen3-32b"} <= {entry.id for entry in family}
    assert "qwen3-30b-a3b" not in {entry.id for entry in family}  # another architecture
    assert [entry.params for entry in family] == sorted(entry.params or 0 for entry in family)
    assert family_of("no-such-model") == []


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = run(["check", "--gpu", "rtx4090", "--gpu-memory", "1GiB", "--json", *words])
    out, err = capsys.readouterr()
    assert out, err
    return {**json.loads(out), "exit": code}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path / "train.py"


def test_the_value_fits_and_the_next_does_not(program, capsys):
    found = answer(capsys, "--predict", "--largest", "micro_batch", "train.py")
    assert (found["exit"], found["source"], found["own"]) == (0, "predicted", 64)
    assert program.read_text() == PROGRAM
    assert found["next_value"] == found["value"] + 1
    assert f"+        per_device_train_batch_size={found['value']}," in found["difference"]
    for size, fits in ((found["value"], True), (found["next_value"], False)):
        program.write_text(PROGRAM.replace("batch_size=64", f"batch_size={size}"))
        checked = answer(capsys, "--predict", "--no-changes", "train.py")
        assert checked["fits"] is fits


def test_nothing_fits_where_the_smallest_does_not(program, capsys):
    program.write_text(PROGRAM.replace("batch_size=64", "batch_size=4096"))
    found = answer(capsys, "--predict", "--largest", "lora_rank", "train.py")
    assert (found["exit"], found["value"], found["next_value"]) == (1, None, 8)


def test_a_setting_that_cannot_be_written_is_refused(program, capsys):
    (program.parent / "length.txt").write_text("512")
    computed = 'max_length=int(open("length.txt").read())'
    program.write_text(PROGRAM.replace("max_length=512", computed))
    assert (
        run(["check", "--gpu", "rtx4090", "--predict", "--largest", "max_length", "train.py"]) == 2
    )
    assert "train.py:10 max_length: is computed" in capsys.readouterr().err


def test_a_setting_that_the_program_leaves_out_is_written(program, capsys):
    program.write_text(PROGRAM.replace(", max_length=512", ""))
    found = answer(capsys, "--predict", "--largest", "max_length", "train.py")
    assert (found["exit"], found["own"]) == (0, 1024)
    assert found["value"] < found["own"]
    assert f"max_length={found['value']}" in found["difference"]


def test_it_is_not_taken_for_a_run(program, capsys):
    assert run(["check", "--gpu", "rtx4090", "--largest", "micro_batch", "train.py"]) == 2
    assert "add --predict" in capsys.readouterr().err
