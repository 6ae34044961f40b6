"""Predictions of a rank under DDP, against a full trace of its session and a real one.

The trace runs PyTorch's own DistributedDataParallel on tensors without data, in a fake process
group; the real session has two gloo ranks on this machine's processor.
"""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from measure_samples import knobs, model_folder

from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Configuration, Measurement, Memory, MemoryCategory, Status
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.core.units import MIB
from tuner.cost import parallel
from tuner.cost.speed.roofline import Efficiency, StepTimes
from tuner.predict.compiling import in_forks
from tuner.predict.predict import predict
from tuner.predict.predictor import METHOD, Predictor
from tuner.predict.traces import Subject
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner

A6000 = get_gpu("a6000")
TWO = Parallelism(2)


def configuration(**changes: Any) -> Configuration:
    values = knobs(max_grad_norm=1.0, mixed_precision="no", **changes)
    return Configuration(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama of some 5 million parameters, with buckets of several sizes in full training."""
    folder = tmp_path_factory.mktemp("model")
    return model_folder(folder, hidden_size=256, intermediate_size=768, vocab_size=4096)


@pytest.fixture(scope="module")
def subject(model: str) -> Subject:
    return Subject("causal_lm", model)


@pytest.fixture(scope="module")
def predictor(model: str) -> Predictor:
    return Predictor("causal_lm", model)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus_per_trial": 2, "grad_accum": 2},
        {"gpus_per_trial": 4, "grad_accum": 1, "max_length": 64},
        {"gpus_per_trial": 2, "grad_accum": 3, "optimizer": "sgd"},
        {"gpus_per_trial": 2, "lora_rank": 0, "lora_targets": (), "grad_accum": 2},
    ],
)
def test_a_rank_is_predicted_within_a_percent_of_the_trace_of_its_session(
    predictor, subject, changes
):
    asked = configuration(**changes)
    fast = predictor.predict([asked], A6000)[0]
    traced = predict(subject, asked, A6000)
    assert fast.method.startswith(METHOD)
    assert "2 ranks" in fast.method or "4 ranks" in fast.method
    found, true = fast.memory, traced.memory
    assert found.peak_allocated_bytes == pytest.approx(true.peak_allocated_bytes, rel=0.01)
    # What the allocator keeps of the broadcast is reused: some MiB, which only a model as small
    # as this one notices beside its CUDA context.
    assert abs(found.device_bytes - true.device_bytes) <= 16 * MIB
    assert found.loaded_bytes == pytest.approx(true.loaded_bytes, rel=0.01)
    for phase in ("forward", "backward", "optimizer"):
        sizes = (found.phase_peak_bytes[phase], true.phase_peak_bytes[phase])
        assert sizes[0] == pytest.approx(sizes[1], rel=0.01), phase
    assert sum(found.breakdown.values()) == found.device_bytes
    assert sum(true.breakdown.values()) == true.device_bytes
    assert fast.speed.step_s == pytest.approx(traced.speed.step_s, rel=0.01)
    assert (fast.trainable_params, fast.total_params) == (
        traced.trainable_params,
        traced.total_params,
    )


def test_ddp_takes_a_second_copy_of_the_gradients_and_no_more(predictor):
    alone, rank = (
        predictor.predict([configuration(lora_rank=0, lora_targets=(), **changes)], A6000)[0]
        for changes in ({}, {"gpus_per_trial": 2})
    )
    added = rank.memory.phase_peak_bytes["optimizer"] - alone.memory.phase_peak_bytes["optimizer"]
    gradient_bytes = 4 * alone.trainable_params
    assert gradient_bytes <= added <= gradient_bytes * 1.001
    assert rank.speed.samples_per_s < 2 * alone.speed.samples_per_s
    assert rank.speed.breakdown_s["exchange"] > 0


def test_throughput_is_of_the_whole_and_memory_of_a_rank(predictor):
    alone, two = predictor.predict([configuration(), configuration(gpus_per_trial=2)], A6000)
    samples = two.speed.samples_per_s * two.speed.step_s
    assert samples == pytest.approx(2 * alone.speed.samples_per_s * alone.speed.step_s)
    assert two.budget == alone.budget
    assert "24.0 MiB of buffers of NCCL" in two.method
    assert "rank" not in alone.method


AS_RESIDENT = 0.25
"""How far two processes that do the same were apart on loaded processors: 17 % of the larger."""


@pytest.mark.proof
def test_a_real_session_of_two_ranks_is_near_its_prediction(model, subject):
    """Real DDP over gloo: each rank's own memory, of which the larger one decides."""
    job = TrialJob("causal_lm", model, A6000)
    options = MeasureOptions(device="cpu", budget_s=0.0, timeout_s=3000.0)
    asked = configuration(gpus_per_trial=2, micro_batch=8, max_length=64)
    with IsolatedRunner(job, options, environment={"OMP_NUM_THREADS": "1"}) as runner:
        alone = _measured(runner, Configuration({**asked, "gpus_per_trial": 1}))
        found = _measured(runner, asked)
    assert len(found.ranks) == 2
    assert found.memory.device_bytes == max(rank.device_bytes for rank in found.ranks)
    low, high = sorted(rank.peak_allocated_bytes for rank in found.ranks)
    # The ranks do the same; how much of it is resident at once on a processor depends on its load.
    assert high / low < 1 + AS_RESIDENT
    assert found.trainable_params == alone.trainable_params
    samples = found.speed.samples_per_s * found.speed.step_s
    assert samples == pytest.approx(2 * 8 * 2)  # ranks, micro-batch, accumulation
    # What two ranks have beside one alone: the buckets, and what gloo keeps.
    predicted = [
        predict(subject, c, A6000).memory.peak_allocated_bytes
        for c in (Configuration({**asked, "gpus_per_trial": 1}), asked)
    ]
    beside = high - alone.memory.peak_allocated_bytes
    assert abs(beside - (predicted[1] - predicted[0])) < AS_RESIDENT * high


def _measured(runner: IsolatedRunner, asked: Configuration) -> Measurement:
    outcome = runner.run(asked)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.measurement is not None
    return outcome.measurement


def test_buckets_are_filled_in_the_order_of_backward():
    sizes = [3 * MIB, 10 * MIB, 20 * MIB, MIB // 2, MIB // 2]
    # The last two fill the first bucket; the others reach 25 MiB with the third.
    assert parallel.buckets_of(sizes) == [MIB, 30 * MIB, 3 * MIB]
    assert parallel.buckets_of([]) == []
    assert parallel.buckets_of([100 * MIB]) == [100 * MIB]


def test_what_backward_hides_is_not_waited_for():
    exchange = parallel._Exchange(buckets=(MIB, 25 * MIB, 25 * MIB))
    links = parallel.Links(51 * MIB, None, per_machine=4)  # all of it takes one second
    assert parallel.waited_s(exchange, TWO, links, 0.0) == pytest.approx(1.0)
    # Even then the last bucket is only sent when backward has ended.
    assert parallel.waited_s(exchange, TWO, links, 1e6) == pytest.approx(25 / 51)
    assert parallel.waited_s(exchange, Parallelism(1), links, 0.0) == 0.0
    assert parallel.waited_s(exchange, Parallelism(4), links, 0.0) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("settings", "expected_s"),
    [
        # Eight rings, one for each card: as many bytes as the link carries, or the eight cards.
        ({"ranks": 16, "machines": 2}, 15 / 16 / 4),
        # One GPU a machine has one card.
        ({"ranks": 2, "machines": 2}, 1 / 2 / 1),
        # Groups inside a machine gather by its link; eight rings of two add up between machines.
        ({"ranks": 16, "machines": 2, "strategy": "hsdp"}, 7 / 8 / 10 + 2 * 1 / 2 / 1),
        ({"ranks": 8, "strategy": "hsdp", "dp_shard_size": 4}, 3 / 4 / 10 + 2 * 1 / 2 / 10),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(settings, expected_s):
    parallelism = Parallelism(**{"strategy": "fsdp2", **settings})
    summed = 1 if parallelism.strategy == "hsdp" else 0
    # A link of 10 bytes a second, a card of 1 byte for each GPU; half a byte where there are eight.
    network = 0.5 if settings["ranks"] == 16 and not summed else 1.0
    links = parallel.Links(10.0, network, parallelism.per_machine)
    waited = parallel.waited_s(
        parallel._Exchange(gathered=1, summed=summed), parallelism, links, 0.0
    )
    assert waited == pytest.approx(expected_s)


def times(seconds: float) -> StepTimes:
    one = np.array([seconds])
    return StepTimes(one, {"matmul": one}, np.array([1.0]), one / 2, np.zeros((1, 2, 1)))


def test_waiting_for_others_is_a_part_of_the_step():
    exchange = parallel._Exchange(buckets=(10 * MIB,))
    found = parallel.with_exchange(times(1.0), [exchange], [TWO], 10 * MIB, A6000)
    step_s = float(found.step_s[0])
    assert 1.0 < step_s < 3.0
    assert sum(float(s[0]) for s in found.breakdown_s.values()) == pytest.approx(step_s)
    assert found.unknown(0) == (1.0, 1.0)  # waiting says nothing of hosts or kernels


def without_link(gpu: Gpu) -> Gpu:
    return replace(gpu, link_bytes_per_s=None)


def test_an_unknown_link_is_said_with_the_memory_that_is_known(subject):
    with pytest.raises(UnavailableError) as error:
        predict(subject, configuration(gpus_per_trial=2), without_link(A6000))
    assert "MiB and fits" in str(error.value) or "GiB and fits" in str(error.value)
    assert error.value.hint is not None
    assert "link_gb_per_s" in error.value.hint
    memory = predict(subject, configuration(), A6000).memory
    with pytest.raises(UnavailableError, match="does not fit"):
        parallel.link_of(replace(without_link(A6000), memory_bytes=MIB), TWO, memory)


def test_a_rank_is_highest_while_a_large_model_is_broadcast():
    live = {"load": 149 * MIB, "forward": 166 * MIB, "backward": 174 * MIB, "optimizer": 150 * MIB}
    parts = {**dict.fromkeys(MemoryCategory, 0), MemoryCategory.WEIGHTS: 174 * MIB}
    memory = Memory(174 * MIB, 174 * MIB, 174 * MIB, 149 * MIB, live, "backward", parts)
    rank = parallel.replicated(memory, [MIB // 2])
    assert rank.phase_peak_bytes["load"] == rank.peak_allocated_bytes == 2 * 149 * MIB
    assert sum(rank.breakdown.values()) == rank.device_bytes
    assert min(rank.breakdown.values()) >= 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"precision": "int8"}, "bnb_4bit_quant_storage"),
        ({"optimizer": "adamw_8bit"}, "sharded parameters"),
        ({"mixed_precision": "fp16"}, "scaler"),
    ],
)
def test_what_fsdp2_cannot_train_is_refused_with_the_reason(changes, word, subject):
    asked = Configuration(
        {**configuration(), **changes, "gpus_per_trial": 2, "distributed": "fsdp2"}
    )
    with pytest.raises(InputError) as error:
        predict(subject, asked, A6000)
    assert word in str([problem.message for problem in error.value.problems])
    alone = Configuration({**asked, "gpus_per_trial": 1})
    assert Parallelism.of(alone).problems(alone) == []


def test_copies_of_gradients_cost_traffic_or_kernels():
    few = parallel.copying_s(parallel._Exchange(buckets=(100 * MIB,), tensors=1), A6000)
    many = parallel.copying_s(parallel._Exchange(buckets=(1,), tensors=100), A6000)
    share = Efficiency().bandwidth["elementwise"]
    assert math.isclose(few, 400 * MIB / (A6000.bandwidth_bytes_per_s * share))
    assert many == pytest.approx(200 * 3e-6)


def _fails_in_forks(process: int, item: int) -> int:
    if os.getpid() != process:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing."
        )
    return item + 1


def test_a_process_that_has_traced_does_the_rest_itself():
    done = in_forks(_fails_in_forks, [1, 2, 3], os.getpid(), workers=2)
    assert dict(done) == {1: 2, 2: 3, 3: 4}
