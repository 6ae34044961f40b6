"""Values that a script takes from elsewhere are written where they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.apply.assign import Assignment
from tuner.apply.plan import make_plan
from tuner.errors import InputError
from tuner.program.names import set_at
from tuner.space.keypath import read_key

SCRIPT = """\
import argparse
from trl import SFTConfig
BATCH = 8
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--grad-accum", type=int, default=4)
    return parser.parse_args()

def main():
    args = parse()
    return SFTConfig(
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.grad_accum,
        max_length=2 ** 11,
    )
"""
BATCH = "SFTConfig.per_device_train_batch_size"
ROUNDS = "SFTConfig.gradient_accumulation_steps"


def written(folder: Path, text: str, **values: int) -> str:
    path = folder / "train.py"
    path.write_text(text)
    keys = {"batch": BATCH, "rounds": ROUNDS, "length": "SFTConfig.max_length"}
    wanted = [Assignment(read_key(keys[name]), name, value) for name, value in values.items()]
    [edit] = make_plan([path], wanted, set_at).files
    return edit.after.decode()


def test_a_constant_and_an_option_in_a_function(tmp_path: Path) -> None:
    after = written(tmp_path, SCRIPT, batch=2, rounds=16)
    assert after == SCRIPT.replace("BATCH = 8", "BATCH = 2").replace("default=4", "default=16")


def test_what_is_computed_is_left_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        written(tmp_path, SCRIPT, batch=2, length=1024)
    assert "train.py:14" in str(caught.value)
    assert "is computed, 2 ** 11" in str(caught.value)


def test_a_name_that_is_set_twice_is_left(tmp_path: Path) -> None:
    text = SCRIPT.replace("BATCH = 8\n", "BATCH = 8\nif input():\n    BATCH = 4\n")
    with pytest.raises(InputError, match="in the way"):
        written(tmp_path, text, batch=2)


def test_one_name_alone_in_several_functions_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def a():\n    size = 1\ndef b():\n    size = 2\nother = 3\n")
    wanted = [Assignment(read_key("size"), "a", 5), Assignment(read_key("other"), "b", 4)]
    [edit] = make_plan([path], wanted, set_at).files
    assert edit.after.decode().endswith("other = 4\n")
    assert edit.changes[0].value == 4
    assert len(edit.changes) == 1
