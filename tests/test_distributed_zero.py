"""Predictions of a rank under ZeRO: a trace of DeepSpeed's engine on tensors without data."""

import sys
from typing import Any

import pytest
import torch
from measure_samples import knobs, model_folder

from tuner.core.errors import InputError, UnavailableError
from tuner.core.kinds import Phase
from tuner.core.records import Configuration, Prediction
from tuner.cost.memory import Course
from tuner.cost.operators.timeline import Mark, Timeline
from tuner.cost.parallel import sharded_exchange
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu

A6000 = get_gpu("a6000")


def has_deepspeed() -> bool:
    import importlib.util

    return importlib.util.find_spec("deepspeed") is not None


needs_deepspeed = pytest.mark.skipif(not has_deepspeed(), reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    model = model_folder(folder, hidden_size=256, intermediate_size=768, num_hidden_layers=4)
    return Subject("causal_lm", model)


def under(subject: Subject, strategy: str, ranks: int = 2, **changes: Any) -> Prediction:
    full = {
        "precision": "bf16",
        "mixed_precision": "bf16",
        "lora_rank": 0,
        "lora_targets": (),
        "grad_accum": 1,
        "reduce_bucket_size": 100_000,
    }
    ranked = {"gpus_per_trial": ranks, "distributed": strategy}
    asked = Configuration({**knobs(max_grad_norm=1.0), **full, **ranked, **changes})
    return predict(subject, asked, A6000)


@needs_deepspeed
def test_what_each_stage_shares_is_shared(subject):
    numbers = under(subject, "zero1").total_params
    held = {}
    for ranks in (2, 4):
        for strategy in ("zero1", "zero2", "zero3"):
            found = under(subject, strategy, ranks)
            held[strategy, ranks] = found.memory.phase_peak_bytes["optimizer"]
            assert found.total_params == found.trainable_params == numbers
            assert f"{ranks} ranks under {strategy}" in found.method
            assert sum(found.memory.breakdown.values()) == found.memory.device_bytes
    # Master weights and moments, 12 bytes a parameter, and in the third stage the weights too.
    for strategy, shared in (("zero1", 12), ("zero2", 12), ("zero3", 14)):
        saved = held[strategy, 2] - held[strategy, 4]
        assert saved >= 0.95 * shared * numbers / 4
    loaded = under(subject, "zero2").memory.loaded_bytes
    assert loaded == pytest.approx(numbers * (2 + 4 / 2), rel=0.02)


@needs_deepspeed
def test_the_bucket_is_there_whatever_the_model(subject):
    small, large = (
        under(subject, "zero2", reduce_bucket_size=size) for size in (100_000, 100_100_000)
    )
    added = large.memory.peak_allocated_bytes - small.memory.peak_allocated_bytes
    assert added == pytest.approx(2 * 100_000_000, rel=0.1)


@needs_deepspeed
def test_only_the_first_stage_sends_gradients_once_a_step(subject):
    def exchange(strategy: str, grad_accum: int) -> float:
        found = under(subject, strategy, grad_accum=grad_accum)
        return found.speed.breakdown_s["exchange"]

    assert exchange("zero1", 4) == pytest.approx(exchange("zero1", 1), rel=0.01)
    assert exchange("zero2", 4) > 2.5 * exchange("zero2", 1)


@pytest.mark.proof
@needs_deepspeed
def test_traces_of_deepspeed_leave_nothing_behind(subject):
    linear = torch.nn.functional.linear
    first = under(subject, "zero3", lora_rank=8, lora_targets=("q_proj",))
    assert torch.nn.functional.linear is linear
    under(subject, "zero2", 4)
    assert not torch.distributed.is_initialized()
    assert under(subject, "zero3", lora_rank=8, lora_targets=("q_proj",)).memory == first.memory


def test_what_deepspeed_does_not_train_is_refused_with_the_way_to_emulate(subject):
    for changes, said in (
        ({"mixed_precision": "fp16"}, "fp16 under DeepSpeed"),
        ({"mixed_precision": "no"}, "set mixed_precision bf16"),
        ({"precision": "nf4", "lora_rank": 8, "lora_targets": ("q_proj",)}, "nf4 under zero3"),
        ({"offload": 0.5, "lora_rank": 8, "lora_targets": ("q_proj",)}, "offload with DeepSpeed"),
    ):
        with pytest.raises(InputError) as refused:
            under(subject, "zero3", **changes)
        assert said in str(refused.value.problems)


def test_without_deepspeed_the_package_is_named(subject, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UnavailableError, match="ZeRO is DeepSpeed's") as missing:
        under(subject, "zero2")
    assert "pip install deepspeed" in str(missing.value.hint)
    assert not torch.distributed.is_initialized()


def test_what_ranks_send_is_counted_by_micro_step_and_sums_twice():
    marks = [
        Mark(0, Phase.FORWARD, 1, 0),
        Mark(1, Phase.FORWARD, 1, 1),
        Mark(2, Phase.OPTIMIZER, 1, 2),
    ]
    sent = [("c10d::allreduce_", 10, 0), ("c10d::_reduce_scatter_base_", 5, 1)]
    timeline = Timeline(marks=marks, collectives=[*sent, ("c10d::_allgather_base_", 7, 2)])
    # Three micro-steps as the first, one as the last, and one update.
    found = sharded_exchange(Course.of(timeline), 4)
    assert (found.scattered, found.gathered) == (3 * 10 + 5, 3 * 10 + 7)
    alone = Timeline(marks=[marks[0], Mark(1, Phase.OPTIMIZER, 1, 1)], collectives=sent[:1])
    assert sharded_exchange(Course.of(alone), 1).scattered == 10
