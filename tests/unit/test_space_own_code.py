"""Spaces with a command or a workload of the user's own: names, types, placeholders, problems."""

import json

import pytest

from tuner.core.errors import InputError
from tuner.core.setup.schemas import memory_order
from tuner.space import configure, load_space
from tuner.space.load import read_space

GOOD = """
name: mine
command: "python train.py --batch {micro_batch} {flag} --lr={lr} '{text}'"
samples_per_step: micro_batch * grad_accum
env: {SEEN: "{micro_batch}"}
knobs:
  micro_batch: {powers_of_two: {min: 1, max: 8}}
  lr: [2e-4, 0.1]
  flag: ["", --fast]
  text: [a b, no]
  packed: [true, false]
fixed:
  effective: 8
  targets: [q, v]
derived:
  grad_accum: effective // micro_batch
constraints: [effective % micro_batch == 0]
floors: [micro_batch >= 2]
baseline: {micro_batch: 1, lr: 0.1, flag: --fast, text: a b, packed: true}
"""


def read(text):
    return read_space(text, "mine.yaml")


def problems(text):
    with pytest.raises(InputError) as caught:
        read(text)
    return "\n".join(map(str, caught.value.problems))


def test_names_are_free_and_typed_by_their_values():
    space = read(GOOD)
    assert space.workload == "command"
    assert space.model is None
    assert not space.predictable
    kinds = {name: term.kind for name, term in space.terms.items()}
    assert kinds == {"micro_batch": "int", "lr": "float", "flag": "word", "text": "word",
                     "packed": "bool", "effective": "int", "targets": "names",
                     "grad_accum": "any"}  # fmt: skip
    assert space.count(use_floors=False) == 4 * 2 * 2 * 2 * 2
    assert space.count() == 3 * 2 * 2 * 2 * 2


def test_a_configuration_becomes_a_command():
    space = read(GOOD)
    found = configure(space, {"micro_batch": "4", "flag": "--fast", "text": "a b"})
    assert found["grad_accum"] == 2
    assert space.command.arguments(found) == [
        "python", "train.py", "--batch", "4", "--fast", "--lr=0.1", "a b"]  # fmt: skip
    assert space.command.samples(found) == 8
    environment = space.command.environment(found)
    assert environment["SEEN"] == "4"
    assert json.loads(environment["TUNER_CONFIG"]) == found.to_dict()


def test_an_argument_with_an_empty_value_is_left_out():
    space = read(GOOD.replace("flag: --fast,", 'flag: "",'))
    assert "--fast" not in space.command.arguments(configure(space))
    assert "" not in space.command.arguments(configure(space))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{micro_batch} {flag}", "{micro_bach} {flag}", "did you mean 'micro_batch'?"),
        ("{micro_batch} {flag}", "{micro_batch:d} {flag}", "braces that are not a placeholder"),
        ("{micro_batch} {flag}", "{ {flag}", "braces that are not a placeholder"),
        ("'{text}'\"", "'{text}\"", "cannot be split into words"),
        ("samples_per_step: micro_batch", "samples_per_step: micro_bach", "micro_bach"),
        ("name: mine", "name: mine\nworkload: causal_lm", "there is also a command"),
        ("name: mine", "name: mine\ncwd: no/such/folder", "there is no folder"),
        ("SEEN:", "TUNER_SEEN:", "cannot be set"),
        ("  effective: 8", "  effective: 8\n  not-a-name: 1", "not a name for a value"),
        ("  effective: 8", "  effective: 8\n  lambda: 1", "not a name for a value"),
        ("text: a b, packed", "text: a b, unknown: 1, packed", "unknown"),
        ("constraints: [effective", "constraints: [effectiv", "effectiv"),
        ("lr: [2e-4, 0.1]", "lr: [2e-4, 0.1, 2e-4]", "listed twice"),
    ],
)
def test_what_is_wrong_is_said(old, new, said):
    assert old in GOOD
    assert said in problems(GOOD.replace(old, new))


def test_a_space_declares_what_takes_memory():
    text = GOOD + "memory: {micro_batch: increases, lr: decreases, packed: [true, false]}\n"
    space = read(text)
    assert space.memory == {
        "micro_batch": (1, 2, 4, 8), "lr": (0.1, 2e-4), "packed": (True, False)
    }  # fmt: skip
    order = memory_order(space.workload, space.memory)
    small, large = (
        order.split(configure(space, {"micro_batch": 2, "packed": p})) for p in (True, False)
    )
    assert small[1] == large[1]
    assert {n for n in small[0] if small[0][n] < large[0][n]} == {"packed"}


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("{micro_batch: more}", "no order"),
        ("{flag: increases}", "no numbers"),
        ("{flag: [--fast, --slow]}", "slow"),
        ("{lr: [0.1, 0.5]}", "no value of the knob"),
        ("{effective: increases}", "no knob"),
    ],
)
def test_an_order_of_memory_that_is_none_is_said(memory, said):
    assert said in problems(f"{GOOD}memory: {memory}\n")


def test_the_order_of_a_known_workload_is_not_declared():
    text = "name: mine\nworkload: causal_lm\nmodel: x\nknobs: {micro_batch: [1, 2]}\n"
    assert "is known" in problems(f"{text}memory: {{micro_batch: increases}}\n")


def test_keys_of_a_command_need_one():
    text = GOOD.replace("command:", "workload: causal_lm\nmodel: x\ndescription:")
    assert "is for a command" in problems(text)


def test_a_workload_of_ones_own_needs_no_model():
    text = "name: mine\nworkload: my_package.training:Mine\nknobs: {width: [1, 2]}\n"
    space = read(text)
    assert (space.workload, space.model, space.count()) == ("my_package.training:Mine", None, 2)
    assert read(text + "model: tiny-llama-3m\n").model == "tiny-llama-3m"
    assert "names no object" in problems(text.replace(":Mine", ":1st"))


def test_the_command_runs_beside_its_space(tmp_path):
    (tmp_path / "job").mkdir()
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_space(str(path)).command.cwd == str(tmp_path)
    path.write_text(GOOD + "cwd: job\n")
    assert load_space(str(path)).command.cwd == str(tmp_path / "job")


def test_a_changed_script_is_another_command(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "train.py").write_text("print(1)")
    before = load_space(str(tmp_path / "mine.yaml")).command.digest
    assert load_space(str(tmp_path / "mine.yaml")).command.digest == before
    (tmp_path / "train.py").write_text("print(2)")
    assert load_space(str(tmp_path / "mine.yaml")).command.digest != before


PROGRAM = """
name: mine
program: [train.py, "{not a placeholder}"]
knobs: {micro_batch: [1, 2, 4]}
fixed: {effective_batch: 8}
derived: {grad_accum: effective_batch // micro_batch}
"""


def test_a_program_needs_no_placeholders_and_its_batch_is_known():
    space = read(PROGRAM)
    assert space.workload == "command"
    assert space.command.is_program
    assert space.command.argv == ("train.py", "{not a placeholder}")
    assert space.command.samples({"micro_batch": 2, "grad_accum": 4}) == 8


def test_a_program_and_a_command_are_one_too_many():
    text = problems(PROGRAM + "command: python train.py\n")
    assert "there is also a program" in text
