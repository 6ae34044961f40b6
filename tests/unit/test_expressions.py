"""Expressions: what they compute, what they refuse, and that nothing else ever escapes."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tuner.core.errors import InputError
from tuner.core.expressions import MAX_LENGTH, compile_expression, syntax

VALUES = {
    "effective_batch": 32,
    "micro_batch": 4,
    "lora_dropout": 0.05,
    "precision": "nf4",
    "gradient_checkpointing": True,
    "lora_targets": ("q_proj", "v_proj"),
}


def value_of(text: str) -> object:
    return compile_expression(text, VALUES).evaluate(VALUES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("effective_batch // micro_batch", 8),
        ("effective_batch % micro_batch == 0", True),
        ("-micro_batch ** 2", -16),
        ("1 <= micro_batch <= 4", True),
        ("precision in ('nf4', 'int8')", True),
        ("precision not in ['nf4']", False),
        ("lora_targets == ['q_proj', 'v_proj']", True),
        ("gradient_checkpointing == true", True),
        ("not gradient_checkpointing or micro_batch < 8", True),
        ("1 if precision == 'bf16' else 2", 2),
        ("max(micro_batch, 6) + min(1, 2) + abs(-1) + ceil(1.5) + floor(1.5) + round(1.6)", 13),
        ("micro_batch == 0 or effective_batch % micro_batch == 0", True),
    ],
)
def test_evaluates(text, expected):
    assert value_of(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("micro_bach > 1", "unknown name 'micro_bach'", "did you mean 'micro_batch'?"),
        ("precision == nf4", "unknown name 'nf4'", "a word needs quotes: 'nf4'"),
        ("min > 1", "unknown name 'min'", "allowed:"),
        ("micro_batch = 4", "is not an expression", "write =="),
        ("micro_batch > 1 && micro_batch < 4", "is not an expression", "`and`"),
        ("micro_batch > = 4", "is not an expression", "for example"),
        ("", "is empty", "for example"),
        ("micro_batch.bit_length()", "calls something", "allowed: abs(...)"),
        ("precision.__class__", "an attribute", "allowed"),
        ("lora_targets[0]", "an index", "allowed"),
        ("__import__('os')", "calls something", "allowed"),
        ("[x for x in lora_targets]", "ListComp", "allowed"),
        ("f'{precision}'", "an f-string", "allowed"),
        ("1 << 100", "LShift", "allowed"),
        ("precision is None", "uses", "allowed"),
        ("b'x'", "the value", "allowed"),
        ("max(micro_batch, key=1)", "calls something", "allowed"),
    ],
)
def test_refuses_with_a_hint(text, message, hint):
    with pytest.raises(InputError) as caught:
        compile_expression(text, VALUES, words=["nf4"])
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 // (micro_batch - 4)", "division by zero"),
        ("9 ** 9 ** 9", "larger than"),
        ("2 ** 63 * 2 ** 63", "larger than"),
        ("1e400 // 2", "larger than"),
        ("'a' * 1000", "not a number"),
        ("'%1000000000d' % 1", "not a number"),
        ("precision < 3", "not supported"),
        ("3 in micro_batch", "int"),
        ("gradient_checkpointing + 1", "True is not a number"),
        ("(-8) ** 0.5", "not a number"),
        ("max(precision, 1)", "not a number"),
    ],
)
def test_evaluation_errors_name_expression_and_values(text, reason):
    with pytest.raises(InputError) as caught:
        value_of(text)
    assert text in caught.value.message
    assert reason in caught.value.message


def test_a_condition_must_be_true_or_false():
    with pytest.raises(InputError, match="is not a condition: it gives 0"):
        compile_expression("effective_batch % micro_batch", VALUES).holds(VALUES)


@pytest.mark.parametrize("text", ["(" * 200 + "1" + ")" * 200, "-" * 490 + "1", "1" * 501, "\0"])
def test_deep_and_long_expressions_are_input_errors_or_values(text):
    try:
        found = str(value_of(text))
    except InputError as error:
        found = str(error)
    assert found in ("1", "-1") or "expression" in found
    assert len(found) < 2 * MAX_LENGTH


def test_compared_words():
    expression = compile_expression("precision in ('nf4', 'x') and 'y' != precision", VALUES)
    assert sorted(expression.compared_words()) == [
        ("precision", "nf4"),
        ("precision", "x"),
        ("precision", "y"),
    ]


def test_two_threads_may_parse_at_once():
    """Garbage whose end runs Python makes the parser give way to the other thread."""

    class Circle:
        def __init__(self):
            self.own = self

        def __del__(self):
            sum(range(50))

    text = "".join(
        f"x{n} = [f({n}, y=lambda z: (z, [{n}])) for w in range(3)]\n" for n in range(60)
    )

    def parsed(_):
        for _ in range(9):
            Circle()
        return syntax(text)

    often, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(tree.body for tree in pool.map(parsed, range(200)))
    finally:
        gc.set_threshold(*often)
        sys.setswitchinterval(interval)
