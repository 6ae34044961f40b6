"""Predictions of many configurations: shared work, the cache, fallbacks, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from measure_samples import model_folder

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Prediction
from tuner.predict import cache, compiling, predictor
from tuner.predict.compiler.layouts import CompileError
from tuner.predict.predict import predict, resolve_subject
from tuner.predict.predictor import FALLBACK, METHOD, PredictionJob, Predictor
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture, load_catalogue, resolve_config

ROOT = Path(__file__).parents[1]
AMPERE = get_gpu("a5000")

BASE = Configuration(
    {
        "micro_batch": 2,
        "grad_accum": 2,
        "max_length": 96,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_targets": ("q_proj", "v_proj"),
        "precision": "bf16",
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "optimizer": "adamw_8bit",
        "max_grad_norm": 1.0,
        "attention": "sdpa",
    }
)
SPACE = [
    BASE.replace(micro_batch=batch, max_length=length, lora_rank=rank, optimizer=optimizer)
    for batch in (2, 3)
    for length in (96, 200)
    for rank, optimizer in ((8, "adamw_8bit"), (16, "sgd"))
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "timelines"))
    return tmp_path / "timelines"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return model_folder(folder, num_hidden_layers=5, max_position_embeddings=256)


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory) -> tuple[Path, list[Prediction]]:
    """A folder of what the prediction of `BASE` stores, and that prediction."""
    path = tmp_path_factory.mktemp("kept") / "timelines"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.FOLDER_VARIABLE, str(path))
        return path, Predictor(PredictionJob("causal_lm", model)).predict([BASE], AMPERE)


@pytest.fixture
def stored_base(kept, folder) -> list[Prediction]:
    """The prediction of `BASE`; what it stored is in the folder, as if it had been made here."""
    path, predicted = kept
    shutil.copytree(path, folder)
    return predicted


@pytest.fixture
def job(model) -> PredictionJob:
    return PredictionJob("causal_lm", model)


@pytest.fixture(scope="module")
def compile_once():
    """`compile_one`, which works once for each model and structure of this file."""
    real, known = compiling.compile_one, {}

    def compile_one(subject, structure):
        key = subject.model, structure
        if key not in known:
            known[key] = real(subject, structure)
        return known[key]

    return compile_one


@pytest.fixture
def compiled(monkeypatch, compile_once) -> list:
    """Every structure that is to be compiled in this process, in order."""
    seen = []

    def compile_one(subject, structure):
        seen.append(structure)
        return compile_once(subject, structure)

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    return seen


@pytest.fixture
def optimizers(monkeypatch) -> list:
    """Every optimizer step that is compiled, in order."""
    seen = []
    real = cache.build_optimizer

    def build(entry, name, sizes, *, clip, scaled):
        seen.append((name, clip))
        return real(entry, name, sizes, clip=clip, scaled=scaled)

    monkeypatch.setattr(predictor, "build_optimizer", build)
    return seen


# -- what comes out ---------------------------------------------------------------------------


def test_predictions_come_in_the_order_of_the_configurations(job):
    together = Predictor(job).predict(SPACE, AMPERE)
    backwards = Predictor(job).predict(SPACE[::-1], AMPERE)[::-1]
    assert together == backwards
    assert all(prediction.method.startswith(METHOD) for prediction in together)


def test_several_processes_say_the_same_as_one(job, monkeypatch):
    """Compiled in two processes and in one: no difference."""
    configurations = [*SPACE, *(c.replace(gradient_checkpointing=False) for c in SPACE)]
    one = Predictor(job).predict(configurations, AMPERE)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "off")
    assert Predictor(job, workers=2).predict(configurations, AMPERE) == one


def test_progress_counts_structures(job):
    seen = []
    configurations = [BASE, BASE.replace(gradient_checkpointing=False), BASE.replace(micro_batch=1)]
    first = Predictor(job)
    first.predict(configurations, AMPERE, on_progress=lambda *numbers: seen.append(numbers))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    seen.clear()
    more = [*configurations, BASE.replace(attention="eager")]
    first.predict(more, AMPERE, on_progress=lambda *numbers: seen.append(numbers))
    assert seen == [(3, 4), (4, 4)]
    seen.clear()
    first.predict(more, AMPERE, on_progress=lambda *numbers: seen.append(numbers))
    assert seen == []


# -- what is shared ---------------------------------------------------------------------------


def test_five_types_of_gpu_share_compiled_work(job, compiled, optimizers):
    shared = Predictor(job)
    gpus = ["a5000", "rtx4090", "a100_80gb_pcie", "h100_pcie", "l4"]
    for gpu in gpus:
        shared.predict(SPACE, get_gpu(gpu))
    assert len(compiled) == 1
    assert len(optimizers) == 2


def test_sizes_optimizers_and_accumulation_share_a_structure(job, compiled):
    changes = [
        {"micro_batch": 7},
        {"max_length": 1000},
        {"lora_rank": 100},
        {"optimizer": "adamw_torch"},
        {"max_grad_norm": 0.0},
        {"grad_accum": 1},
    ]
    Predictor(job).predict([BASE, *(BASE.replace(**change) for change in changes)], AMPERE)
    assert len(compiled) == 1


# -- the cache --------------------------------------------------------------------------------


def test_what_is_stored_is_not_compiled_again(job, compiled, optimizers):
    first = Predictor(job).predict(SPACE, AMPERE)
    done = len(compiled), len(optimizers)
    assert Predictor(job).predict(SPACE, AMPERE) == first
    assert (len(compiled), len(optimizers)) == done


WARM = """
import json, sys
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.space.gpus import get_gpu
from tuner.core.records import Configuration, Prediction
given = Configuration(json.loads(sys.argv[1]))
(found,) = Predictor(PredictionJob("causal_lm", "smollm2-135m")).predict([given], get_gpu("a5000"))
print(json.dumps([found.to_dict(), sorted({"torch", "transformers", "peft"} & set(sys.modules))]))
"""


@pytest.mark.proof
def test_a_stored_prediction_needs_neither_torch_nor_transformers():
    def run():
        done = subprocess.run(
            [sys.executable, "-c", WARM, json.dumps(BASE.to_dict())],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    cold, cold_modules = run()
    warm, warm_modules = run()
    assert cold_modules == ["peft", "torch", "transformers"]
    assert warm_modules == []
    assert warm == cold


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_damaged_entries_are_built_again(job, folder, compiled):
    first = Predictor(job).predict(SPACE, AMPERE)
    before = entries(folder)
    assert len(before) == 4  # passes, replays, and two optimizers
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert Predictor(job).predict(SPACE, AMPERE) == first
    assert len(compiled) == 2
    assert entries(folder).keys() == before.keys()
    compiled.clear()
    assert Predictor(job).predict(SPACE, AMPERE) == first
    assert compiled == []


def test_another_environment_does_not_use_what_is_stored(job, stored_base, compiled, monkeypatch):
    monkeypatch.setattr(cache, "environment_digest", lambda: "another version of torch")
    assert Predictor(job).predict([BASE], AMPERE) == stored_base
    assert len(compiled) == 1


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(
    job, stored_base, tmp_path, monkeypatch, compiled
):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "blocked"))
    assert Predictor(job).predict([BASE], AMPERE) == stored_base
    assert len(compiled) == 1


def without(name):
    return lambda arrays: {key: value for key, value in arrays.items() if key != name}


def changed(name, change):
    return lambda arrays: {**arrays, name: change(arrays[name])}


DAMAGES = {
    "no counts": without("counts"),
    "fewer moments": changed("counts", lambda a: a[:-1]),
    "fewer sizes": changed("sizes.coefficients", lambda a: a[:-1]),
    "other segments": changed("segments", lambda a: a + 1),
    "no first segment": changed("segments", lambda a: np.maximum(a, 1)),
    "unknown operators": changed("operators.tensor_of", lambda a: a + 10_000),
    "unknown blocks": changed("deep.events", lambda a: a + 10_000),
    "spans past the end": changed("deep.spans", lambda a: a + 10**7),
    "powers of 9": changed("sizes.exponents", lambda a: a + 9),
    "words for counts": changed("counts", lambda a: a.astype(np.str_)),
    "another number of groups": changed("trainable.counts", lambda a: np.append(a, 1)),
    "nothing": lambda arrays: {},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_arrays_that_do_not_belong_together_are_built_again(
    job, folder, stored_base, compiled, damage
):
    """Whole files with wrong content, as a bug or another program may write them."""
    (path,) = folder.glob("*.npz")
    arrays = cache.read_arrays(path.stem)
    assert arrays is not None
    cache.write_arrays(path.stem, DAMAGES[damage](dict(arrays)))
    assert Predictor(job).predict([BASE], AMPERE) == stored_base
    assert len(compiled) == 1


@pytest.mark.parametrize("value", [[[1, 2]], [["a"] * 5], None])
def test_strange_replays_and_optimizers_are_built_again(job, folder, stored_base, value):
    for path in folder.glob("*.json"):
        cache.write_json(path.stem, value)
    assert Predictor(job).predict([BASE], AMPERE) == stored_base


# -- fallbacks and refusals -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CompileError, InputError])
def test_what_does_not_compile_is_traced_and_says_why(job, model, monkeypatch, kind):
    def refuse(*_):
        raise kind("a layer does something new")

    monkeypatch.setattr("tuner.predict.compiler.compile.compile_passes", refuse)
    (ours,) = Predictor(job).predict([BASE], AMPERE)
    full = predict(resolve_subject("causal_lm", model), BASE, AMPERE)
    assert ours.memory == full.memory
    assert ours.speed == full.speed
    assert FALLBACK in ours.method
    assert "a layer does something new" in ours.method
    assert METHOD not in ours.method
    monkeypatch.undo()
    (ours,) = Predictor(job).predict([BASE], AMPERE)
    assert FALLBACK not in ours.method  # an error is not kept


@pytest.mark.parametrize("knob", ["precision", "mixed_precision"])
def test_number_formats_that_a_gpu_lacks_are_refused(job, compiled, knob):
    """Before anything is compiled, whatever stands beside them."""
    with pytest.raises(InputError) as caught:
        Predictor(job).predict(
            [BASE.replace(precision="fp32", mixed_precision="no"), BASE.replace(**{knob: "bf16"})],
            get_gpu("t4"),
        )
    text = str(caught.value) + " ".join(str(p) for p in caught.value.problems)
    assert "bf16" in text
    assert "T4" in text
    assert compiled == []


# -- the window -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", load_catalogue())
def test_the_window_is_the_one_that_transformers_uses(name):
    """Lengths from the window on make other masks, so the structure has to know it."""
    config = resolve_config(name)
    text = config.get_text_config()
    slides = getattr(text, "layer_types", None)
    used = getattr(text, "sliding_window", None)
    if slides is not None and "sliding_attention" not in slides:
        used = None
    assert architecture(name).sliding_window == used


def test_a_models_own_folder_has_the_same_window(tmp_path):
    entry = load_catalogue()["gemma-3-1b"]
    (tmp_path / "config.json").write_text(json.dumps(dict(entry.config)))
    assert architecture(str(tmp_path)).sliding_window == entry.text_config["sliding_window"]


@pytest.mark.parametrize("loss", ["transformers", "chunked"])
def test_an_evaluation_is_as_large_compiled_as_traced(job, loss):
    asked = BASE.replace(
        eval_batch=16, max_length=200, loss=loss, micro_batch=1, gradient_checkpointing=False
    )
    one = Predictor(job)
    compiled_one, steps = one.predict([asked, asked.replace(eval_batch=0)], AMPERE)
    (traced,) = one.traced([asked], AMPERE)
    phases = traced.memory.phase_peak_bytes
    assert traced.memory.peak_phase == compiled_one.memory.peak_phase == "evaluation"
    assert compiled_one.memory.phase_peak_bytes == pytest.approx(phases, rel=0.03)
    assert compiled_one.speed == steps.speed
    without = dict(compiled_one.memory.phase_peak_bytes)
    del without["evaluation"]
    assert without == steps.memory.phase_peak_bytes


def test_logits_that_an_evaluation_keeps_are_joined_on_the_gpu(job):
    asked = BASE.replace(eval_batch=16, max_length=200, loss="transformers")
    vocabulary = resolve_config(job.model).vocab_size
    logits = 16 * 200 * vocabulary * 4
    (none, two, three) = Predictor(job).traced(
        [asked, *(asked.replace(eval_kept=kept) for kept in (2, 3))], AMPERE
    )
    assert none.memory.peak_phase == "evaluation"
    peaks = [one.memory.phase_peak_bytes["evaluation"] for one in (none, two, three)]
    assert peaks[2] - peaks[1] >= 2 * logits  # one more kept, and its copy where they are joined
    assert peaks[1] > peaks[0]
