"""Timelines that come with the package: what is read is what was written."""

import json

import base_install
import numpy as np
import pytest

from tuner.app.programs import ProgramOptions, check
from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration
from tuner.cost.as_arrays import to_arrays
from tuner.predict.predictor import Predictor
from tuner.predict.shipped import FILE, Shipped, shipped, write
from tuner.space import configure, default_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture, get_entry

MODEL = "qwen3-0.6b"


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    base_install.without_torch(monkeypatch)


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
    checked = check([str(tmp_path / "train.py")], get_gpu("rtx4090"), ProgramOptions(predict=True))
    assert checked.found.fits
    assert any("not among the timelines" in note for note in checked.notes)


def test_a_folder_with_the_shape_of_a_model_has_its_timelines(without_torch, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    config = {**get_entry(MODEL).config, "rms_norm_eps": 1e-5, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(PROGRAM.replace("Qwen/Qwen3-0.6B", str(folder)))
    (tmp_path / "theirs.py").write_text(PROGRAM)
    found = [
        check([str(tmp_path / name)], get_gpu("rtx4090"), ProgramOptions(predict=True)).found
        for name in ("train.py", "theirs.py")
    ]
    assert found[0].prediction.memory == found[1].prediction.memory
    assert found[0].plan.model == str(folder)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 1152}))
    with pytest.raises(UnavailableError, match="transformers"):
        check([str(tmp_path / "train.py")], get_gpu("rtx4090"), ProgramOptions(predict=True))


def test_a_damaged_file_is_said_with_its_path(tmp_path):
    write(tmp_path / "cut.zip", {"torch": "2.13.0"}, {}, {})
    whole = (tmp_path / "cut.zip").read_bytes()
    for damaged in (whole[:-30], whole[:60] + b"damage" + whole[66:], b""):
        (tmp_path / "cut.zip").write_bytes(damaged)
        with pytest.raises(UnavailableError, match=r"cut\.zip is damaged"):
            assert Shipped(tmp_path / "cut.zip").versions


def same(ours, theirs):
    found = to_arrays(theirs)
    return all(np.array_equal(array, found[name]) for name, array in to_arrays(ours).items())


def test_a_file_reads_as_it_was_written(tmp_path):
    model = architecture(MODEL).digest
    keys = sorted(shipped().structures(model))[:3]
    timelines = {key: shipped().timeline(model, key) for key in keys}
    names = sorted(shipped().optimizers(model))[:2]
    steps = {name: shipped().steps(model, name) for name in names}
    write(tmp_path / "copy.zip", shipped().versions, {model: timelines}, {model: steps})
    copy = Shipped(tmp_path / "copy.zip")
    assert copy.versions == shipped().versions
    assert (list(copy.models()), sorted(copy.structures(model))) == ([model], keys)
    assert sorted(copy.optimizers(model)) == names
    assert all(
        same(each, copy.steps(model, name)[rank])
        for name in names
        for rank, each in steps[name].items()
    )
    assert all(same(timelines[key], copy.timeline(model, key)) for key in keys)
    assert copy.timeline(model, "of a space") is None
    of_spaces = {"another": {"of a space": timelines[keys[0]]}}
    write(tmp_path / "spaces.zip", copy.versions, {model: timelines}, {}, of_spaces)
    spaces = Shipped(tmp_path / "spaces.zip")
    assert (list(spaces.models()), [*spaces.models(of_spaces=True)]) == ([model], ["another"])
    assert [*spaces.structures("another", of_spaces=True)] == ["of a space"]
    assert spaces.timeline("another", "of a space") is not None
    more = {"a third": {"x": timelines[keys[0]]}}
    write(tmp_path / "spaces.zip", copy.versions, more, {}, keep=True)
    both = Shipped(tmp_path / "spaces.zip")
    assert {*both.models()} == {model, "a third"}
    assert [*both.models(of_spaces=True)] == ["another"]
    write(tmp_path / "twice.zip", copy.versions, {model: timelines}, {model: steps})
    assert (tmp_path / "twice.zip").read_bytes() == (tmp_path / "copy.zip").read_bytes()


def test_it_has_its_versions_and_a_size_that_people_download():
    assert set(shipped().versions) >= {"torch", "transformers", "peft"}
    assert FILE.stat().st_size < 40_000_000


@pytest.mark.parametrize("settings", [TRL, {**TRL, "max_length": 8192, "lora_rank": 24}])
def test_without_pytorch_the_file_answers(settings, without_torch):
    gpu = get_gpu("rtx4090")
    job = Predictor("causal_lm", MODEL)
    (found,) = job.traced([configuration(**settings)], gpu)
    assert f"torch {shipped().versions['torch']}" in found.method


def test_an_answer_of_the_file_is_kept(without_torch, monkeypatch):
    gpu, one = get_gpu("rtx4090"), configuration(**TRL)
    first = Predictor("causal_lm", MODEL).traced([one], gpu)
    monkeypatch.setattr("tuner.predict.predictor.trace_all", None)
    again = Predictor("causal_lm", MODEL)
    assert again.traced([one], gpu) == first
    monkeypatch.setitem(vars(shipped()), "checksum", "of another file")
    with pytest.raises(TypeError):
        again.traced([one], gpu)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attention": "eager"}, r"with attention=eager \(with attention=sdpa it is answered\)"),
        ({"max_grad_norm": 0.0}, "optimizer=adamw_torch_fused"),
        ({"lora_rank": 2}, "optimizer=adamw_torch_fused"),
    ],
)
def test_settings_that_the_file_does_not_cover_are_named(without_torch, settings, named):
    job = Predictor("causal_lm", MODEL)
    with pytest.raises(UnavailableError, match=named):
        job.traced([configuration(**{**TRL, **settings})], get_gpu("rtx4090"))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("optimizer", "rank"), [("adamw_torch_fused", 24), ("paged_adamw_8bit", 24)]
)
def test_the_file_answers_as_a_trace_does(optimizer, rank, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    settings = configuration(**{**TRL, "optimizer": optimizer, "lora_rank": rank})
    job, gpu = ("causal_lm", MODEL), get_gpu("rtx4090")
    (traced,) = Predictor(*job, anew=True).predict([settings], gpu)
    monkeypatch.setenv("TUNER_CACHE", "off")
    base_install.without_torch(monkeypatch)
    (found,) = Predictor(*job).predict([settings], gpu)
    assert (found.memory, found.speed) == (traced.memory, traced.speed)
    assert found.intervals == traced.intervals
