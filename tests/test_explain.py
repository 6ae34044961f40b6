"""What `tuner explain` claims: breakdown, allocations, changes that fit, and what slows a step."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
from cli_samples import make_trial, write_samples
from device_fakes import measured
from hypothesis import given, settings
from hypothesis import strategies as st
from results_samples import make_memory, make_speed
from shared_cases.tiny_model import CONFIG

from tuner.app.cli.main import run
from tuner.app.estimate import estimate_configuration
from tuner.app.explain import compute_precision, explain, speed_notes
from tuner.app.predicting import SpacePredictor, paired_changes, reentrant_change, single_changes
from tuner.core.errors import InputError
from tuner.core.records import Configuration, MemoryBudget, Prediction
from tuner.core.units import GIB, MIB
from tuner.cost.allocator import round_size
from tuner.predict.predictor import COMPILED_TOLERANCE, PredictionJob, Predictor
from tuner.searches.store import ResultsFolder
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

SPACE = """\
name: small
workload: causal_lm
model: {model}
knobs:
  micro_batch: [1, 2, 8, 16]
  max_length: [64, 128, 256]
  lora_rank: [4, 64]
fixed:
  effective_batch: 16
  precision: fp16
  gradient_checkpointing: true
derived:
  grad_accum: effective_batch // micro_batch
constraints:
  - micro_batch * max_length <= 2048
floors:
  - max_length >= 128
data: {{examples: 1000, epochs: 2, token_lengths: {{quantiles: {{0.5: 64, 1: 256}}}}}}
"""
STAGES = """\
stages:
  - {name: easy, set: {max_length: 64}}
  - {name: hard, set: {max_length: 256}}
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "small.yaml").write_text(SPACE.format(model=folder / "model"))
    return load_space(str(folder / "small.yaml"))


def predictor_of(space, memory_mib: float) -> SpacePredictor:
    return SpacePredictor(space, get_gpu("t4", memory_bytes=round(memory_mib * MIB)))


def differing(space, one: Configuration, other: Configuration) -> list[str]:
    return [name for name in space.knobs if one[name] != other[name]]


@pytest.mark.slow
@given(data=st.data(), memory_mib=st.floats(165, 230))
@settings(max_examples=6, deadline=None)
def test_a_change_near_the_limit_is_said_to_fit_if_its_trace_says_so(space, data, memory_mib):
    everything = list(space.configurations(use_floors=False))
    current = data.draw(st.sampled_from(everything))
    predictor = predictor_of(space, memory_mib)
    (now,) = predictor.trace([current])
    changes = single_changes(predictor, now)
    # Said again by traces at full depth, which know nothing of changes.
    others = [c for c in everything if len(differing(space, current, c)) == 1]
    again = Predictor(PredictionJob(space.workload, space.model)).traced(others, predictor.gpu)
    traced = dict(zip(others, again, strict=True))
    assert {c.configuration for c in changes} == set(others)
    assert [c.lost for c in changes] == sorted(c.lost for c in changes)
    for change in changes:
        whole = traced[change.configuration]
        if is_near(change.prediction):
            assert change.prediction.fits == whole.fits
            assert change.prediction.memory.device_bytes == whole.memory.device_bytes
        lost = 1 - whole.speed.samples_per_s / now.prediction.speed.samples_per_s
        assert change.lost == pytest.approx(lost, abs=1e-3)
        assert bool(change.below) == (change.settings.get("max_length") == 64)


def is_near(prediction: Prediction) -> bool:
    usable_bytes = prediction.budget.usable_bytes
    return abs(prediction.memory.device_bytes / usable_bytes - 1) <= COMPILED_TOLERANCE


def test_pairs_only_where_no_single_change_helps(space):
    current = configure(space, {"micro_batch": 8, "max_length": 256, "lora_rank": 64})
    predictor = predictor_of(space, 4000)
    (now,) = predictor.trace([current])
    singles = single_changes(predictor, now)
    pairs = paired_changes(predictor, now, singles)
    smallest, smallest_pair = (
        min(
            each.prediction.memory.device_bytes
            for each in predictor.trace([change.configuration for change in changes])
        )
        for changes in (singles, pairs)
    )
    assert smallest_pair < smallest
    margin = 1.04
    between = (smallest_pair * margin + smallest) / 2 / MIB
    found = explain(predictor_of(space, between), current)
    assert not found.prediction.fits
    assert found.missing_bytes > 0
    assert found.fitting == []
    assert found.pairs
    assert all(c.prediction.fits and len(c.settings) == 2 for c in found.pairs)
    roomy = explain(predictor_of(space, smallest / MIB * 1.04), current)
    assert roomy.fitting
    assert roomy.pairs == []


