"""Simulated trials end as real ones would: ok, out of memory, or refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from estimate_samples import SIZES, configuration

from tuner.errors import InputError
from tuner.gpus import get_gpu
from tuner.records import Outcome, Source, Status
from tuner.runner.base import TrialJob
from tuner.runner.simulated import SimulatedRunner
from tuner.units import MIB

A6000 = get_gpu("a6000")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with the configuration of a tiny model."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(model):
    def run_on(gpu=A6000, *, margin_fraction=None, **values) -> Outcome:
        job = TrialJob("causal_lm", model, gpu, margin_fraction)
        return SimulatedRunner(job).run(configuration(**values))

    return run_on


def test_a_trial_that_fits_is_ok(run):
    outcome = run()
    assert outcome.status is Status.OK
    assert outcome.prediction.fits
    assert outcome.prediction.source is Source.PREDICTED
    assert outcome.measurement is None
    assert outcome.evidence is outcome.prediction
    assert outcome.duration_s > 0
    assert outcome.message == ""


def test_a_trial_without_room_for_the_margin_is_ok_and_does_not_fit(run):
    needed = run().prediction.memory.device_bytes
    outcome = run(replace(A6000, memory_bytes=needed), margin_fraction=0.1)
    assert outcome.status is Status.OK
    assert not outcome.prediction.fits


def test_a_trial_that_needs_more_than_there_is_runs_out_of_memory(run):
    needed = run().prediction.memory.device_bytes
    outcome = run(replace(A6000, memory_bytes=needed - 1))
    assert outcome.status is Status.OOM
    assert str(needed) in outcome.message
    assert str(needed - 1) in outcome.message
    assert outcome.phase == outcome.prediction.memory.peak_phase
    # What it would have needed is evidence too.
    assert outcome.prediction.memory.device_bytes == needed
    assert not outcome.prediction.fits


def test_more_of_everything_runs_out_of_memory(run):
    gpu = replace(A6000, memory_bytes=A6000.context_bytes + 100 * MIB)
    assert run(gpu).status is Status.OK
    assert run(gpu, micro_batch=64, max_length=256).status is Status.OOM


@pytest.mark.parametrize(
    ("gpu", "values", "message"),
    [
        ("t4", {"precision": "bf16"}, "bf16 on .*T4"),
        ("a6000", {"precision": "nf4", "lora_rank": 0}, "full fine-tuning"),
        ("a6000", {"lora_targets": ["c_attn"]}, "c_attn"),
        ("a6000", {"optimizer": "adamw_9bit"}, "unknown optimizer"),
    ],
)
def test_a_trial_that_cannot_run_is_invalid_and_says_why(run, gpu, values, message):
    outcome = run(get_gpu(gpu), **values)
    assert outcome.status is Status.INVALID
    assert outcome.prediction is None
    with pytest.raises(InputError, match=message):
        raise InputError(outcome.message)


def test_the_same_trial_ends_the_same(run):
    first, second = run(), run()
    assert first.prediction == second.prediction


def test_one_runner_runs_many_trials_independently(model):
    runner = SimulatedRunner(TrialJob("causal_lm", model, A6000))
    alone = SimulatedRunner(TrialJob("causal_lm", model, A6000)).run(configuration(lora_rank=4))
    assert runner.source is Source.PREDICTED
    assert runner.run(configuration(precision="nf4", lora_rank=0)).status is Status.INVALID
    assert runner.run(configuration(gradient_checkpointing=True)).status is Status.OK
    assert runner.run(configuration(lora_rank=4)).prediction == alone.prediction


def test_job_and_outcome_travel_between_processes(run, model):
    job = TrialJob("causal_lm", model, A6000)
    assert pickle.loads(pickle.dumps(job)) == job
    outcome = run()
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_unknown_models_are_refused_before_the_first_trial():
    with pytest.raises(InputError):
        SimulatedRunner(TrialJob("causal_lm", "/no/such/folder", A6000))
