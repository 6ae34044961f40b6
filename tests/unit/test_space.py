"""The shipped space, the vocabulary, enumeration, settings and finding spaces by name."""

import itertools
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.core.errors import InputError
from tuner.core.expressions import Expression, compile_expression
from tuner.space import (
    SCHEMAS,
    SearchSpace,
    TokenLengths,
    configure,
    default_space,
    list_spaces,
    load_space,
    parse_settings,
    pin,
)
from tuner.space.load import read_space

ROOT = Path(__file__).parents[2]
QLORA27B = ROOT / "search_spaces" / "qlora27b.yaml"
TERMS = SCHEMAS["causal_lm"].terms
ALWAYS_SET = {name for name, term in TERMS.items() if not term.optional}


@pytest.fixture(scope="module")
def qlora27b() -> SearchSpace:
    return load_space(str(QLORA27B))


def small_space(extra: str = "", knobs: str = "{micro_batch: [1, 2, 4, 8]}") -> SearchSpace:
    text = f"name: small\nworkload: causal_lm\nmodel: tiny\nknobs: {knobs}\n{extra}"
    return read_space(text, "small.yaml")


# --- the shipped space -----------------------------------------------------------------------


def test_a_constraint_is_evaluated_once_for_each_combination_of_what_it_reads(
    qlora27b, monkeypatch
):
    """Not once for each of the 11,520 configurations: counting them is to take no time."""
    copy = pickle.loads(pickle.dumps(qlora27b))  # without anything computed before
    evaluate, evaluated = Expression.evaluate, []
    monkeypatch.setattr(
        Expression, "evaluate", lambda self, values: evaluated.append(1) or evaluate(self, values)
    )
    number = copy.count(use_floors=False)
    assert len(evaluated) < 100
    assert number == len(list(copy.configurations(use_floors=False)))
    assert len(evaluated) < 100 + 2 * number  # two derived values of each configuration


# --- conditions and floors -------------------------------------------------------------------


def test_a_condition_replaces_the_floor_on_the_same_knob_only(qlora27b):
    assert qlora27b.conditions() == ("lora_rank >= 128", "max_length >= 1024")
    assert qlora27b.conditions(["lora_rank == 16"]) == ("max_length >= 1024", "lora_rank == 16")
    assert qlora27b.conditions(["precision == 'nf4'"])[:2] == qlora27b.floors
    assert qlora27b.conditions(use_floors=False) == ()
    assert qlora27b.count(["lora_rank == 16"]) == 5 * 5 * 3 * 2 * 3 * 2


def test_matches(qlora27b):
    low = configure(qlora27b, {"lora_rank": 16})
    assert not qlora27b.matches(low)
    assert qlora27b.matches(low, ["lora_rank <= 16"])
    assert qlora27b.matches(low, use_floors=False)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("lora_rnak > 1", "did you mean 'lora_rank'?"),
        ("precision == 'nf5'", "did you mean 'nf4'?"),
        ("precision == nf4", "a word needs quotes"),
        ("lora_rank", "is not a condition"),
    ],
)
def test_wrong_conditions(qlora27b, where, message):
    with pytest.raises(InputError, match=re.escape(message)):
        qlora27b.count([where])


def test_conditions_that_leave_nothing_are_named(qlora27b):
    with pytest.raises(InputError) as caught:
        qlora27b.require_configurations(["lora_rank > 300", "lora_rank < 384", "micro_batch > 1"])
    named = [problem.message for problem in caught.value.problems]
    assert named == ["excluded by: lora_rank > 300", "excluded by: lora_rank < 384"]
    qlora27b.require_configurations(["lora_rank > 300"])


# --- settings --------------------------------------------------------------------------------


