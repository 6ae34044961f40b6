"""A configuration is predicted to end as a trial of it would: ok, out of memory, or refused."""

import pickle
from dataclasses import replace

import pytest
from estimate_samples import SIZES, configuration

from tuner.core.records import Outcome, Source, Status
from tuner.core.units import MIB
from tuner.predict.predict import predict
from tuner.predict.predictor import Predictor
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu

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
        subject = Subject("causal_lm", model)
        found = predict(subject, configuration(**values), gpu, margin_fraction=margin_fraction)
        return Outcome.predicted(found)

    return run_on


def test_what_fits_is_ok(run):
    outcome = run()
    assert outcome.status is Status.OK
    assert outcome.prediction.fits
    assert outcome.prediction.source is Source.PREDICTED
    assert outcome.measurement is None
    assert outcome.evidence is outcome.prediction
    assert outcome.message == ""
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_what_needs_more_than_there_is_runs_out_of_memory(run):
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


def test_traces_are_kept_and_end_the_same(model, monkeypatch, tmp_path):
    """Side by side, alone and from the disk: the same numbers in the order of the question."""
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    asked = [configuration(lora_rank=4), configuration(gradient_checkpointing=True)]
    subject = Subject("causal_lm", model)
    alone = [predict(subject, each, A6000) for each in asked]
    job = ("causal_lm", model)
    assert Predictor(*job, workers=2).traced(asked, A6000) == alone
    assert any(tmp_path.iterdir())
    monkeypatch.setattr("tuner.predict.predictor.trace_all", None)  # would raise a TypeError
    assert Predictor(*job).traced(asked[::-1], A6000) == alone[::-1]
