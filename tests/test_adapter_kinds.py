"""Kinds of adapters: LoRA, rsLoRA and DoRA as peft makes them, and those that are refused."""

import pytest

from tuner.app.estimate import one_configuration
from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu

MODEL = "tiny-llama-3m"
GPU = get_gpu("a100_80gb")
SIZES = {"micro_batch": 2, "max_length": 256, "grad_accum": 2, "lora_rank": 16}


def configuration(**changes):
    return one_configuration(None, MODEL, {**SIZES, **changes})[1]


def predicted(**changes):
    return predict(Subject("causal_lm", MODEL), configuration(**changes), GPU)


def test_rslora_takes_what_lora_takes():
    plain, scaled = predicted(), predicted(adapter="rslora")
    assert scaled.memory == plain.memory
    assert scaled.trainable_params == plain.trainable_params


@pytest.mark.parametrize("precision", [pytest.param("int8", marks=pytest.mark.proof), "nf4"])
def test_dora_has_a_magnitude_for_each_output_and_makes_whole_weights(precision):
    plain, dora = predicted(precision=precision), predicted(precision=precision, adapter="dora")
    assert dora.trainable_params > plain.trainable_params
    backward = [p.memory.phase_peak_bytes["backward"] for p in (plain, dora)]
    assert backward[1] > backward[0]


BOTH = "q_proj,v_proj"


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({"adapter": "prompt_tuning", "adapter_options": "num_virtual_tokens:20"}, 20 * 192),
        ({"adapter": "trainable_tokens", "adapter_options": "token_indices:[1,2]"}, 2 * 192),
        ({"adapter": "lora_fa", "lora_targets": "q_proj"}, None),
        ({"adapter": "loha", "lora_targets": BOTH}, None),
        ({"adapter": "oft", "lora_targets": BOTH, "adapter_options": "oft_block_size:16"}, None),
        ({"adapter": "vera", "lora_targets": BOTH}, None),
        (
            {
                "adapter": "ia3",
                "lora_targets": "k_proj,down_proj",
                "adapter_options": "feedforward_modules:[down_proj]",
            },
            None,
        ),
    ],
)
def test_other_methods_of_peft_are_traced(changes, trained):
    found = predicted(**changes)
    plain = predicted(lora_targets=changes.get("lora_targets", "q_proj"))
    if trained is not None:
        assert found.trainable_params == trained
    elif changes["adapter"] == "lora_fa":
        assert 2 * found.trainable_params == plain.trainable_params
    else:
        assert found.trainable_params != plain.trainable_params
    assert found.memory.peak_allocated_bytes > 0


def test_an_option_of_another_method_is_refused():
    with pytest.raises(InputError, match="token_indices are none of peft's vera"):
        predicted(adapter="vera", lora_targets=BOTH, adapter_options="token_indices:[1]")


@pytest.mark.proof
def test_losses_and_attention_of_published_runs_take_their_own_memory():
    kept = {"gradient_checkpointing": False}
    peaks = [
        predicted(max_length=1024, **changes).memory.peak_allocated_bytes
        for changes in (
            {"loss": "liger"},
            {"loss": "unwidened", "mixed_precision": "no"},
            {"loss": "transformers"},
            {"loss": "transformers_4_46"},
            {"attention": "sdpa", **kept},
            {"attention": "repeated_heads", **kept},
            {"attention": "masked_heads", **kept},
        )
    ]
    assert peaks == sorted(set(peaks))


def test_an_unknown_way_is_refused_by_its_name():
    with pytest.raises(InputError, match="question_answering"):
        predicted(program_ways="question_answerin")


@pytest.mark.parametrize(
    ("knob", "word", "nearest"),
    [
        ("adapter", "adalora", "init_r"),
        ("optimizer", "galore_adamw", "adafactor"),
        ("precision", "gptq", "nf4"),
    ],
)
def test_what_is_not_predicted_is_refused_with_what_comes_nearest(knob, word, nearest):
    with pytest.raises(InputError) as caught:
        configuration(**{knob: word})
    text = f"{caught.value} {[str(p) for p in caught.value.problems]}"
    assert f"{knob} {word} is not predicted" in text
    assert nearest in text


def test_an_adapter_without_rank_is_refused():
    with pytest.raises(InputError, match="adapter has no effect in full fine-tuning"):
        predicted(lora_rank=0, adapter="dora")
