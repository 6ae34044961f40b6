"""The embedder of workload `contrastive`: it trains, and its predictions are those of traces."""

import math

import pytest
import torch
from encoder_samples import (
    TINY_BERT,
    assert_compiled_like_traced,
    configuration,
    losses,
    opened,
    parameters_with_gradient,
    shallow_encoder,
)

from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.predict.training import get_workload, tokens_per_sample
from tuner.predict.training.contrastive import Experts, _imbalance, _on_hyperboloid
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config
from tuner.trial.device import RealEnvironment, open_session

NAICS = {
    "channels": ("title", "description", "excluded", "examples"),
    "short_channels": ("title",),
    "short_length": 24,
    "n_negatives": 24,
    "experts": 4,
    "expert_hidden": 1024,
    "geometry": "lorentz",
    "lora_rank": 8,
    "lora_dropout": 0.1,
    "effective_batch": 64,
    "micro_batch": 4,
}
TINY = {
    "channels": ("title", "text"),
    "short_channels": ("title",),
    "short_length": 4,
    "max_length": 12,
    "n_negatives": 2,
    "experts": 3,
    "expert_hidden": 16,
    "geometry": "lorentz",
    "lora_rank": 4,
    "micro_batch": 3,
    "effective_batch": 6,
    "mixed_precision": "no",
}


def tiny(**changes):
    return configuration("contrastive", **{**TINY, **changes})


@pytest.mark.proof
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "mixed_precision": "bf16",
            "gradient_checkpointing": False,
            "geometry": "cosine",
            "experts": 0,
            "channels": ("text",),
            "short_channels": ("none",),
        },
    ],
    ids=["lorentz", "autocast"],
)
def test_the_loss_falls(changes):
    _, session = opened(TINY_BERT, tiny(**changes), examples=3)
    found = losses(session, steps=30)
    assert all(map(math.isfinite, found))
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_gradients_reach_what_is_trained_and_nothing_else():
    _, session = opened(TINY_BERT, tiny())
    reached = parameters_with_gradient(session)
    trainable = {n for n, p in session.model.named_parameters() if p.requires_grad}
    expected = {"lora_A", "lora_B", "gate", "experts", "projection", "head"}
    assert all(any(part in name.split(".") for part in expected) for name in trainable)
    # All linear layers have adapters, the pooler too: its output is not used, so it gets no
    # gradient, and the optimizer keeps nothing for it.
    poolers = {name for name in trainable if "pooler" in name}
    assert len(poolers) == 2 * 2
    assert trainable - reached == poolers


def test_parameters_of_the_four_channel_embedder_on_minilm():
    rank, width, wide, layers = 8, 384, 1536, 6
    encoder = 22_713_216  # the published architecture, pooler included
    per_layer = rank * (4 * (width + width) + 2 * (width + wide))
    pooler = rank * (width + width)
    joined = 4 * width
    expert = joined * 1024 + 1024 + 1024 * joined + joined
    experts = joined * 4 + 4 + 4 * expert
    heads = (joined * width + width) + (width * (width + 1) + width + 1)
    trained = 4 * (layers * per_layer + pooler) + experts + heads
    assert trained == 14_689_413

    found = sizes_on_meta("all-minilm-l6-v2", configuration("contrastive", **NAICS))
    assert found == (trained, 4 * encoder + trained)


def sizes_on_meta(model, values):
    from tuner.predict.tracing.trace import _packages_on_meta, _setup

    config = resolve_config(model)
    recorder, path, environment = _setup(config, values, (7, 5))
    with _packages_on_meta(recorder, path):
        session = get_workload("contrastive").open(config, values, environment)
    return session.trainable_params, session.total_params


def test_a_step_is_all_texts_of_the_anchors():
    environment, session = opened(TINY_BERT, tiny())
    del environment
    session.micro_step(0)
    tokens = 3 * (2 + 2) * (4 + 12)
    assert session.counts.samples == 3
    assert session.counts.tokens == tokens
    assert 3 * tokens_per_sample("contrastive", tiny()) == tokens


