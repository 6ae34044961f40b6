"""Predictions of a rank under FSDP2: a trace of fully_shard itself on tensors without data."""

from typing import Any

import pytest
from measure_samples import knobs, model_folder

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Prediction
from tuner.core.setup.distributed_knobs import gpus_per_trial
from tuner.core.setup.schemas import memory_order
from tuner.cost.library_memory import nccl_bytes
from tuner.predict import predictor as predictor_module
from tuner.predict.predict import predict
from tuner.predict.predictor import Predictor
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config

A6000 = get_gpu("a6000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return model_folder(folder, hidden_size=256, intermediate_size=768, num_hidden_layers=4)


@pytest.fixture(scope="module")
def subject(model: str) -> Subject:
    return Subject("causal_lm", model)


def asked(**changes: Any) -> Configuration:
    full = {"lora_rank": 0, "lora_targets": (), "grad_accum": 1, "mixed_precision": "no"}
    return Configuration({**knobs(max_grad_norm=1.0), **full, **changes})


def sharded(subject: Subject, ranks: int, **changes: Any) -> Prediction:
    return predict(subject, asked(gpus_per_trial=ranks, distributed="fsdp2", **changes), A6000)


def test_weights_and_optimizer_state_are_shared_between_the_ranks(subject):
    alone = predict(subject, asked(), A6000)
    at_end = [alone.memory.phase_peak_bytes["optimizer"]]
    for ranks in (2, 4):
        found = sharded(subject, ranks)
        assert found.memory.loaded_bytes == pytest.approx(
            alone.memory.loaded_bytes / ranks, rel=0.02
        )
        assert found.trainable_params == alone.trainable_params
        at_end.append(found.memory.phase_peak_bytes["optimizer"])
        assert at_end[-1] < 0.85 * at_end[-2]
        assert f"{ranks} ranks under fsdp2" in found.method
        assert sum(found.memory.breakdown.values()) == found.memory.device_bytes


@pytest.mark.parametrize(
    ("model", "layer"),
    [("qwen3.5-0.8b", "Qwen3_5DecoderLayer"), ("gemma-3-4b", "Gemma3DecoderLayer")],
)
def test_a_model_of_images_is_wrapped_by_the_layers_of_its_text(model, layer):
    """Its class names layers of both, where accelerate ends with those that are not there."""
    config = resolve_config(model)
    text = config.text_config
    text.num_hidden_layers, text.vocab_size = 4, 512
    text.layer_types = text.layer_types[:4]
    found = sharded(Subject("causal_lm", model, config), 8)
    assert f"accelerate needs fsdp_transformer_layer_cls_to_wrap={layer}" in found.method


def test_weights_are_gathered_for_each_micro_step_and_gradients_once(subject):
    exchange = {
        accumulation: sharded(subject, 2, grad_accum=accumulation).speed.breakdown_s["exchange"]
        for accumulation in (1, 2, 4)
    }
    gathering = exchange[2] - exchange[1]
    assert gathering > 0
    assert exchange[4] - exchange[2] == pytest.approx(2 * gathering)
    # Forward and backward gather, and one exchange of gradients is about half of that.
    assert 0.3 < (exchange[1] - gathering) / gathering < 0.8


def test_gradients_kept_between_micro_steps_have_a_name_and_a_way_without(subject):
    kept, exchanged = (
        sharded(subject, 4, grad_accum=2, sync_each_batch=each) for each in (False, True)
    )
    whole_bytes = 4 * kept.trainable_params  # in fp32, as the weights
    parts = kept.memory.breakdown
    assert parts["unsharded_gradients"] == pytest.approx(whole_bytes, rel=0.05)
    assert exchanged.memory.breakdown["unsharded_gradients"] == 0
    assert exchanged.memory.peak_allocated_bytes < kept.memory.peak_allocated_bytes
    assert exchanged.speed.breakdown_s["exchange"] > kept.speed.breakdown_s["exchange"]


def test_adapters_and_a_frozen_base_are_sharded_too(subject):
    found = sharded(subject, 2, lora_rank=8, lora_targets=("q_proj", "v_proj"))
    alone = predict(subject, asked(lora_rank=8, lora_targets=("q_proj", "v_proj")), A6000)
    assert found.trainable_params == alone.trainable_params
    assert found.memory.loaded_bytes < 0.6 * alone.memory.loaded_bytes


def test_backward_may_gather_a_frozen_embedding_that_it_does_not_need(tmp_path):
    untied = model_folder(tmp_path, num_hidden_layers=2, tie_word_embeddings=False)
    adapters = {"lora_rank": 8, "lora_targets": ("q_proj",), "gradient_checkpointing": False}
    found = sharded(Subject("causal_lm", untied), 2, **adapters)
    assert found.memory.peak_phase in ("forward", "backward")


@pytest.mark.parametrize("lora_rank", [0, pytest.param(8, marks=pytest.mark.proof)])
def test_shares_of_more_ranks_are_no_larger_and_what_is_kept_adds(subject, lora_rank):
    adapters = {"lora_rank": lora_rank, "lora_targets": ("q_proj",) if lora_rank else ()}
    given = {**adapters, "distributed": "fsdp2"}
    order = memory_order("causal_lm")
    for name, values, other in (
        ("gpus_per_trial", order.knobs["gpus_per_trial"], {}),
        ("reshard_after_forward", order.knobs["reshard_after_forward"], {"gpus_per_trial": 4}),
    ):
        # Buffers of NCCL go the other way, by less than a trial's margin (memory_order.py).
        found = []
        for value in values:
            configuration = asked(**{**given, **other, name: value})
            memory = predict(subject, configuration, A6000).memory
            buffers = nccl_bytes(A6000, gpus_per_trial(configuration))
            assert buffers is not None
            found.append(memory.device_bytes - buffers)
        assert found == sorted(found), name


def test_a_space_is_predicted_by_traces_and_refused_where_they_would_take_hours(
    model, subject, monkeypatch
):
    configurations = [asked(gpus_per_trial=2, distributed="fsdp2"), asked()]
    many = Predictor("causal_lm", model)
    monkeypatch.setattr(predictor_module, "MOST_TRACED", 0)
    with pytest.raises(InputError, match="traced in full"):
        many.predict(configurations[:1], A6000)
    monkeypatch.setattr(predictor_module, "MOST_TRACED", 1)
    assert many.predict(configurations[:1], A6000) == [predict(subject, configurations[0], A6000)]
