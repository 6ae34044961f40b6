"""FSDP2 by rank: the prediction against fully_shard itself, and a trial of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulating import needs_emulator

from benchmarks.several_gpus import CASES, MORE, Answer, Case, compare, rows, write_model
from tuner.engine.custom_workload import trial_job
from tuner.engine.estimate import one_configuration
from tuner.engine.measuring import emulating
from tuner.estimators.predict import predict, resolve_subject
from tuner.gpus import get_gpu
from tuner.records import Configuration, Memory
from tuner.runner.emulated import EmulatedRunner
from tuner.units import MIB

LORA = next(case for case in CASES if case.name == "LoRA, bf16, checkpointed")
BY_ACCELERATE = next(case for case in MORE if case.name == "accelerate: all weights, mixed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@needs_emulator
@pytest.mark.parametrize(("case", "ranks"), [(LORA, 2), (LORA, 4), (BY_ACCELERATE, 2)])
def test_a_rank_is_predicted_as_fully_shard_trains_it(case: Case, ranks: int, model: Path) -> None:
    answer = compare(case, ranks, model)
    assert not answer.failure
    assert answer.emulated["allocated"] > 300 * MIB
    assert answer.holds, (answer.predicted, answer.emulated)
    assert abs(answer.share("reserved")) < 0.05


@needs_emulator
def test_two_ranks_that_exchange_take_what_is_predicted_of_one() -> None:
    settings = {"gpus_per_trial": 2, "distributed": "fsdp2", "precision": "nf4", "lora_rank": 8}
    sizes = {"micro_batch": 8, "max_length": 512, "grad_accum": 2, "num_workers": 0}
    settings |= sizes
    space, asked = one_configuration(None, "tiny-llama-3m", settings)
    gpu = get_gpu("h100_sxm")
    subject = resolve_subject(space.workload, space.predicted_model())
    predicted = predict(subject, asked, gpu).memory
    emulated = emulated_by_ranks(space, Configuration(asked), gpu)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "loaded_bytes"):
        sizes_of = getattr(predicted, name), getattr(emulated, name)
        assert sizes_of[0] == pytest.approx(sizes_of[1], rel=0.01), name


def emulated_by_ranks(space, asked: Configuration, gpu) -> Memory:
    options = emulating(gpu).options()
    with EmulatedRunner(trial_job(space, gpu, None, None), options, gpus=2) as runner:
        outcome = runner.run(asked)
    assert outcome.emulation is not None, outcome.message
    assert len(outcome.emulation.ranks) == 2
    return outcome.emulation.memory


def test_a_case_that_misses_or_fails_says_so_in_its_row() -> None:
    case = CASES[0]
    near = Answer(case, 2, {"allocated": 1000, "reserved": 90}, {"allocated": 995, "reserved": 100})
    far = Answer(case, 2, {"allocated": 1020, "reserved": 90}, {"allocated": 995, "reserved": 100})
    failed = Answer(case, 2, failure="it broke")
    assert [answer.holds for answer in (near, far, failed)] == [True, False, False]
    lines = list(rows([near, far, failed]))
    assert "misses" not in lines[0]
    assert "-10.0%" in lines[0]
    assert "misses" in lines[1]
    assert "it broke" in lines[2]


def test_twelve_cases_are_what_was_asked_for() -> None:
    assert len([ranks for case in CASES for ranks in case.ranks]) == 12