def test_reentrant_checkpoints_are_offered_where_they_save(space, monkeypatch):
    """Beside the changes within the space stands what is learnt all the same."""
    current = configure(space, {"micro_batch": 8, "max_length": 256})
    predictor = predictor_of(space, 4000)
    (now,) = predictor.predict([current])
    with monkeypatch.context() as patch:
        patch.setattr("tuner.app.predicting.LEAST_SAVING", -1.0)
        change = reentrant_change(predictor, now)
    assert change.configuration["use_reentrant"] is True
    assert change.saved_bytes == (
        now.prediction.memory.device_bytes - change.prediction.memory.device_bytes
    )
    (after,) = predictor.predict([change.configuration])
    assert reentrant_change(predictor, after) is None
    found = explain(predictor, current)
    worth = change.saved_bytes >= 0.01 * now.prediction.memory.device_bytes
    assert (found.reentrant is not None) == worth
    assert not any("use_reentrant" in c.settings for c in found.changes)  # the space's own


def test_estimate_explain_and_compare_say_one_number(space):
    """A compiled timeline reserves less than the trace at full depth, which is what counts."""
    current = configure(space, {"micro_batch": 8, "max_length": 256, "lora_rank": 64})
    predictor = predictor_of(space, 4000)
    (traced,) = predictor.trace([current])
    estimated = estimate_configuration(space, current, predictor.gpu)
    explained = explain(predictor, current)
    assert estimated.prediction == explained.prediction == traced.prediction
    (compiled,) = predictor.predict([current])
    more = traced.prediction.memory.device_bytes - compiled.prediction.memory.device_bytes
    assert more != 0
    for change, alone in zip(
        explained.changes,
        predictor.predict([change.configuration for change in explained.changes]),
        strict=True,
    ):
        memory = change.prediction.memory
        assert memory.device_bytes == alone.prediction.memory.device_bytes + more
        assert memory.device_bytes == traced.prediction.memory.device_bytes - change.saved_bytes
        assert sum(memory.breakdown.values()) == memory.device_bytes
        low, high = change.prediction.intervals["device_bytes"]
        assert low < memory.device_bytes < high


def test_breakdown_has_shares_of_everything_and_allocations_say_where_they_are_from(space):
    found = explain(
        predictor_of(space, 4000), configure(space, {"micro_batch": 16, "max_length": 64})
    )
    assert sum(size for _, size, _ in found.shares()) == found.prediction.memory.device_bytes
    assert sum(share for _, _, share in found.shares()) == pytest.approx(1)
    sizes = [a.size_bytes for a in found.allocations]
    assert sizes == sorted(sizes, reverse=True)
    logits = next(a for a in found.allocations if a.category == "logits_and_loss")
    assert logits.shape[-1] == CONFIG["vocab_size"]
    assert logits.size_bytes == 16 * 64 * CONFIG["vocab_size"] * 4
    assert (logits.dtype, logits.made_by != "") == ("float32", True)


def test_truncation_stands_beside_a_change_of_the_length(space):
    predictor = predictor_of(space, 4000)
    (now,) = predictor.predict([configure(space, {"micro_batch": 2, "max_length": 256})])
    by_name = {str(c): c for c in single_changes(predictor, now)}
    assert by_name["max_length=64"].truncated == pytest.approx((0.5, 0.5))
    assert by_name["micro_batch=1"].truncated is None


