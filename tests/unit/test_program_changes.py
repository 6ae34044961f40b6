"""Changes of people's programs: exactly the value that is meant, or a refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import FOLDER, make_tools, program, sections

from tuner.core.errors import InputError
from tuner.program.changes import can_change, change
from tuner.program.edit.source import read_places
from tuner.program.program import Program
from tuner.program.setting import NAMES, Setting
from tuner.program.settings import find_settings

COUNTS = ("micro_batch", "grad_accum", "max_length", "lora_rank")
SWITCHES = ("gradient_checkpointing", "use_reentrant", "packing", "fused_kernels")
WORDS = {
    "optimizer": ("adamw_torch", "paged_adamw_8bit", "adafactor"),
    "attention": ("sdpa", "eager", "kernels-community/flash-attn2"),
}


def values_of(setting: Setting) -> st.SearchStrategy:
    if setting.knob in COUNTS:
        return st.integers(1, 10**6)
    if setting.knob in SWITCHES:
        # "unsloth" is a way to checkpoint, which no boolean takes the place of.
        return st.just(setting.value) if isinstance(setting.value, str) else st.booleans()
    return st.sampled_from(WORDS[setting.knob])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Every program, with its settings."""
    tools = tmp_path_factory.mktemp("tools") / "bin"
    make_tools(tools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        patch.chdir(FOLDER)
        read = [program(command) for command in sections()]
        yield [(one, find_settings(one)) for one in read]


def shown(found: dict[str, Setting]) -> dict[str, object]:
    return {knob: (type(s.value), s.value, s.problem) for knob, s in found.items()}


@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_is_written_and_read_and_taken_back(programs, data):
    read, found = data.draw(st.sampled_from(programs))
    knobs = [k for k in found if can_change(read, found, k)]
    if not knobs:
        return
    chosen = data.draw(st.lists(st.sampled_from(knobs), unique=True, min_size=1, max_size=4))
    values = {knob: data.draw(values_of(found[knob])) for knob in chosen}
    made = change(read, found, values)
    now = find_settings(made.after)
    for source in made.after.sources:
        assert read_places(source.data, source.path) == source.places
    assert {k: now[k].value for k in values} == values
    others = set(found) - set(values)
    assert {k: shown(now)[k] for k in others} == {k: shown(found)[k] for k in others}
    assert set(now) == set(found)
    back = change(made.after, now, {k: found[k].value for k in values}).after
    if "4_096" not in "".join(p.raw for s in read.sources for p in s.places):
        assert [s.data for s in back.sources] == [s.data for s in read.sources]
    assert [w.lower() for w in back.command] == [w.lower() for w in read.command]


@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_left_out_is_added_where_the_trainer_reads_it(programs, data):
    read, found = data.draw(st.sampled_from(programs))
    values = {"grad_accum": data.draw(st.integers(1, 99)), "gradient_checkpointing": True}
    values = {k: v for k, v in values.items() if k not in found and can_change(read, found, k)}
    made = change(read, found, values)
    now = find_settings(made.after)
    assert {k: now[k].value for k in values} == values
    assert {k: v for k, v in shown(now).items() if k not in values} == shown(found)
    for before, after in zip(read.sources, made.after.sources, strict=True):
        assert (b"\r\n" in before.data) == (b"\r\n" in after.data)
        assert before.data.count(b"\r") == 0 or after.data.count(b"\r") == after.data.count(b"\n")


def test_a_program_is_never_written(programs):
    before = {path: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
    for read, found in programs:
        for knob in NAMES:
            if can_change(read, found, knob) and knob in COUNTS:
                change(read, found, {knob: 5})
    assert {path: path.read_bytes() for path in before} == before


def changed(folder: Path, monkeypatch, text: str, words: str = "", **values) -> tuple[str, Program]:
    name = "train.py" if "(" in text else "train.yaml"
    (folder / name).write_bytes(text.encode())
    monkeypatch.chdir(folder)
    read = program(f"python {name} {words}".strip())
    after = change(read, find_settings(read), values).after
    return after.sources[0].data.decode(), after


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("TrainingArguments(per_device_train_batch_size=4)\n",
         "TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=2)\n"),
        ("TrainingArguments(\n    per_device_train_batch_size=4\n)\n",
         "TrainingArguments(\n    per_device_train_batch_size=4,\n"
         "    gradient_accumulation_steps=2,\n)\n"),
        ("TrainingArguments(\n    per_device_train_batch_size = 4, # x\n)\n",
         "TrainingArguments(\n    per_device_train_batch_size = 4, # x\n"
         "    gradient_accumulation_steps = 2,\n)\n"),
        ("TrainingArguments(\n    per_device_train_batch_size=4  # x\n)\n",
         "TrainingArguments(\n    per_device_train_batch_size=4,  # x\n"
         "    gradient_accumulation_steps=2,\n)\n"),
        ("TrainingArguments(\r\n    per_device_train_batch_size=4,\r\n)\r\n",
         "TrainingArguments(\r\n    per_device_train_batch_size=4,\r\n"
         "    gradient_accumulation_steps=2,\r\n)\r\n"),
        ("micro_batch_size: 4 # x", "micro_batch_size: 4 # x\ngradient_accumulation_steps: 2"),
        ("a:\n  micro_batch_size: 4\nb: 1\n",
         "a:\n  micro_batch_size: 4\n  gradient_accumulation_steps: 2\nb: 1\n"),
        ("a: {micro_batch_size: 4, c: 1}\n",
         "a: {micro_batch_size: 4, gradient_accumulation_steps: 2, c: 1}\n"),
    ],
)  # fmt: skip
def test_a_setting_is_added_behind_its_neighbour(text, wanted, tmp_path, monkeypatch):
    assert changed(tmp_path, monkeypatch, text, grad_accum=2)[0] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "micro_batch_size = 4\nprint(micro_batch_size)\n",
        "class Config:\n    micro_batch_size = 4\nprint(Config())\n",
        "TrainingArguments(per_device_train_batch_size=4, **more)\n",
        "a = TrainingArguments(per_device_train_batch_size=4)\n"
        "b = TrainingArguments(per_device_train_batch_size=4)\n",
        "train(dict(micro_batch_size=4))\n",
    ],
)
def test_nothing_is_added_where_nobody_may_read_it(text, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nothing in the program sets grad_accum: set it to 2 by"):
        changed(tmp_path, monkeypatch, text, grad_accum=2)


def test_one_constant_for_two_settings_gets_no_two_values(tmp_path, monkeypatch):
    text = (
        "N = 4\nTrainingArguments(per_device_train_batch_size=N, gradient_accumulation_steps=N)\n"
    )
    assert changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=2)[0].startswith("N = 2")
    with pytest.raises(InputError, match="sets something else too"):
        changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=8)
    with pytest.raises(InputError, match="grad_accum is to be 4, and would read as 2"):
        changed(tmp_path, monkeypatch, text, micro_batch=2)


def test_words_that_are_added_move_no_other(tmp_path, monkeypatch):
    words = "--per_device_train_batch_size 4 --optim adafactor --max_length 64"
    _, after = changed(
        tmp_path, monkeypatch, "main()\n", words, grad_accum=2, max_length=32, optimizer="sgd",
        micro_batch=8, gradient_checkpointing=True,
    )  # fmt: skip
    assert " ".join(after.command[2:]) == (
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
        "--gradient_checkpointing true --optim sgd --max_length 32"
    )


def test_every_refusal_comes_at_once_and_says_what_to_change_by_hand(tmp_path, monkeypatch):
    text = "TrainingArguments(per_device_train_batch_size=f(), gradient_accumulation_steps=g())\n"
    with pytest.raises(InputError) as refused:
        changed(tmp_path, monkeypatch, text, micro_batch=2, grad_accum=8, packing=True)
    assert [str(problem) for problem in refused.value.problems] == [
        "train.py:1 per_device_train_batch_size: is computed: f(): set it to 2 by hand",
        "train.py:1 gradient_accumulation_steps: is computed: g(): set it to 8 by hand",
        "nothing in the program sets packing: set it to true by hand, beside micro_batch "
        "(train.py:1)",
    ]
