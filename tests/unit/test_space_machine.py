"""Knobs of the machine in a space: optional, readable, and named where predictions ignore them."""

import pytest

from tuner.core.errors import InputError
from tuner.core.setup.schemas import unmodelled
from tuner.space import SCHEMAS, configure, default_space, pin
from tuner.space.load import read_space

TERMS = SCHEMAS["causal_lm"].terms


def space(knobs: str, extra: str = ""):
    text = f"name: small\nworkload: causal_lm\nmodel: tiny\nknobs: {{{knobs}}}\n{extra}"
    return read_space(text, "small.yaml")


def test_what_a_space_does_not_mention_is_not_in_its_configurations():
    """Configurations that were tried before such a knob existed keep their identity."""
    plain = next(space("micro_batch: [1]").configurations())
    assert "num_workers" not in plain
    with_workers = next(space("micro_batch: [1], num_workers: [0, 2]").configurations())
    assert with_workers["num_workers"] == 0
    assert with_workers.keys() - plain.keys() == {"num_workers"}


def test_conditions_can_name_what_the_space_mentions_only():
    found = space("micro_batch: [1], num_workers: [0, 2, 4]")
    assert found.count(["num_workers > 0"]) == 2
    with pytest.raises(InputError, match="num_workers"):
        space("micro_batch: [1]").count(["num_workers > 0"])


def test_a_search_keeps_to_the_knobs_of_its_space():
    small = space("micro_batch: [1]")
    with pytest.raises(InputError, match="torch_compile is not in search space 'small'"):
        pin(small, {"torch_compile": "true"})
    with pytest.raises(InputError, match="copy the file"):
        configure(small, {"torch_compile": "true"})
    assert "torch_compile" not in pin(small, {"torch_compile": "false"}).fixed
    free = configure(small, {"torch_compile": "true"}, strict=False)
    assert free["torch_compile"] is True


def test_the_default_space_takes_them_as_settings():
    settings = {"offload": "0.5", "allocator": "expandable_segments:True"}
    found = configure(default_space("some/model", settings), settings, strict=False)
    assert found["offload"] == 0.5
    assert found["allocator"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("", ""),
        ("expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:128, backend:native", "max_split_size_mb:128,backend:native"),
        ("roundup_power2_divisions:[256:1,512:2]", "roundup_power2_divisions:[256:1,512:2]"),
        ("nonsense", None),
        (3, None),
    ],
)
def test_allocator_options_are_those_of_pytorch(typed, read):
    if read is None:
        with pytest.raises(InputError, match="expandable_segments"):
            TERMS["allocator"].read(typed)
    else:
        assert TERMS["allocator"].read(typed) == read


def test_a_misspelt_option_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'expandable_segments'"):
        TERMS["allocator"].read("expandable_segment:True")


@pytest.mark.parametrize("value", [-0.1, 1.1, "half"])
def test_a_part_is_from_0_to_1(value):
    with pytest.raises(InputError, match="offload"):
        TERMS["offload"].read(value)
    assert TERMS["offload"].read("1") == 1


def test_what_predictions_ignore_is_named_where_it_is_set():
    small = space("micro_batch: [1], cudnn_benchmark: [true, false], num_workers: [0, 4]")
    named = {unmodelled("causal_lm", found) for found in small.configurations()}
    assert named == {(), ("cudnn_benchmark",), ("num_workers",), ("cudnn_benchmark", "num_workers")}