def test_settings_are_read_by_the_type_of_their_knob(qlora27b):
    typed = {
        "micro_batch": "4",
        "precision": "bf16",
        "gradient_checkpointing": "false",
        "lora_targets": "[q_proj,v_proj]",
        "lora_dropout": "1e-1",
        "mixed_precision": "no",
    }
    configuration = configure(qlora27b, typed, strict=False)
    assert configuration["micro_batch"] == 4
    assert configuration["grad_accum"] == 8
    assert configuration["gradient_checkpointing"] is False
    assert configuration["lora_targets"] == ("q_proj", "v_proj")
    assert configuration["lora_dropout"] == 0.1
    assert configuration["mixed_precision"] == "no"


def test_a_value_outside_the_list_is_for_estimates_only(qlora27b):
    assert configure(qlora27b, {"lora_rank": 48}, strict=False)["lora_alpha"] == 96
    with pytest.raises(InputError) as caught:
        configure(qlora27b, {"lora_rank": 48})
    assert str(caught.value) == (
        "lora_rank=48 is not in search space 'qlora27b'\n"
        "  hint: allowed: 16, 32, 64, 96, 128, 192, 256, 384"
    )


GOLDEN_SETTINGS = [
    (
        {"precison": "nf4"},
        "unknown parameter 'precison'\n  hint: did you mean 'precision'? `tuner spaces qlora27b` "
        f"lists all {len(TERMS)}",
    ),
    (
        {"optimizer": "adamw_4bit"},
        "optimizer cannot be 'adamw_4bit': it must be one of adamw_torch, adamw_torch_fused, "
        "adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit, paged_adamw_32bit, "
        "adafactor, lion_32bit, lion_8bit, paged_lion_32bit, paged_lion_8bit, muon, sgd, rmsprop\n"
        "  hint: did you mean 'adamw_8bit'?",
    ),
    (
        {"micro_batch": "3"},
        "not a valid configuration: `effective_batch % micro_batch == 0` does not hold\n"
        "  hint: it was tried with effective_batch=32, micro_batch=3",
    ),
    (
        {"grad_accum": "8"},
        "grad_accum=8 does not agree with grad_accum = effective_batch // micro_batch = 32\n"
        "  hint: it follows from effective_batch=32, micro_batch=1; set those instead",
    ),
    (
        {"lora_rank": "-1", "max_length": "long", "gradient_checkpointing": "maybe"},
        "3 settings are wrong\n"
        "  - lora_rank cannot be '-1': it must be a whole number of at least 0\n"
        "  - max_length cannot be 'long': it must be a whole number of at least 1\n"
        "  - gradient_checkpointing cannot be 'maybe': it must be true or false",
    ),
    (
        {"lora_dropout": "1"},
        "lora_dropout cannot be '1': it must be a number of at least 0 and below 1",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), GOLDEN_SETTINGS)
def test_wrong_settings(qlora27b, wrong, text):
    with pytest.raises(InputError) as caught:
        configure(qlora27b, wrong, strict=False)
    assert str(caught.value) == text


def test_a_derived_value_may_be_set_when_it_agrees(qlora27b):
    configuration = configure(qlora27b, {"grad_accum": 8, "micro_batch": 4})
    assert configuration == configure(qlora27b, {"micro_batch": 4})


def test_pinning_narrows_the_space_and_drops_the_floor_on_the_knob(qlora27b):
    narrowed = pin(qlora27b, {"lora_rank": "16", "precision": "nf4", "grad_accum": 4})
    found = list(narrowed.configurations())
    assert narrowed.floors == ("max_length >= 1024",)
    assert {c["lora_rank"] for c in found} == {16}
    assert {c["micro_batch"] for c in found} == {8}
    assert len(found) == 5 * 2 * 3 * 2
    assert configure(narrowed, {"micro_batch": 8})["lora_rank"] == 16


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ({"effective_batch": 16}, "held at 32"),
        ({"lora_rank": 17}, "allowed: 16, 32"),
        ({"grad_accum": 5}, "excluded by: grad_accum == 5"),
    ],
)
def test_pinning_what_is_not_in_the_space(qlora27b, pinned, message):
    with pytest.raises(InputError, match=re.escape(message)):
        pin(qlora27b, pinned)


