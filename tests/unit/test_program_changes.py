"""Changes of people's programs: exactly the value that is meant, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import program

from tuner.core.errors import InputError
from tuner.program.changes import Change, change
from tuner.program.settings import settings_of

HEAD = """\
from trl import SFTConfig, SFTTrainer
"""
TRAIN = """
SFTTrainer("gpt2", args=args).train()
"""


def changed(folder: Path, monkeypatch, text: str, words: str = "", **values) -> tuple[str, Change]:
    """The text of the script, or of its file c.yaml, with other values."""
    (folder / "train.py").write_bytes(text.encode())
    monkeypatch.chdir(folder)
    made = change(settings_of(program(f"python train.py {words}".strip())), values)
    (after,) = [new.decode() for _, new in made.files.values()] or [text]
    return after, made


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("args = SFTConfig(per_device_train_batch_size=4)\n",
         "args = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)\n"),
        ("args = SFTConfig(\n    per_device_train_batch_size=4\n)\n",
         "args = SFTConfig(\n    per_device_train_batch_size=4,\n"
         "    gradient_accumulation_steps=2,\n)\n"),
        ("args = SFTConfig(\n    per_device_train_batch_size = 4, # x\n)\n",
         "args = SFTConfig(\n    per_device_train_batch_size = 4, # x\n"
         "    gradient_accumulation_steps = 2,\n)\n"),
        ("args = SFTConfig(\n    per_device_train_batch_size=4  # x\n)\n",
         "args = SFTConfig(\n    per_device_train_batch_size=4,  # x\n"
         "    gradient_accumulation_steps=2,\n)\n"),
        ("args = SFTConfig(\r\n    per_device_train_batch_size=4,\r\n)\r\n",
         "args = SFTConfig(\r\n    per_device_train_batch_size=4,\r\n"
         "    gradient_accumulation_steps=2,\r\n)\r\n"),
        ("args = SFTConfig()\n", "args = SFTConfig(gradient_accumulation_steps=2)\n"),
        ("args = SFTConfig('out')\n", "args = SFTConfig('out', gradient_accumulation_steps=2)\n"),
        ("more = {'per_device_train_batch_size': 4}\nargs = SFTConfig(**more)\n",
         "more = {'per_device_train_batch_size': 4}\n"
         "args = SFTConfig(**more, gradient_accumulation_steps=2)\n"),
    ],
)  # fmt: skip
def test_a_setting_is_added_where_the_trainer_reads_it(text, wanted, tmp_path, monkeypatch):
    after, _ = changed(tmp_path, monkeypatch, HEAD + text + TRAIN, grad_accum=2)
    assert after == HEAD + wanted + TRAIN


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("c.yaml", "per_device_train_batch_size: 4 # x",
         "per_device_train_batch_size: 4 # x\ngradient_accumulation_steps: 2"),
        ("c.yaml", "{per_device_train_batch_size: 4, bf16: true}\n",
         "{per_device_train_batch_size: 4, gradient_accumulation_steps: 2, bf16: true}\n"),
        ("c.json", '{\n  "per_device_train_batch_size": 4\n}\n',
         '{\n  "per_device_train_batch_size": 4,\n  "gradient_accumulation_steps": 2\n}\n'),
        ("c.toml", "per_device_train_batch_size = 4\nbf16 = true\n",
         "per_device_train_batch_size = 4\ngradient_accumulation_steps = 2\nbf16 = true\n"),
    ],
)  # fmt: skip
def test_a_setting_is_added_to_the_file_that_has_the_others(
    name, before, after, tmp_path, monkeypatch
):
    (tmp_path / name).write_text(before)
    load = {
        "c.yaml": "import yaml\nC = yaml.safe_load(open('c.yaml'))\n",
        "c.json": "import json\nC = json.load(open('c.json'))\n",
        "c.toml": "import tomllib\nC = tomllib.loads(open('c.toml').read())\n",
    }[name]
    text = f"{load}{HEAD}args = SFTConfig(**C){TRAIN}"
    assert changed(tmp_path, monkeypatch, text, grad_accum=2)[0] == after


def test_nothing_is_added_that_only_a_stand_in_would_take(tmp_path, monkeypatch):
    text = "import lightning as L\nL.Trainer(accumulate_grad_batches=2).fit(None)\n"
    with pytest.raises(InputError, match="nothing in the program sets gradient_checkpointing"):
        changed(tmp_path, monkeypatch, text, gradient_checkpointing=True)


def test_one_constant_for_two_settings_gets_no_two_values(tmp_path, monkeypatch):
    text = (
        f"{HEAD}N = 4\nargs = SFTConfig(per_device_train_batch_size=N, "
        f"gradient_accumulation_steps=N){TRAIN}"
    )
    after, _ = changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=2)
    assert after == text.replace("N = 4", "N = 2")
    with pytest.raises(InputError, match="sets something else too"):
        changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=8)
    with pytest.raises(InputError, match="grad_accum is to stay as it is, and would read as 2"):
        changed(tmp_path, monkeypatch, text, micro_batch=2)


def test_a_value_that_follows_from_another_needs_no_place(tmp_path, monkeypatch):
    text = (
        f"{HEAD}B = 4\nargs = SFTConfig(per_device_train_batch_size=B, "
        f"gradient_accumulation_steps=64 // B){TRAIN}"
    )
    after, _ = changed(tmp_path, monkeypatch, text, micro_batch=8, grad_accum=8)
    assert after == text.replace("B = 4", "B = 8")
    with pytest.raises(InputError, match="is computed: set it to 32 by hand"):
        changed(tmp_path, monkeypatch, text, micro_batch=8, grad_accum=32)


def test_words_that_are_added_move_no_other(tmp_path, monkeypatch):
    text = (
        "from transformers import HfArgumentParser\n"
        f"{HEAD}(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(){TRAIN}"
    )
    words = "--per_device_train_batch_size 4 --optim adafactor --max_length 64"
    _, made = changed(
        tmp_path, monkeypatch, text, words, grad_accum=2, max_length=32, optimizer="sgd",
        micro_batch=8,
    )  # fmt: skip
    assert " ".join(made.after.command[2:]) == (
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
        "--optim sgd --max_length 32"
    )


def test_a_shell_script_is_changed_where_its_variable_stands(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        f"import sys\n{HEAD}args = SFTConfig(per_device_train_batch_size=int(sys.argv[1])){TRAIN}"
    )
    script = "BATCH=${BATCH:-4}\nfor i in 1; do\n  python train.py $BATCH  # 4 fits\ndone\n"
    (tmp_path / "run.sh").write_text(script)
    monkeypatch.chdir(tmp_path)
    made = change(settings_of(program("bash run.sh")), {"micro_batch": 2})
    ((_, after),) = made.files.values()
    assert after.decode() == script.replace(":-4", ":-2")


def test_a_program_is_never_written(tmp_path, monkeypatch):
    text = f"{HEAD}args = SFTConfig(per_device_train_batch_size=4){TRAIN}"
    changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=3)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("train.py", text)]


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.dictionaries(
        st.sampled_from(["micro_batch", "grad_accum", "max_length"]), st.integers(1, 10**6),
        min_size=1,
    )
)  # fmt: skip
def test_any_values_are_written_and_taken_back(values, tmp_path, monkeypatch):
    text = f"{HEAD}B, LENGTH = 4, 1024\nargs = SFTConfig(\n    per_device_train_batch_size=B,\n"
    text += f"    gradient_accumulation_steps=2,\n    max_length=LENGTH,\n){TRAIN}"
    own = {"micro_batch": 4, "grad_accum": 2, "max_length": 1024}
    _, made = changed(tmp_path, monkeypatch, text, **values)
    back = change(settings_of(made.after), {knob: own[knob] for knob in values}).after
    assert [s.data for s in back.sources] == [text.encode()]


def test_every_refusal_comes_at_once_and_says_what_to_change_by_hand(tmp_path, monkeypatch):
    text = (
        f"import sys\n{HEAD}args = SFTConfig(per_device_train_batch_size=len(sys.argv),\n"
        f"    gradient_accumulation_steps=len(sys.path)){TRAIN}"
    )
    with pytest.raises(InputError) as refused:
        changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=8)
    assert [str(problem) for problem in refused.value.problems] == [
        "train.py:3 micro_batch: is computed: set it to 2 by hand",
        "train.py:4 grad_accum: is computed: set it to 8 by hand",
    ]
