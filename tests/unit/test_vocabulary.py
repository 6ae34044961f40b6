"""Settings under the names of any trainer."""

import warnings
from pathlib import Path

import pytest

from tuner.app.cli.main import run
from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.vocabulary import translate

TERMS = SCHEMAS["causal_lm"].terms
NAMES = Path(__file__).with_name("setting_names.txt").read_text(encoding="utf-8").splitlines()


def answer(said: str) -> str:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            found = translate(dict([said.split("=", 1)]), TERMS, {})
        except InputError as error:
            return "?" if "is not modelled" in str(error) else str(error)
    settings = " ".join(f"{name}={show(value)}" for name, value in found.items())
    return settings or "-" if noted else settings or "."


def test_a_hundred_names_of_five_tools_are_understood():
    rows = [line.split() for line in NAMES if not line.startswith("#")]
    assert len(rows) == 100
    assert [(said, found) for said, meant in rows if (found := answer(said)) != meant] == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            {"load_in_4bit": True, "dtype": "bfloat16"},
            {"precision": "nf4", "compute_dtype": "bf16"},
        ),
        ({"load_in_4bit": "true", "load_in_8bit": "false"}, {"precision": "nf4"}),
        ({"dtype": "float32", "tf32": "true"}, {"precision": "tf32"}),
        ({"bf16": "false", "fp16": "true"}, {"mixed_precision": "fp16"}),
        ({"bf16": "false"}, {"mixed_precision": "no"}),
        ({"batch_size": "4", "micro_batch_size": 4}, {"micro_batch": 4}),
        (
            {"packing": "true", "attn_implementation": "flash_attention_2"},
            {"padding": "packed", "attention": "flash_attention_2"},
        ),
        ({"fsdp": "full_shard auto_wrap"}, {"distributed": "fsdp2"}),
    ],
)
def test_names_that_belong_together(given, meant):
    assert translate(given, TERMS, {"lora_rank": 0}) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 4, "micro_batch": 8}, "batch_size=4 and micro_batch=8 contradict"),
        ({"load_in_4bit": False}, "load_in_4bit=false contradicts precision=nf4"),
        (
            {"load_in_4bit": False, "precision": "nf4"},
            "load_in_4bit=false contradicts precision=nf4",
        ),
        ({"gradient_checkponting": True}, "did you mean 'gradient_checkpointing'?"),
        ({"use_galore": True}, "use_galore=true is not modelled"),
        ({"plugins": True}, "plugins=true is not modelled"),
        ({"pretrained_model_name_or_path": True}, "or_path=true is not modelled"),
        ({"lora_r": "x", "use_galore": True}, "2 settings are wrong"),
    ],
)
def test_what_is_wrong_is_said_by_name(given, said):
    with pytest.raises(InputError) as caught:
        translate(given, TERMS, {"precision": "nf4"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--qlora", "--full"], "--qlora and --full contradict each other"),
        (["--full", "--lora-rank", "8"], "--full and --lora-rank contradict each other"),
        (
            ["--batch-size", "4", "--set", "per_device_train_batch_size=8"],
            "--batch-size=4 and per_",
        ),
        (["--seq-len", "x"], "max_length cannot be 'x'"),
    ],
)
def test_flags_that_contradict_each_other(flags, said, capsys):
    assert run(["estimate", "--model", "qwen3-8b", "--gpu", "t4", *flags]) == 2
    assert said in capsys.readouterr().err