def test_the_hardest_stage_is_explained(space, tmp_path):
    path = tmp_path / "staged.yaml"
    text = space.path.read_text().replace("name: small", "name: staged")
    text = text.replace("fixed:\n", "fixed:\n  max_length: 64\n")
    path.write_text(text.replace("  max_length: [64, 128, 256]\n", "") + STAGES)
    path.write_text(path.read_text().replace("floors:\n  - max_length >= 128\n", ""))
    staged = load_space(str(path))
    found = explain(predictor_of(staged, 4000), configure(staged, {"micro_batch": 8}))
    assert found.prediction.limiting_stage == "hard"
    assert any(256 in a.shape for a in found.allocations)
    whole = explain(
        predictor_of(space, 4000),
        configure(space, {"micro_batch": 8, "max_length": 256}),
    )
    assert found.shares() == whole.shares()


def prediction(**breakdown_s: float) -> Prediction:
    speed = dataclasses.replace(make_speed(300), breakdown_s=breakdown_s)
    return Prediction(
        budget=MemoryBudget(48 * GIB, GIB),
        memory=make_memory(30 * GIB),
        speed=speed,
        trainable_params=1,
        total_params=2,
        gpu="a6000",
        method="made up",
    )


def notes(space, gpu="a6000", *, settings=None, measurement=None, **breakdown_s):
    configuration = configure(space).replace(**(settings or {}))
    found = speed_notes(
        space, configuration, prediction(**breakdown_s), get_gpu(gpu), measured=measurement
    )
    return {note.kind: note for note in found}


class TestWhatSlows:
    def test_shares_are_those_of_the_breakdown_and_small_ones_are_not_said(self, space):
        found = notes(space, matmul=6.0, launch=3.0, recompute=0.95, dequantise=0.05)
        assert found["launch"].share == pytest.approx(0.3)
        assert "30.0% of the step" in found["launch"].text
        assert found["recompute"].share == pytest.approx(0.095)
        assert "dequantise" not in found

    @pytest.mark.parametrize(
        ("gpu", "values", "said"),
        [
            ("a6000", {"precision": "fp32", "mixed_precision": "no"}, "fp32"),
            ("a6000", {"precision": "fp32", "mixed_precision": "bf16"}, None),
            ("a6000", {"precision": "fp16"}, None),
            ("t4", {"precision": "nf4", "mixed_precision": "no"}, "bf16"),
            ("t4", {"precision": "fp32", "mixed_precision": "no"}, "fp32"),
        ],
    )
    def test_products_without_tensor_cores(self, space, gpu, values, said):
        found = notes(space, gpu, settings=values, matmul=8.0, elementwise=2.0)
        assert ("no_tensor_cores" in found) == (said is not None)
        if said:
            note = found["no_tensor_cores"]
            assert f"80.0% of the step are matrix products in {said}" in note.text
            card = get_gpu(gpu)
            best = max(card.flops[p] for p in ("tf32", "fp16", "bf16") if p in card.flops)
            assert f"({best / card.flops['fp32']:.1f} x)" in note.text

    def test_padding_is_that_of_the_batch(self, space):
        one = notes(space, settings={"micro_batch": 1}, matmul=1.0)
        many = notes(space, settings={"micro_batch": 16, "max_length": 128}, matmul=1.0)
        assert "padding" not in one
        assert 0.1 < many["padding"].share < 0.9
        assert f"{many['padding'].share:.1%} of the tokens are padding" in many["padding"].text

    def test_the_wait_for_data_is_said_where_it_was_measured(self, space, tmp_path):
        write_samples(tmp_path)
        trial = measured(make_trial(tmp_path, 20, 100), device="NVIDIA RTX A6000")
        found = trial.outcome.measurement
        waits = dataclasses.replace(found, data_wait_fraction=0.25)
        assert "data_loader" not in notes(space, matmul=1.0, measurement=found)
        note = notes(space, matmul=1.0, measurement=waits)["data_loader"]
        assert "25.0% of the measured steps waited for data" in note.text

    def test_every_sentence_has_a_number(self, space):
        found = notes(
            space,
            settings={"precision": "fp32", "mixed_precision": "no", "micro_batch": 16},
            **dict.fromkeys(("matmul", "launch", "recompute", "dequantise", "optimizer"), 1.0),
        )
        assert len(found) >= 6
        assert all(any(c.isdigit() for c in note.text) for note in found.values())


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({"precision": "nf4", "mixed_precision": "fp16"}, "fp16"),
        ({"precision": "nf4", "mixed_precision": "no", "compute_dtype": "fp32"}, "fp32"),
        ({"precision": "nf4", "mixed_precision": "no", "compute_dtype": "auto"}, "bf16"),
        ({"precision": "int8", "mixed_precision": "bf16"}, "int8"),
        ({"precision": "tf32", "mixed_precision": "no"}, "tf32"),
    ],
)
def test_precision_of_products(values, precision):
    assert compute_precision(Configuration(values)) == precision


