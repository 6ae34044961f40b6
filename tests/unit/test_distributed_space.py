"""`gpus_per_trial` in search spaces: its kinds, its rules, and what follows from it."""

from pathlib import Path

import pytest
from documents import blocks

from tuner.app.search.supported import supported_part
from tuner.core.errors import InputError
from tuner.core.records import KnobValue
from tuner.core.setup.distributed_knobs import Parallelism, gpus_per_trial, most_gpus_per_trial
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

SPACE = """
name: pair
workload: causal_lm
model: tiny-llama-3m
knobs:
  micro_batch: [1, 2, 4]
  {knob}
fixed:
  effective_batch: 8
  lora_rank: 8
  max_length: 64
  precision: fp32
  {fixed}
derived:
  lora_alpha: 2 * lora_rank
  {derived}
"""


def write(folder: Path, *, knob: str = "", fixed: str = "", derived: str = "") -> str:
    path = folder / "pair.yaml"
    path.write_text(SPACE.format(knob=knob, fixed=fixed, derived=derived))
    return str(path)


def test_as_a_knob_each_value_has_an_accumulation_of_its_own(tmp_path):
    space = load_space(write(tmp_path, knob="gpus_per_trial: [1, 2, 4]"))
    found = {
        (c["gpus_per_trial"], c["micro_batch"], c["grad_accum"]) for c in space.configurations()
    }
    # 4 sequences on each of 4 GPUs are more than the effective batch of 8.
    assert found == {(n, m, 8 // n // m) for n in (1, 2, 4) for m in (1, 2, 4) if n * m <= 8}
    assert most_gpus_per_trial(space.choices, space.fixed) == 4


def test_trials_of_several_gpus_are_left_out_where_their_link_is_unknown(tmp_path):
    space = load_space(write(tmp_path, knob="gpus_per_trial: [1, 2]"))
    whole = supported_part(space, get_gpu("a6000"), ())
    assert (whole.left_out, len(whole.supported)) == (0, 6)
    part = supported_part(space, get_gpu("a10g"), ())
    assert (part.left_out, {gpus_per_trial(c) for c in part.supported}) == (3, {1})
    ((reason, count),) = part.reasons.items()
    assert "no link rate is known for NVIDIA A10G" in reason
    assert count == 3
    # Nothing would be left: the prediction says what is known, and what to do.
    alone = load_space(write(tmp_path, fixed="gpus_per_trial: 2"))
    assert len(supported_part(alone, get_gpu("a10g"), ()).supported) == 3


def test_compiled_configurations_are_left_out_where_nothing_runs(tmp_path):
    space = load_space(write(tmp_path, knob="torch_compile: [false, true]"))
    gpu = get_gpu("a6000")
    assert supported_part(space, gpu, ()).left_out == 0
    part = supported_part(space, gpu, (), runs=False)
    assert {c["torch_compile"] for c in part.supported} == {False}
    assert part.left_out == 3
    assert "the speed is not predicted" in next(iter(part.reasons))
    alone = load_space(write(tmp_path, fixed="torch_compile: true"))
    with pytest.raises(InputError):
        supported_part(alone, gpu, (), runs=False)


def test_a_rule_of_the_users_that_forgets_the_gpus_is_named(tmp_path):
    path = write(
        tmp_path, fixed="gpus_per_trial: 2", derived="grad_accum: effective_batch // micro_batch"
    )
    with pytest.raises(InputError) as error:
        load_space(path)
    assert "micro_batch * grad_accum * gpus_per_trial" in str(error.value.problems or error.value)


def test_a_setting_on_the_command_line_divides_the_accumulation():
    space = load_space("tiny_cpu")
    one = configure(space, {"micro_batch": "2"}, strict=False)
    two = configure(space, {"micro_batch": "2", "gpus_per_trial": "2"}, strict=False)
    assert (one["grad_accum"], two["grad_accum"]) == (4, 2)
    assert two["effective_batch"] == one["effective_batch"]
    with pytest.raises(InputError, match="does not hold"):
        configure(space, {"micro_batch": "8", "gpus_per_trial": "2"}, strict=False)


@pytest.mark.parametrize("word", ["tensor_parallel", "fsdp1"])
def test_a_strategy_that_is_not_predicted_says_how_to_emulate_it(word):
    with pytest.raises(InputError) as caught:
        configure(load_space("tiny_cpu"), {"distributed": word}, strict=False)
    assert f"{word} is not predicted" in str(caught.value)
    assert "tuner emulate" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus_per_trial": 17}, "set machines to at least 2"),
        ({"gpus_per_trial": 9, "machines": 2}, "with as many in each"),
        ({"gpus_per_trial": 4, "distributed": "hsdp"}, "set dp_shard_size to a divisor of 4"),
        ({"gpus_per_trial": 6, "distributed": "hsdp", "dp_shard_size": 4}, "groups of 4"),
        (
            {"gpus_per_trial": 24, "machines": 4, "distributed": "hsdp", "dp_shard_size": 4},
            "do not fit into each other",
        ),
    ],
)
def test_gpus_that_cannot_stand_so_are_refused(settings, said):
    (problem,) = Parallelism.of(settings).problems({"precision": "bf16", **settings})
    assert said in problem.message


def test_a_group_is_a_machine_where_there_are_several():
    settings: dict[str, KnobValue] = {"gpus_per_trial": 16, "machines": 2, "distributed": "hsdp"}
    found = Parallelism.of(settings)
    assert (found.group, found.per_machine) == (8, 8)
    assert not found.problems(settings)
    assert Parallelism.of({**settings, "dp_shard_size": 4}).group == 4
    assert Parallelism.of({**settings, "distributed": "fsdp2"}).group == 16


def test_numbers_that_no_machine_has_are_left_out_of_a_space(tmp_path):
    knob = "gpus_per_trial: [8, 32]\n  machines: [1, 2]"
    path = Path(write(tmp_path, knob=knob))
    path.write_text(path.read_text().replace("effective_batch: 8", "effective_batch: 32"))
    space = load_space(str(path))
    part = supported_part(space, get_gpu("h100_sxm"), ())
    found = {(c["gpus_per_trial"], c["machines"]) for c in part.supported}
    assert found == {(8, 1), (8, 2), (32, 2)}
    # Between machines with other GPUs nothing is known.
    part = supported_part(space, get_gpu("a6000"), ())
    assert {c["machines"] for c in part.supported} == {1}
    assert any("add network_gb_per_s" in reason for reason in part.reasons)


def test_the_example_of_the_documentation_is_a_space(tmp_path):
    (block,) = [b for b in blocks("docs/reference/spaces.md") if b.said("file") == "several.yaml"]
    path = tmp_path / "several.yaml"
    path.write_text(block.text)
    space = load_space(str(path))
    found = list(space.configurations())
    assert len(found) == space.count() == 9
    for one in found:
        ranks = one["micro_batch"] * one["grad_accum"] * one["gpus_per_trial"]
        assert ranks == one["effective_batch"] == 16