def test_parse_settings():
    assert parse_settings(["a=1", " b = x=y "]) == {"a": "1", "b": "x=y"}
    for wrong in (["a"], ["=1"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(InputError):
            parse_settings(wrong)


# --- defaults --------------------------------------------------------------------------------


def test_default_space_fills_what_is_not_set():
    space = default_space("some/model")
    assert space.model == "some/model"
    assert space.count() == 1
    configuration = configure(space, {"max_length": "512"}, strict=False)
    assert configuration.keys() == ALWAYS_SET
    assert configuration["max_length"] == 512
    assert configuration["grad_accum"] == 16
    assert configuration["lora_targets"] == ("all-linear",)
    assert configuration["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({"micro_batch": 4, "grad_accum": 1}, {"effective_batch": 4}),
        ({"micro_batch": 4, "effective_batch": 8}, {"grad_accum": 2}),
        ({"lora_rank": 64}, {"lora_alpha": 128}),
        ({"lora_rank": 64, "lora_alpha": 16}, {"lora_alpha": 16}),
        ({"precision": "fp16"}, {"mixed_precision": "fp16"}),
        ({"precision": "fp32"}, {"mixed_precision": "no"}),
        ({"precision": "bf16", "mixed_precision": "no"}, {"mixed_precision": "no"}),
    ],
)
def test_what_the_user_sets_is_not_derived(given_settings, expected):
    space = default_space("m", given_settings)
    configuration = configure(space, given_settings, strict=False)
    assert {name: configuration[name] for name in expected} == expected


def test_a_space_without_effective_batch_gets_it_from_the_accumulation():
    space = small_space("fixed: {grad_accum: 4}")
    assert [c["effective_batch"] for c in space.configurations()] == [4, 8, 16, 32]


# --- the vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("micro_batch", value)
        for value in ("010", "1.5", "1e3", "0x10", "٣", "", "true", True, 1.5, None, 10**13, [1])
    ]
    + [("lora_dropout", value) for value in ("nan", "inf", "x", True, 1.0, -0.1, 10**400)]
    + [("precision", value) for value in ("NF4", 4, None, True)]
    + [("lora_targets", value) for value in ("", "[]", "[a,,b]", "[a,a]", ["a", 1], [], 3, "a b")]
    + [("gradient_checkpointing", value) for value in (1, "1", None, "maybe")],
)
def test_values_of_the_wrong_kind(name, wrong):
    with pytest.raises(InputError, match=f"{name} cannot be"):
        TERMS[name].read(wrong)


@pytest.mark.parametrize("typed", ["2e-1", "0.2", ".2", 0.2])
def test_numbers_as_people_write_them(typed):
    assert TERMS["lora_dropout"].read(typed) == 0.2


# --- stages and data -------------------------------------------------------------------------

STAGES = """
fixed: {effective_batch: 32}
stages:
  - {name: hard, set: {effective_batch: 4, max_length: 2048}}
  - {name: easy, set: {max_length: 256}}
"""


def test_a_configuration_must_be_valid_in_every_stage():
    space = small_space(STAGES)
    assert [c["micro_batch"] for c in space.configurations()] == [1, 2, 4]  # 8 is more than 4
    stages = space.stage_configurations(configure(space, {"micro_batch": 2}))
    assert {n: (c["max_length"], c["grad_accum"]) for n, c in stages.items()} == {
        "hard": (2048, 2),
        "easy": (256, 16),
    }


