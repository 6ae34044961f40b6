"""Compiled timelines that come with the package: what is read is what was written."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration
from tuner.predict import predictor
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.shipped import FILE, Shipped, shipped, write
from tuner.space import configure, default_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture

MODEL = "llama-3.2-1b"


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    monkeypatch.setattr(predictor, "can_trace", lambda: False)


def configuration(**settings: object) -> Configuration:
    return configure(default_space(MODEL, settings), settings, strict=False)


def test_a_file_reads_as_it_was_written(tmp_path):
    passes, optimizers = shipped().everything()
    write(tmp_path / "copy.zip", shipped().versions, passes, optimizers)
    copy = Shipped(tmp_path / "copy.zip")
    assert copy.versions == shipped().versions
    again, steps = copy.everything()
    assert steps == optimizers
    for key, found in passes.items():
        theirs = again[key].to_arrays()
        for name, array in found.to_arrays().items():
            assert np.array_equal(array, theirs[name]), (key, name)
    assert (tmp_path / "copy.zip").read_bytes() == FILE.read_bytes()


def test_it_has_its_versions_and_a_size_that_people_download():
    assert set(shipped().versions) >= {"torch", "transformers", "peft"}
    assert FILE.stat().st_size < 40_000_000


def test_without_pytorch_the_file_answers(without_torch):
    gpu = get_gpu("rtx4090")
    (found,) = Predictor(PredictionJob("causal_lm", MODEL)).traced(
        [configuration(precision="nf4", micro_batch=4)], gpu
    )
    assert found.method.startswith(predictor.METHOD)
    assert f"torch {shipped().versions['torch']}" in found.method


@pytest.mark.parametrize(
    "settings", [{"attention": "eager"}, {"optimizer": "lion_8bit"}, {"lora_rank": 24}]
)
def test_settings_that_the_file_does_not_cover_are_refused(without_torch, settings):
    job = Predictor(PredictionJob("causal_lm", MODEL))
    with pytest.raises(UnavailableError, match="not among the compiled timelines"):
        job.traced([configuration(**settings)], get_gpu("rtx4090"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_the_file_has_what_is_compiled_now(precision, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    job = Predictor(PredictionJob("causal_lm", MODEL))
    job.predict([configuration(precision=precision, micro_batch=2)], get_gpu("rtx4090"))
    ((key, compiled),) = job.compiled().items()
    stored = shipped().passes(*key)
    assert stored is not None
    assert key[0] == architecture(MODEL).digest
    theirs = stored.to_arrays()
    for name, array in compiled.to_arrays().items():
        assert np.array_equal(array, theirs[name]), name