@pytest.mark.parametrize("settings", [{"micro_batch": 8}, {"micro_batch": 16, "lora_rank": 64}])
def test_a_compiled_timeline_has_the_blocks_and_operators_of_its_trace(
    space, monkeypatch, settings
):
    predictor, asked = predictor_of(space, 230), configure(space, settings, strict=False)
    traced = explain(predictor, asked)
    monkeypatch.setattr("tuner.app.explain.can_trace", lambda: False)
    compiled = explain(predictor, asked)
    assert (traced.not_told, len(compiled.not_told)) == ([], 1)
    sizes = [sizes_of(found.allocations) for found in (traced, compiled)]
    least = max(min(size for size, _ in found) for found in sizes)
    one, other = ({k: n for k, n in found.items() if k[0] > least} for found in sizes)
    assert one == other
    assert len(one) > 2
    for ours, theirs in zip(compiled.operators, traced.operators, strict=True):
        assert (ours.label, ours.limited_by) == (theirs.label, theirs.limited_by)
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-3)


def sizes_of(allocations) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for each in allocations:
        found[round_size(each.size_bytes), each.category] += each.count
    return found


class TestCommand:
    ARGUMENTS = ("explain", "--space", "tiny.yaml", "--gpu", "a6000", "--set", "micro_batch=4")

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        write_samples(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "100")
        return tmp_path

    @pytest.mark.slow
    def test_text_has_verdict_allocations_changes_and_reasons(self, capfd):
        assert run([*self.ARGUMENTS, "--gpu-memory", "345MiB"]) == 0
        text = capfd.readouterr().out
        assert "fits        no" in text
        assert "Largest allocations at the peak, in the backward phase (traced)" in text
        assert "Operators that take most of a step (predicted)" in text
        assert "What slows it (predicted)" in text
        assert "make" in text

    def test_json_has_the_same(self, capfd):
        assert run([*self.ARGUMENTS, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["fits"] is True
        assert found["missing_bytes"] < 0
        assert found["configuration"]["micro_batch"] == 4
        assert found["peak_phase"] == found["prediction"]["memory"]["peak_phase"]
        total = sum(part["bytes"] for part in found["breakdown"])
        assert total == found["prediction"]["memory"]["device_bytes"]
        assert found["largest_allocations"][0]["total_bytes"] > 0
        assert len(found["most_expensive_operators"]) == 5

    def test_the_measured_wait_is_taken_from_the_results(self, folder, capfd):
        trial = measured(make_trial(folder, 20, 100, micro_batch=4), device="NVIDIA RTX A6000")
        outcome = dataclasses.replace(
            trial.outcome,
            measurement=dataclasses.replace(trial.outcome.measurement, data_wait_fraction=0.5),
        )
        with ResultsFolder(folder / "results", "tiny", "a6000").writer() as writer:
            writer.append(dataclasses.replace(trial, outcome=outcome))
        assert run([*self.ARGUMENTS]) == 0
        assert "50.0% of the measured steps waited for data" in capfd.readouterr().out

    def test_what_the_gpu_cannot_run_is_said(self, capfd):
        arguments = ["explain", "--space", "tiny.yaml", "--gpu", "t4", "--set", "precision=bf16"]
        assert run(arguments) == InputError.exit_code
        assert "bf16" in capfd.readouterr().err

    def test_code_of_ones_own_is_not_predicted(self, folder, capfd):
        (folder / "own.yaml").write_text(
            "name: own\ncommand: [python, train.py, --batch, '{batch}']\n"
            "knobs: {batch: [1, 2]}\nsamples_per_step: batch\n"
        )
        assert run(["explain", "--space", "own.yaml", "--gpu", "a6000"]) == 3
        assert "can be measured but not predicted" in capfd.readouterr().err.replace("\n", " ")