def test_points_lie_on_the_hyperboloid():
    torch.manual_seed(0)
    points = _on_hyperboloid(torch.randn(5, 7, dtype=torch.float64))
    norms = points[:, 1:].square().sum(1) - points[:, 0].square()
    assert torch.allclose(norms, -torch.ones(5, dtype=torch.float64))


def test_experts_give_what_their_formula_says():
    torch.manual_seed(0)
    experts = Experts(8, 16, experts=4, top_k=2).eval()
    samples = torch.randn(6, 8)
    mixed, routing = experts(samples)
    for sample, result, chosen in zip(samples, mixed, routing.chosen, strict=True):
        scores = experts.gate(sample)
        shares = scores[chosen].softmax(0)
        both = torch.stack([experts.experts[int(n)](sample) for n in chosen])
        assert torch.allclose(result, shares @ both, atol=1e-6)
        assert set(chosen.tolist()) == set(scores.topk(2).indices.tolist())


def test_the_imbalance_is_least_where_experts_are_equally_busy():
    from tuner.predict.training.contrastive import _Routing

    even = _Routing(torch.full((4, 4), 0.25), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
    skewed = _Routing(torch.tensor([[0.7, 0.3, 0.0, 0.0]]).repeat(4, 1), torch.tensor([[0, 1]] * 4))
    assert float(_imbalance([even])) == pytest.approx(2.0)  # top_k
    assert float(_imbalance([skewed])) > 3.9


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_length": 65}, "64 positions"),
        ({"short_channels": ("titel",)}, "titel"),
        ({"experts": 2, "experts_per_sample": 3}, "3 is more than the 2 experts"),
        ({"lora_targets": ("q_proj",)}, "q_proj do not exist"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, text):
    with pytest.raises(InputError, match=text):
        opened(TINY_BERT, tiny(**changes))


@pytest.mark.parametrize(
    ("changes", "checkpoint", "text"),
    [({}, "some/folder", "checkpoint"), ({"persistent_workers": True}, None, "no effect")],
)
def test_what_would_have_no_effect_is_refused(changes, checkpoint, text):
    environment = RealEnvironment("cpu", checkpoint=checkpoint)
    with pytest.raises(InputError, match=text):
        open_session(get_workload("contrastive"), TINY_BERT, tiny(**changes), environment)


@pytest.mark.proof
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "gradient_checkpointing": False,
            "mixed_precision": "bf16",
            "attention": "eager",
            "padding": "none",
            "experts": 0,
            "micro_batch": 1,
        },
    ],
    ids=["checkpointing", "one sample"],
)
def test_compiled_predictions_are_those_of_full_traces(changes, tmp_path):
    model = shallow_encoder(tmp_path, "all-minilm-l6-v2", layers=3 if changes else 4)
    base = {**NAICS, "channels": ("title", "text"), "n_negatives": 2, "experts": 3}
    chosen = [
        configuration("contrastive", **{**base, **sizes, **changes})
        for sizes in (
            {"micro_batch": 7, "max_length": 200, "lora_rank": 24, "effective_batch": 7},
            {"micro_batch": 16, "max_length": 512, "lora_rank": 8},
        )
    ]
    assert_compiled_like_traced("contrastive", model, chosen, "a6000")


def test_padding_costs_attention_its_fastest_kernel(tmp_path):
    model = shallow_encoder(tmp_path, "all-minilm-l6-v2", layers=1)
    subject, gpu = Subject("contrastive", model), get_gpu("a100_80gb")
    base = {"channels": ("text",), "n_negatives": 1, "micro_batch": 8, "effective_batch": 8}
    padded, full = (
        predict(subject, configuration("contrastive", **base, padding=padding), gpu)
        for padding in ("max_length", "none")
    )
    assert padded.memory.peak_allocated_bytes > full.memory.peak_allocated_bytes
    assert padded.speed.step_s > full.speed.step_s
