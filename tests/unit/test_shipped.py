"""Compiled timelines that come with the package: what is read is what was written."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.app.programs import check
from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration
from tuner.predict import predictor
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.shipped import FILE, Shipped, shipped, write
from tuner.space import configure, default_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture

MODEL = "qwen3-0.6b"


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    monkeypatch.setattr(predictor, "can_trace", lambda: False)


TRL = {
    "training_loop": "trainer",
    "loss": "chunked",
    "kbit_preparation": "none",
    "optimizer": "adamw_torch_fused",
    "precision": "nf4",
    "adapter_dtype": "bf16",
    "mixed_precision": "bf16",
    "compute_dtype": "bf16",
    "gradient_checkpointing": True,
}
"""A script of TRL."""


def configuration(**settings: object) -> Configuration:
    return configure(default_space(MODEL, settings), settings, strict=False)


PROGRAM = """
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-0.6B", dtype=torch.bfloat16, quantization_config=four_bit
)
args = SFTConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing=True
)
lora = LoraConfig(lora_dropout=0.05, target_modules="all-linear")
SFTTrainer(model, args, peft_config=lora).train()
"""
"""With dropout, only the timeline with checkpointing comes with tuner."""


def test_a_change_without_a_timeline_is_a_note_and_costs_no_verdict(without_torch, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    checked = check([str(tmp_path / "train.py")], get_gpu("rtx4090"), predict=True)
    assert checked.found.fits
    assert any("not among the compiled timelines" in note for note in checked.notes)


def test_a_damaged_file_is_said_with_its_path(tmp_path):
    write(tmp_path / "cut.zip", {"torch": "2.13.0"}, {}, {})
    whole = (tmp_path / "cut.zip").read_bytes()
    for damaged in (whole[:-30], whole[:60] + b"damage" + whole[66:], b""):
        (tmp_path / "cut.zip").write_bytes(damaged)
        with pytest.raises(UnavailableError, match=r"cut\.zip is damaged"):
            assert Shipped(tmp_path / "cut.zip").versions


def test_a_file_reads_as_it_was_written(tmp_path):
    model = architecture(MODEL).digest
    keys = sorted(shipped().structures(model))[:3]
    passes = {key: found for key in keys if (found := shipped().passes(model, key)) is not None}
    steps = shipped().optimizers(model)
    write(tmp_path / "copy.zip", shipped().versions, {model: passes}, {model: steps})
    copy = Shipped(tmp_path / "copy.zip")
    assert copy.versions == shipped().versions
    assert (list(copy.models()), sorted(copy.structures(model))) == ([model], keys)
    assert copy.optimizers(model) == steps
    for key, found in passes.items():
        again = copy.passes(model, key)
        assert again is not None
        theirs = again.to_arrays()
        for name, array in found.to_arrays().items():
            assert np.array_equal(array, theirs[name]), (key, name)
    assert copy.passes(model, "of a space") is None
    of_spaces = {"another": {"of a space": passes[keys[0]]}}
    write(tmp_path / "spaces.zip", copy.versions, {model: passes}, {}, of_spaces)
    spaces = Shipped(tmp_path / "spaces.zip")
    assert (list(spaces.models()), [*spaces.models(of_spaces=True)]) == ([model], ["another"])
    assert [*spaces.structures("another", of_spaces=True)] == ["of a space"]
    assert spaces.passes("another", "of a space") is not None
    write(tmp_path / "twice.zip", copy.versions, {model: passes}, {model: steps})
    assert (tmp_path / "twice.zip").read_bytes() == (tmp_path / "copy.zip").read_bytes()


def test_it_has_its_versions_and_a_size_that_people_download():
    assert set(shipped().versions) >= {"torch", "transformers", "peft"}
    assert FILE.stat().st_size < 40_000_000


@pytest.mark.parametrize(
    "settings",
    [{"precision": "nf4", "micro_batch": 4}, {**TRL, "max_length": 8192, "lora_rank": 24}],
)
def test_without_pytorch_the_file_answers(settings, without_torch):
    gpu = get_gpu("rtx4090")
    job = Predictor(PredictionJob("causal_lm", MODEL))
    (found,) = job.traced([configuration(**settings)], gpu)
    assert found.method.startswith(predictor.METHOD)
    assert f"torch {shipped().versions['torch']}" in found.method


def test_an_answer_of_the_file_is_kept(without_torch, monkeypatch):
    gpu, one = get_gpu("rtx4090"), configuration(precision="nf4")
    first = Predictor(PredictionJob("causal_lm", MODEL)).traced([one], gpu)
    monkeypatch.setattr(Predictor, "predict", None)
    again = Predictor(PredictionJob("causal_lm", MODEL))
    assert again.traced([one], gpu) == first
    monkeypatch.setitem(vars(shipped()), "checksum", "of another file")
    with pytest.raises(TypeError):
        again.traced([one], gpu)


@pytest.mark.parametrize(
    "settings", [{"attention": "eager"}, {"optimizer": "lion_8bit"}, {"lora_rank": 2}]
)
def test_settings_that_the_file_does_not_cover_are_refused(without_torch, settings):
    job = Predictor(PredictionJob("causal_lm", MODEL))
    with pytest.raises(UnavailableError, match="not among the compiled timelines"):
        job.traced([configuration(**settings)], get_gpu("rtx4090"))


@pytest.mark.proof
@pytest.mark.parametrize("settings", [{"precision": "bf16", "micro_batch": 2}, TRL])
def test_the_file_has_what_is_compiled_now(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    job = Predictor(PredictionJob("causal_lm", MODEL), anew=True)
    job.predict([configuration(**settings)], get_gpu("rtx4090"))
    ((key, compiled),) = job.compiled().items()
    stored = shipped().passes(*key)
    assert stored is not None
    assert key[0] == architecture(MODEL).digest
    theirs = stored.to_arrays()
    for name, array in compiled.to_arrays().items():
        assert np.array_equal(array, theirs[name]), name


@pytest.mark.proof
@pytest.mark.parametrize(
    ("optimizer", "rank"), [("adamw_torch_fused", 24), ("paged_adamw_8bit", 32)]
)
def test_optimizers_at_and_between_the_ranks_are_as_traced(optimizer, rank, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    settings = configuration(**{**TRL, "optimizer": optimizer, "lora_rank": rank})
    job = Predictor(PredictionJob("causal_lm", MODEL))
    (traced,) = job.predict([settings], get_gpu("rtx4090"))
    monkeypatch.setenv("TUNER_CACHE", "off")
    monkeypatch.setattr(predictor, "can_trace", lambda: False)
    (found,) = Predictor(PredictionJob("causal_lm", MODEL)).predict([settings], get_gpu("rtx4090"))
    for number in ("peak_allocated_bytes", "peak_reserved_bytes", "paged_bytes"):
        ours, theirs = getattr(found.memory, number), getattr(traced.memory, number)
        assert ours == pytest.approx(theirs, rel=1e-3), number
    assert found.speed.step_s == pytest.approx(traced.speed.step_s, rel=1e-3)
