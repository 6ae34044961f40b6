"""Predictions of many configurations: shared work, the cache, fallbacks, and refusals."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from measure_samples import model_folder
from started import run_python

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Prediction
from tuner.predict import cache
from tuner.predict.compiler import deepening
from tuner.predict.compiler.repetition import Different
from tuner.predict.predict import METHOD as IN_FULL
from tuner.predict.predict import predict
from tuner.predict.predictor import METHOD, Predictor
from tuner.predict.traces import Subject
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
    for batch in (2, 3, 4)
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
        return path, Predictor("causal_lm", model).predict([BASE], AMPERE)


@pytest.fixture
def stored_base(kept, folder) -> list[Prediction]:
    """The prediction of `BASE`; what it stored is in the folder, as if it had been made here."""
    path, predicted = kept
    shutil.copytree(path, folder)
    return predicted


@pytest.fixture
def job(model) -> tuple[str, str]:
    return "causal_lm", model


@pytest.fixture(scope="module")
def trace_once():
    """`sized_timeline`, which works once for each model and structure of this file."""
    real, known = deepening.sized_timeline, {}

    def trace_once(workload, model_config, structure):
        key = model_config.name_or_path, structure
        if key not in known:
            known[key] = real(workload, model_config, structure)
        return known[key]

    return trace_once


@pytest.fixture
def traced(monkeypatch, trace_once) -> list:
    """Every structure whose timeline is traced in this process, in order."""
    seen = []

    def sized_timeline(workload, model_config, structure):
        seen.append(structure)
        return trace_once(workload, model_config, structure)

    monkeypatch.setattr(deepening, "sized_timeline", sized_timeline)
    return seen


@pytest.fixture
def optimizers(monkeypatch) -> list:
    """Every optimizer that is traced, in order."""
    seen = []
    real = deepening.optimizer_steps

    def steps(name, parameters, *, clip, scaled):
        seen.append((name, clip))
        return real(name, parameters, clip=clip, scaled=scaled)

    monkeypatch.setattr(deepening, "optimizer_steps", steps)
    return seen


# -- what comes out ---------------------------------------------------------------------------


def test_predictions_come_in_the_order_of_the_configurations(job):
    together = Predictor(*job).predict(SPACE, AMPERE)
    backwards = Predictor(*job).predict(SPACE[::-1], AMPERE)[::-1]
    assert together == backwards
    methods = {prediction.method.partition(";")[0] for prediction in together}
    assert methods == {METHOD, IN_FULL}  # some are replayed


def test_estimates_are_those_of_replays_but_for_what_the_allocator_holds(job):
    """Times and blocks are exact; between replays only rests in blocks and free ones differ."""
    space = [
        one.replace(grad_accum=accum, eval_batch=rows, micro_batch=batch)
        for one in SPACE
        for accum in (1, 4)
        for batch, rows in ((1, 8), (3, 0), (5, 1))
    ]
    one = Predictor(*job)
    estimated, exact = one.predict(space, AMPERE), one.traced(space, AMPERE)
    for ours, theirs in zip(estimated, exact, strict=True):
        assert ours.speed.breakdown_s == pytest.approx(theirs.speed.breakdown_s)
        assert (ours.trainable_params, ours.total_params) == (
            theirs.trainable_params,
            theirs.total_params,
        )
        assert ours.memory.peak_allocated_bytes == pytest.approx(
            theirs.memory.peak_allocated_bytes, rel=0.005
        )
        if ours.memory.peak_phase == theirs.memory.peak_phase:
            parts = ours.memory.breakdown | {"allocator_overhead": 0}
            assert parts == theirs.memory.breakdown | {"allocator_overhead": 0}


def test_several_processes_say_the_same_as_one(job, monkeypatch):
    """Traced in two processes and in one: no difference."""
    configurations = [*SPACE, *(c.replace(gradient_checkpointing=False) for c in SPACE)]
    one = Predictor(*job).predict(configurations, AMPERE)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "off")
    assert Predictor(*job, workers=2).predict(configurations, AMPERE) == one


def test_progress_counts_structures(job):
    seen = []
    configurations = [
        *SPACE,
        BASE.replace(gradient_checkpointing=False),
        BASE.replace(micro_batch=1),
    ]
    first = Predictor(*job)
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


def test_five_types_of_gpu_share_traces(job, traced, optimizers):
    shared = Predictor(*job)
    gpus = ["a5000", "rtx4090", "a100_80gb_pcie", "h100_pcie", "l4"]
    for gpu in gpus:
        shared.predict(SPACE, get_gpu(gpu))
    assert len(traced) == 1
    assert len(optimizers) == 2


def test_sizes_optimizers_and_accumulation_share_a_structure(job, traced):
    changes = [
        {"micro_batch": 7},
        {"max_length": 1000},
        {"lora_rank": 100},
        {"optimizer": "adamw_torch"},
        {"max_grad_norm": 0.0},
        {"grad_accum": 1},
    ]
    Predictor(*job).predict([BASE, *(BASE.replace(**change) for change in changes)], AMPERE)
    assert len(traced) == 1


# -- the cache --------------------------------------------------------------------------------


def test_what_is_stored_is_not_traced_again(job, traced, optimizers):
    first = Predictor(*job).predict(SPACE, AMPERE)
    done = len(traced), len(optimizers)
    assert Predictor(*job).predict(SPACE, AMPERE) == first
    assert (len(traced), len(optimizers)) == done


WARM = """
import json, sys
from tuner.predict.predictor import Predictor
from tuner.space.gpus import get_gpu
from tuner.core.records import Configuration, Prediction
given = Configuration(json.loads(sys.argv[1]))
(found,) = Predictor("causal_lm", "smollm2-135m").predict([given], get_gpu("a5000"))
print(json.dumps([found.to_dict(), sorted({"torch", "transformers", "peft"} & set(sys.modules))]))
"""


@pytest.mark.proof
def test_a_stored_prediction_needs_neither_torch_nor_transformers():
    def run():
        done = run_python(
            "-c",
            WARM,
            json.dumps(BASE.to_dict()),
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


def test_damaged_entries_are_built_again(job, folder, traced):
    first = Predictor(*job).predict(SPACE, AMPERE)
    before = entries(folder)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert Predictor(*job).predict(SPACE, AMPERE) == first
    assert len(traced) == 2
    assert entries(folder).keys() == before.keys()
    traced.clear()
    assert Predictor(*job).predict(SPACE, AMPERE) == first
    assert traced == []


def without(name):
    return lambda arrays: {key: value for key, value in arrays.items() if key != name}


def changed(name, change):
    return lambda arrays: {**arrays, name: change(arrays[name])}


DAMAGES = {
    "no numbers": without("blocks.numbers"),
    "fewer blocks": changed("blocks.numbers", lambda a: a[:-1]),
    "fewer sizes": changed("sizes.coefficients", lambda a: a[:-1]),
    "unknown phases": changed("marks", lambda a: a + 100),
    "unknown operators": changed("operators.tensor_of", lambda a: a + 10_000),
    "unknown blocks": changed("events", lambda a: a + 10_000_000),
    "powers of 9": changed("sizes.exponents", lambda a: a + 9),
    "words for numbers": changed("events", lambda a: a.astype(np.str_)),
    "another number of parameters": changed("kinds", lambda a: np.append(a, "float32")),
    "an unknown parameter": changed("order", lambda a: a + 1_000),
    "nothing": lambda arrays: {},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_arrays_that_do_not_belong_together_are_built_again(
    job, folder, stored_base, traced, damage
):
    """Whole files with wrong content, as a bug or another program may write them."""
    for path in folder.glob("*.json"):
        path.unlink()
    for path in folder.glob("*.npz"):
        arrays = cache.read_arrays(path.stem)
        assert arrays is not None
        if "operators.tensor_of" in arrays:  # not the optimizer
            cache.write_arrays(path.stem, DAMAGES[damage](dict(arrays)))
    assert Predictor(*job).predict([BASE], AMPERE) == stored_base
    assert len(traced) == 1


@pytest.mark.parametrize("value", [[[1, 2]], [["a"] * 5], None])
def test_strange_predictions_are_made_again(job, folder, stored_base, value):
    for path in folder.glob("*.json"):
        cache.write_json(path.stem, value)
    assert Predictor(*job).predict([BASE], AMPERE) == stored_base


# -- fallbacks and refusals -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Different, InputError])
def test_a_structure_without_a_timeline_is_traced_each_time(job, model, monkeypatch, kind):
    def refuse(*_):
        raise kind("a layer does something new")

    for name in ("_from_few_layers", "_from_all_layers"):
        monkeypatch.setattr(deepening, name, refuse)
        refuse.__name__ = name
    ours = Predictor(*job).predict(SPACE, AMPERE)
    full = predict(Subject("causal_lm", model), SPACE[0], AMPERE)
    assert (ours[0].memory, ours[0].speed) == (full.memory, full.speed)
    assert {each.method.partition(";")[0] for each in ours} == {IN_FULL}


@pytest.mark.parametrize("knob", ["precision", "mixed_precision"])
def test_number_formats_that_a_gpu_lacks_are_refused(job, traced, knob):
    """Before anything is traced, whatever stands beside them."""
    with pytest.raises(InputError) as caught:
        Predictor(*job).predict(
            [BASE.replace(precision="fp32", mixed_precision="no"), BASE.replace(**{knob: "bf16"})],
            get_gpu("t4"),
        )
    text = str(caught.value) + " ".join(str(p) for p in caught.value.problems)
    assert "bf16" in text
    assert "T4" in text
    assert traced == []


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


def test_logits_that_an_evaluation_keeps_are_joined_on_the_gpu(job):
    asked = BASE.replace(eval_batch=16, max_length=200, loss="transformers")
    vocabulary = resolve_config(job[1]).vocab_size
    logits = 16 * 200 * vocabulary * 4
    (none, two, three) = Predictor(*job).traced(
        [asked, *(asked.replace(eval_kept=kept) for kept in (2, 3))], AMPERE
    )
    assert none.memory.peak_phase == "evaluation"
    peaks = [one.memory.phase_peak_bytes["evaluation"] for one in (none, two, three)]
    assert peaks[2] - peaks[1] >= 2 * logits  # one more kept, and its copy where they are joined
    assert peaks[1] > peaks[0]
