"""`causal_lm` beyond text and adapters: a vision tower that never runs, modules trained whole."""

from typing import Any

import pytest
import torch
from encoder_samples import losses
from estimate_samples import SEVEN_LINEARS, SIZES, configuration, tiny_config, traced

from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.predict.training import get_workload
from tuner.predict.training.causal_lm import step_flops
from tuner.space.data import DataFacts
from tuner.space.gpus import get_gpu
from tuner.trial.device import RealEnvironment, open_session

RANK, HIDDEN, VISION_HIDDEN = 8, 64, 32


def tiny_gemma3() -> Any:
    """Gemma-3 with two layers of language model and two of SigLIP tower."""
    import transformers

    text = {**SIZES, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=319
    )


def opened(model_config: Any, **values: Any) -> Any:
    """A session on the processor that sees the same two examples again and again."""
    torch.manual_seed(0)
    environment = RealEnvironment("cpu", data=DataFacts(examples=2))
    return open_session(
        get_workload("causal_lm"), model_config, configuration(**values), environment
    )


def names(session: Any, *, with_gradient: bool) -> set[str]:
    """Trainable parameters that one pass gives a gradient, or those that it does not."""
    session.micro_step(0)
    return {
        name
        for name, parameter in session.model.named_parameters()
        if parameter.requires_grad and (parameter.grad is not None) == with_gradient
    }


# -- the tower ------------------------------------------------------------------------------


def test_adapters_of_the_tower_are_counted_and_have_no_gradient():
    """LoRA by name finds q, k and v of the tower's two layers: r * (in + out) each."""
    session = opened(tiny_gemma3(), precision="fp32")
    idle = names(session, with_gradient=False)
    assert len(idle) == 2 * 3 * 2
    assert all("vision_tower" in name and "lora_" in name for name in idle)
    sizes = {name: p.numel() for name, p in session.model.named_parameters()}
    assert sum(sizes[name] for name in idle) == 2 * 3 * RANK * 2 * VISION_HIDDEN
    trained = names(session, with_gradient=True)
    assert len(trained) == 2 * len(SEVEN_LINEARS) * 2
    assert all("language_model" in name and "lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", "adamw_torch"), ("nf4", "adamw_8bit"), ("int8", "sgd")]
)
def test_it_learns_two_examples_and_trace_and_session_count_the_same(precision, optimizer):
    values = {"precision": precision, "optimizer": optimizer, "mixed_precision": "no"}
    session = opened(tiny_gemma3(), **values)
    found = losses(session, steps=8)
    assert min(found[4:]) < found[0] or optimizer == "sgd"
    trace = traced(tiny_gemma3(), **values)
    assert (trace.trainable_params, trace.total_params) == (
        session.trainable_params,
        session.total_params,
    )


def test_the_tower_costs_memory_and_no_flops():
    config = tiny_gemma3()
    text = tiny_config("gemma3")
    flops = [
        step_flops(opened(each, precision="fp32").model, each).of(2, 32) for each in (config, text)
    ]
    assert flops[0] == flops[1]
    whole, alone = (traced(each, precision="bf16").timeline for each in (config, text))
    assert sum(b.size_bytes for b in whole.blocks) > sum(b.size_bytes for b in alone.blocks)


# -- modules trained whole ------------------------------------------------------------------


@pytest.mark.parametrize("saved", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_whole_modules_are_copied_trained_and_counted(saved):
    plain = opened(tiny_config(), precision="fp32")
    session = opened(tiny_config(), precision="fp32", modules_to_save=saved)
    copies = len(saved) * SIZES["vocab_size"] * HIDDEN
    assert session.trainable_params == plain.trainable_params + copies
    assert session.total_params == plain.total_params + copies
    trained = names(session, with_gradient=True)
    whole = {name for name in trained if "lora_" not in name}
    assert {name.split(".modules_to_save.")[0].rpartition(".")[2] for name in whole} == set(saved)
    assert not names(session, with_gradient=False)
    assert losses(session, steps=8)[-1] < losses(plain, steps=8)[-1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_to_save": ("lm_haed",)}, "lm_haed"),
        ({"modules_to_save": ("q_proj",)}, "lora_targets and in modules_to_save"),
        ({"modules_to_save": ("mlp",), "precision": "nf4"}, "quantised"),
        ({"modules_to_save": ("lm_head",), "lora_rank": 0}, "no effect in full fine-tuning"),
    ],
)
def test_what_cannot_be_trained_whole_is_refused(values, message):
    if values["modules_to_save"] == ("mlp",):
        values = {**values, "lora_targets": ("q_proj",)}
    with pytest.raises(InputError, match=message):
        opened(tiny_config(), **values)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"precision": "fp16", "modules_to_save": ("lm_head",)}, True),
        ({"precision": "nf4", "modules_to_save": ("lm_head",), "kbit_preparation": "trl"}, True),
        ({"precision": "nf4", "modules_to_save": ("lm_head",)}, False),  # peft widens it to fp32
        ({"precision": "fp16"}, False),
        ({"precision": "fp16", "lora_rank": 0}, True),
    ],
)
def test_gradients_of_fp16_copies_cannot_be_scaled(values, refused):
    from tuner.predict.training.causal_lm_settings import TrainingSetup

    settings = TrainingSetup.of(configuration(mixed_precision="fp16", **values))
    if refused:
        with pytest.raises(InputError) as caught:
            settings.check_machine("cuda:0")
        assert "cannot be scaled" in str(caught.value.problems)
    else:
        settings.check_machine("cuda:0")


# -- padding --------------------------------------------------------------------------------


def test_padded_batches_have_a_mask_that_hides_something():
    session = opened(tiny_config(), precision="fp32", padding="max_length")
    batch = session._next_batch()
    assert batch["input_ids"].shape[1] == 32
    assert (batch["attention_mask"].sum(1) == 31).all()
    assert (batch["labels"][:, -1] == -100).all()


@pytest.mark.proof
def test_a_mask_makes_attention_slower_where_flash_attention_would_run():
    subject, gpu = Subject("causal_lm", "qwen2.5-0.5b"), get_gpu("rtx3090")
    values = {"max_length": 1024, "mixed_precision": "bf16"}
    padded = predict(subject, configuration(**values, padding="max_length"), gpu)
    full = predict(subject, configuration(**values), gpu)
    assert padded.speed.step_s > full.speed.step_s
    with pytest.raises(InputError, match="flash_attention_2"):
        predict(
            subject,
            configuration(**values, padding="max_length", attention="flash_attention_2"),
            gpu,
        )
