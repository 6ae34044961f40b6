"""Configurations that differ in a setting without effect on the operators have one structure."""

import pytest

from tuner.core.records import Configuration
from tuner.predict.compiler.structure import Structure, differences
from tuner.space.models.catalogue import architecture

PLAIN = Configuration(
    {
        "micro_batch": 4,
        "max_length": 512,
        "lora_rank": 8,
        "lora_dropout": 0.05,
        "lora_targets": ("all-linear",),
        "adapter": "lora",
        "attention": "sdpa",
        "precision": "bf16",
        "compute_dtype": "auto",
        "double_quant": True,
        "kbit_preparation": "peft",
        "gradient_checkpointing": True,
        "use_reentrant": False,
    }
)


LINEARS = architecture("qwen3-0.6b").linears


def structure(**settings: object) -> Structure:
    changed = PLAIN.replace(**settings)
    return Structure.of(changed, window=None, compute_capability=(8, 0), linears=LINEARS)


@pytest.mark.parametrize(
    ("knob", "value", "beside"),
    [
        ("compute_dtype", "fp32", {}),
        ("double_quant", False, {"precision": "int8"}),
        ("kbit_preparation", "none", {}),
        ("use_reentrant", True, {"gradient_checkpointing": False}),
        ("lora_dropout", 0.1, {}),
        ("lora_dropout", 0.0, {"lora_rank": 0}),
        ("lora_targets", tuple(sorted(LINEARS, reverse=True)), {}),
        ("lora_targets", ("v_proj", "q_proj"), {"lora_targets": ("q_proj", "v_proj")}),
        ("lora_targets", ("q_proj",), {"lora_rank": 0}),
        ("adapter", "rslora", {}),
    ],
)
def test_a_setting_without_effect_beside_the_others_makes_no_structure(knob, value, beside):
    plain, changed = structure(**beside), structure(**beside | {knob: value})
    assert plain == changed
    assert plain.key == changed.key


@pytest.mark.parametrize(
    ("knob", "value", "beside"),
    [
        ("compute_dtype", "fp32", {"precision": "int8"}),
        ("double_quant", False, {"precision": "nf4"}),
        ("kbit_preparation", "none", {"precision": "nf4"}),
        ("use_reentrant", True, {}),
        ("lora_dropout", 0.0, {}),
        ("lora_targets", ("q_proj", "v_proj"), {}),
        ("adapter", "dora", {}),
    ],
)
def test_the_same_setting_with_an_effect_does(knob, value, beside):
    assert structure(**beside) != structure(**beside, **{knob: value})


def test_what_differs_is_said_with_both_values():
    plain, other = structure().said, structure(attention="eager", micro_batch=1).said
    assert differences(other, plain) == {
        "attention": ("eager", "sdpa"),
        "micro_batch": ("1", "2 or more"),
    }
