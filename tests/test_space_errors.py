"""Malformed space files: the exact messages, and that nothing but InputError ever comes out."""

import pytest

from tuner.core.errors import InputError
from tuner.core.expressions import Expression
from tuner.space import SCHEMAS, load_space
from tuner.space.load import KEYS, read_space

SMALL = """\
name: s
workload: causal_lm
model: m
knobs:
  micro_batch: [1, 2, 4]
  lora_rank: {min: 16, max: 64, step: 16}
fixed: {effective_batch: 32}
constraints:
  - effective_batch % micro_batch == 0
floors:
  - lora_rank >= 32
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_space(text, "s.yaml")
    assert caught.value.exit_code == 2
    return [str(p) for p in caught.value.problems] or [caught.value.message]


def changed(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new)


def test_the_unchanged_space_is_valid():
    assert read_space(SMALL, "s.yaml").count() == 9


GOLDEN = [
    (
        changed("lora_rank: {", "lora_rnak: {"),
        "s.yaml:6 knobs: unknown knob 'lora_rnak' (did you mean 'lora_rank'?)",
    ),
    (changed("fixed:", "fixd:"), "s.yaml:7: unknown key 'fixd' (did you mean 'fixed'?)"),
    (
        changed("causal_lm", "casual_lm"),
        "s.yaml:2 workload: unknown workload 'casual_lm' (did you mean 'causal_lm'?)",
    ),
    (changed("[1, 2, 4]", "[1, 2, 1]"), "s.yaml:5 knobs.micro_batch: the value 1 is listed twice"),
    (changed("[1, 2, 4]", "[]"), "s.yaml:5 knobs.micro_batch: the list of values is empty"),
    (
        changed("[1, 2, 4]", "4"),
        "s.yaml:5 knobs.micro_batch: expected the values of a knob, found the value '4' (write a "
        "list, {min, max, step} or {powers_of_two: {min, max}}; one value that never changes "
        "belongs under `fixed`)",
    ),
    (
        changed("[1, 2, 4]", "[1, 2.5]"),
        "s.yaml:5 knobs.micro_batch: micro_batch cannot be '2.5': it must be a whole number of at "
        "least 1",
    ),
    (changed("step: 16", "step: 0"), "s.yaml:6 knobs.lora_rank: step 0 must be more than 0"),
    (changed(", step: 16", ""), "s.yaml:6 knobs.lora_rank: step missing: write {min, max, step}"),
    (changed("max: 64", "max: 10"), "s.yaml:6 knobs.lora_rank: min 16 is more than max 10"),
    (
        changed("max: 64, step: 16", "max: 900000000, step: 1"),
        "s.yaml:6 knobs.lora_rank: 16 to 900000000 in steps of 1 are 899999985 values; at most "
        "1000 are allowed",
    ),
    (
        changed("[1, 2, 4]", "{powers_of_two: {min: 5, max: 7}}"),
        "s.yaml:5 knobs.micro_batch.powers_of_two: there is no power of two from 5 to 7",
    ),
    (SMALL + "name: again\n", "s.yaml:12: 'name' is set twice, first in line 1"),
    (
        changed("{effective_batch: 32}", "{effective_batch: 32, micro_batch: 1}"),
        "s.yaml:7 fixed: 'micro_batch' is under 'fixed' and under 'knobs' (keep one of them)",
    ),
    (
        SMALL + "derived: {grad_accum: lora_alpha, lora_alpha: 2 * grad_accum}\n",
        "s.yaml:12 derived: derived values depend on each other in a circle: grad_accum -> "
        "lora_alpha -> grad_accum",
    ),
    (
        changed(
            "floors:",
            "  - micro_batch > 2\n  - micro_batch < lora_rank\n  - micro_batch < 3\nfloors:",
        ),
        "s.yaml:10 constraints[1]: no configuration is left, excluded by `micro_batch > 2` (line "
        "10) together with `micro_batch < 3` (line 12)",
    ),
    (
        changed("effective_batch: 32", "effective_batch: 33").replace("[1, 2, 4]", "[2, 4]"),
        "s.yaml:9 constraints[0]: no configuration is left, excluded by `effective_batch % "
        "micro_batch == 0` (line 9) (with effective_batch=33)",
    ),
    (
        changed("lora_rank >= 32", "lora_rank >= 320"),
        "s.yaml:11 floors[0]: no configuration is left, excluded by `lora_rank >= 320` (line 11)",
    ),
    (
        SMALL + "objectives: [token_per_s]\n",
        "s.yaml:12 objectives: unknown objective 'token_per_s' (did you mean 'tokens_per_s'?)",
    ),
    (
        SMALL + "baseline: {micro_batch: 2}\n",
        "s.yaml:12 baseline: lora_rank missing: a baseline sets every knob",
    ),
    (
        SMALL + "stages: [{name: a, set: {grad_accum: 2}}]\n",
        "s.yaml:12 stages[0]: grad_accum is derived (effective_batch // micro_batch) and cannot be "
        "set in a stage",
    ),
    (changed("model: m", "model: !env m"), "s.yaml:3 model: tags such as '!env' are not read"),
    (changed("model: m", "model:"), "s.yaml:3 model: expected a value, found nothing"),
    (
        "name: [1\nmodel: x\n",
        "s.yaml:2: broken YAML: while parsing a flow sequence that began in "
        "line 1, expected ',' or ']', but got ':'",
    ),
    ("", "s.yaml: the file is empty"),
    ("- a\n", "s.yaml:1: a search space is a mapping such as `name: my_space`"),
]


@pytest.mark.parametrize(("text", "message"), GOLDEN, ids=[m[:50] for _, m in GOLDEN])
def test_messages(text, message):
    assert problems_of(text) == [message]


def test_all_problems_come_at_once_in_the_order_of_the_lines():
    text = SMALL.replace("[1, 2, 4]", "[1, x]").replace("lora_rank >= 32", "lora_rank >>> 32")
    text = text.replace("effective_batch: 32", "effective_batch: -1, optimiser: sgd")
    places = [problem.split(" ")[0] for problem in problems_of(text)]
    assert places == ["s.yaml:5", "s.yaml:7", "s.yaml:7", "s.yaml:11"]


def test_too_many_combinations_are_refused_before_any_is_made():
    """To go through a billion of them would take an hour."""
    text = SMALL.replace("[1, 2, 4]", "{min: 1, max: 1000, step: 1}")
    text = text.replace("{min: 16, max: 64, step: 16}", "{min: 1, max: 1000, step: 1}")
    text = text.replace("fixed:", "  max_length: {min: 1, max: 1000, step: 1}\nfixed:")
    assert "1,000,000,000 combinations; at most 200,000" in problems_of(text)[0]


def test_too_many_evaluations_are_refused_before_the_first(monkeypatch):
    """A hundred conditions on every knob of a large space would take minutes."""
    monkeypatch.setattr(Expression, "evaluate", lambda self, values: pytest.fail(self.text))
    text = SMALL.replace("[1, 2, 4]", "{min: 1, max: 400, step: 1}")
    extra = "".join(f"  - micro_batch + lora_rank != {i}\n" for i in range(50))
    text = text.replace("max: 64, step: 16", "max: 415, step: 1").replace(
        "floors:", extra + "floors:"
    )
    (problem,) = problems_of(text)
    assert problem.startswith("s.yaml:10 constraints[1]: the constraints need 8,00")
    assert "at most 500,000 are allowed" in problem


def test_a_name_that_differs_from_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL)
    with pytest.raises(InputError, match="the name 's' differs from that of the file, 'mine'"):
        load_space(str(path))


def test_alias_bombs_and_circles_end():
    """Spelled out, the first would have 9 ** 39 items."""
    levels = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 40))
    circle = "name: &n [*n]\nknobs: &k {micro_batch: *k, lora_rank: &r [*r]}\nstages: &s [*s]\n"
    assert problems_of(f"k0: &k0 [x]\n{levels}")
    assert problems_of(circle)
    assert problems_of("[" * 3000) == ["s.yaml: broken YAML: nested too deeply"]


# --- properties ------------------------------------------------------------------------------


_NAMES = [*KEYS, *SCHEMAS["causal_lm"].terms, "min", "max", "step", "powers_of_two", "set"]
_NAMES += ["mean", "quantiles", "histogram", "edges", "counts", "examples", "epochs", "<<", ""]
