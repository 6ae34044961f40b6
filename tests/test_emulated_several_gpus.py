"""Trials of several ranks take what is predicted of one."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import pytest
from emulating import needs_emulator

from tuner.app.estimate import one_configuration
from tuner.app.measuring import emulating
from tuner.app.search.supported import trial_job
from tuner.core.records import Configuration, Memory
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.trial.factories import EmulatedFactory

ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
EXCHANGING = {
    "fsdp2": (2, {"precision": "nf4", "lora_rank": 8, "micro_batch": 8, "max_length": 512}),
    "hsdp": (4, {"precision": "bf16", "lora_rank": 0, "grad_accum": 1, "dp_shard_size": 2}),
    "zero2": (2, {"mixed_precision": "bf16", "micro_batch": 2, "max_length": 128}),
}
"""By strategy: how many ranks exchange, and what they train."""


@needs_emulator
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp2",
        pytest.param("hsdp", marks=pytest.mark.proof),
        pytest.param("zero2", marks=[ZERO, pytest.mark.proof]),
    ],
)
def test_ranks_that_exchange_take_what_is_predicted_of_one(strategy: str) -> None:
    ranks, trained = EXCHANGING[strategy]
    given = {"gpus_per_trial": ranks, "distributed": strategy, "num_workers": 0, "grad_accum": 2}
    space, asked = one_configuration(None, "tiny-llama-3m", {**given, **trained})
    gpu = get_gpu("h100_sxm")
    predicted = predict(Subject(space.workload, space.predicted_model()), asked, gpu).memory
    emulated = emulated_by_ranks(space, Configuration(asked), gpu, ranks=ranks)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "loaded_bytes"):
        sizes_of = getattr(predicted, name), getattr(emulated, name)
        assert sizes_of[0] == pytest.approx(sizes_of[1], rel=0.01), name


def emulated_by_ranks(space, asked: Configuration, gpu, *, ranks: int = 2) -> Memory:
    options = emulating(gpu).options()
    make = EmulatedFactory(trial_job(space, gpu, None, None), options, ranks)
    with contextlib.closing(make()) as runner:
        outcome = runner.run(asked)
    assert outcome.emulation is not None, outcome.message
    assert len(outcome.emulation.ranks) == ranks
    return outcome.emulation.memory