def test_token_lengths():
    def lengths(text: str) -> TokenLengths:
        found = small_space(f"data: {{token_lengths: {text}}}").data.token_lengths
        assert found is not None
        return found

    summary = lengths("{mean: 235, max: 933}")
    assert (summary.kept_tokens(100).high, summary.kept_tokens(1000).high) == (100, 235)
    uniform = lengths("{quantiles: {0: 0, 1: 100}}")
    assert (uniform.mean, uniform.max) == (50, 100)
    assert uniform.kept_tokens(50).value == pytest.approx(
        37.5
    )  # half at 25 on average, half cut at 50
    bins = lengths("{histogram: {edges: [0, 100, 200], counts: [3, 1]}}")
    assert bins.mean == pytest.approx(0.75 * 50 + 0.25 * 150)
    assert bins.kept_tokens(100).value == pytest.approx(0.75 * 50 + 0.25 * 100)


# --- enumeration, for any space --------------------------------------------------------------

_KNOBS = {
    "micro_batch": st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True),
    "lora_rank": st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    "max_length": st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
    "precision": st.lists(st.sampled_from(["nf4", "bf16"]), min_size=1, max_size=2, unique=True),
}
_CONDITIONS = (
    "lora_rank % micro_batch == 0",
    "max_length >= lora_rank",
    "micro_batch < 4 or precision == 'nf4'",
    "grad_accum <= 8",
)


@settings(max_examples=60)
@given(
    st.fixed_dictionaries(_KNOBS),
    st.lists(st.sampled_from(_CONDITIONS), unique=True),
    st.permutations(list(_KNOBS)),
)
def test_enumeration_is_brute_force_in_a_fixed_order(choices, constraints, order):
    def text(names: list[str]) -> str:
        lines = [f"  {n}: [{', '.join(map(str, choices[n]))}]" for n in names]
        return "\n".join(
            ["name: s", "workload: causal_lm", "model: m", "fixed: {effective_batch: 32}", "knobs:"]
            + lines
            + ["constraints:", "  - true"]
            + [f'  - "{condition}"' for condition in constraints]
        )

    compiled = [compile_expression(c, TERMS) for c in [*constraints, *("32 % micro_batch == 0",)]]
    expected = []
    names = sorted(choices)
    for values in itertools.product(*(choices[name] for name in names)):
        row = dict(zip(names, values, strict=True))
        if all(c.holds({**row, "grad_accum": 32 // row["micro_batch"]}) for c in compiled):
            expected.append(row)
    if not expected:
        with pytest.raises(InputError, match="no configuration is left"):
            read_space(text(order), "s.yaml")
        return
    space = read_space(text(order), "s.yaml")
    found = list(space.configurations())
    assert [{name: c[name] for name in names} for c in found] == expected
    assert space.count() == len(found)
    assert found == list(read_space(text(names), "s.yaml").configurations())


# --- finding spaces --------------------------------------------------------------------------


def test_spaces_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_space("qlora27b").name == "qlora27b"
    own = tmp_path / "search_spaces"
    own.mkdir()
    text = QLORA27B.read_text().replace("effective_batch: 32", "effective_batch: 64")
    (own / "qlora27b.yaml").write_text(text)
    assert load_space("qlora27b").fixed["effective_batch"] == 64  # one's own comes first


def test_unknown_spaces(tmp_path):
    with pytest.raises(InputError, match=r"(?s)unknown search space 'qlora27'.*'qlora27b'"):
        load_space("qlora27")
    for missing in (
        tmp_path / "none.yaml",
        tmp_path / "a\0b.yaml",
        tmp_path / ("x" * 300 + ".yaml"),
    ):
        with pytest.raises(InputError):
            load_space(str(missing))
    with pytest.raises(InputError, match="no search space file"):
        load_space(str(tmp_path) + "/")


def test_a_broken_file_is_listed_with_its_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "broken.yaml").write_text("name: [")
    (tmp_path / "search_spaces" / "notes.txt").write_text("not a space")
    listed = {info.name: info for info in list_spaces()}
    assert "notes" not in listed
    assert "broken YAML" in str(listed["broken"].problem)
    assert listed["qlora27b"].configurations == 11_520
    assert listed["qlora27b"].problem is None
