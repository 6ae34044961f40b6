"""Values that a script takes from elsewhere are written where they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.app.applying import following, user_program
from tuner.core.errors import InputError
from tuner.program.edit.assign import Assignment
from tuner.program.edit.place import Location
from tuner.program.edit.plan import Following, make_plan
from tuner.program.edit.source import SourceFile, open_source
from tuner.program.names import Script, set_at
from tuner.space.apply import read_key

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


def place_set_at(source: SourceFile, place: Location) -> Location | None:
    return set_at(Script(source), place)


FOLLOWING = Following(place_set_at)


def written(folder: Path, text: str, **values: int) -> str:
    path = folder / "train.py"
    path.write_text(text)
    keys = {"batch": BATCH, "rounds": ROUNDS, "length": "SFTConfig.max_length"}
    wanted = [Assignment(read_key(keys[name]), name, value) for name, value in values.items()]
    [edit] = make_plan([path], wanted, FOLLOWING).files
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
    with pytest.raises(InputError, match="nothing written"):
        written(tmp_path, text, batch=2)


def test_one_name_alone_in_several_functions_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def a():\n    size = 1\ndef b():\n    size = 2\nother = 3\n")
    wanted = [Assignment(read_key("size"), "a", 5), Assignment(read_key("other"), "b", 4)]
    [edit] = make_plan([path], wanted, FOLLOWING).files
    assert edit.after.decode().endswith("other = 4\n")
    assert edit.changes[0].value == 4
    assert len(edit.changes) == 1


MODELS = """\
import argparse
from trl import SFTConfig
MODELS = {
    "4b": {"batch": 8, "accum": 2, "rank": 16},
    "27b": {"batch": 1, "accum": 16, "rank": 64},
}
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="4b")
spec = MODELS[parser.parse_args().model]
SFTConfig(per_device_train_batch_size=spec["batch"], gradient_accumulation_steps=spec["accum"])
"""
KEYS = {"micro_batch": ".batch", "grad_accum": ".accum", "lora_rank": ".rank"}


def edited(folder: Path, text: str, *words: str) -> str:
    """What becomes of a program with one key for each knob; `words` are its arguments."""
    path = folder / "train.py"
    path.write_text(text)
    user = user_program([open_source(path)], [str(path), *words] if words else [])
    wanted = [Assignment(read_key(key), knob, 4) for knob, key in KEYS.items()]
    [edit] = make_plan([path], wanted, following(user)).files
    return edit.after.decode()


def test_the_entry_of_the_model_that_is_trained_is_changed(tmp_path: Path) -> None:
    small = MODELS.replace(
        '"batch": 8, "accum": 2, "rank": 16', '"batch": 4, "accum": 4, "rank": 4'
    )
    large = MODELS.replace(
        '"batch": 1, "accum": 16, "rank": 64', '"batch": 4, "accum": 4, "rank": 4'
    )
    assert edited(tmp_path, MODELS) == small
    assert edited(tmp_path, MODELS, "--model", "27b") == large
    assert edited(tmp_path, MODELS, "--model=27b") == large


def test_entries_that_nobody_can_choose_between_are_one_problem(tmp_path: Path) -> None:
    text = MODELS.replace("parser.parse_args().model", "input()")
    with pytest.raises(InputError) as caught:
        edited(tmp_path, text)
    [problem] = caught.value.problems
    assert "3 keys are there 2 times" in str(problem)
    assert "line 4 (MODELS.4b.batch), line 5 (MODELS.27b.batch)" in str(problem)
    assert ".batch = 4, .accum = 4, .rank = 4" in str(problem)


@pytest.mark.parametrize("key", ["train.batch", "eval.batch"])
def test_an_anchored_value_is_changed_for_all_that_share_it(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.yaml"
    text = "train:\n  batch: &batch 4 # batch 4 fits\neval:\n  batch: *batch\nlr: 2e-4\n"
    path.write_text(text)
    plan = make_plan([path], [Assignment(read_key(key), "micro_batch", 2)])
    assert plan.files[0].after.decode() == text.replace("&batch 4", "&batch 2")
    other = {"train.batch": "eval.batch", "eval.batch": "train.batch"}[key]
    assert plan.notes == (
        f"{path}: {other} is an alias of {key}, and becomes 2 too",
        f"{path}:2 still says 4: # batch 4 fits",
    )


def test_an_anchor_that_would_get_two_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("batch: &n 4\naccum: *n\n")
    wanted = [Assignment(read_key("batch"), "a", 2), Assignment(read_key("accum"), "b", 8)]
    with pytest.raises(InputError, match="would become 2 and also 8"):
        make_plan([path], wanted)


def test_comments_that_name_the_old_value_are_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    lines = [
        "# 14 was too much, 4.5 is no batch; batch 4 fits",
        "# 4 is the most",
        "batch = 4",
        "workers = 2  # 4 are there",
        "rank = 4  # as always",
    ]
    path.write_text("\n".join(lines) + "\n")
    plan = make_plan([path], [Assignment(read_key("batch"), "micro_batch", 2)])
    assert plan.notes == (
        f"{path}:1 still says 4: {lines[0]}",
        f"{path}:2 still says 4: {lines[1]}",
    )
