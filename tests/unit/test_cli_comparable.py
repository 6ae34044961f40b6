"""Which earlier trials of a folder tell of the same: source, device, limit, model, margin."""

import dataclasses
from importlib import metadata
from types import SimpleNamespace

import pytest
from device_fakes import measured
from results_samples import GPU, SPACE, make_record

from tuner.app.target import comparable, sorted_by_use, stale_text, with_margin
from tuner.core.records import Source, Status, TrialRecord
from tuner.core.units import GIB
from tuner.trial.base import outcome_versions

TARGET = SimpleNamespace(space=SimpleNamespace(name=SPACE.name, knobs={}), gpu=GPU)
CPU = dataclasses.replace(GPU, id="cpu", name="a processor", memory_bytes=24 * GIB)


def record(batch: int, **fields):
    return make_record(settings={"micro_batch": batch, "lora_rank": 128}, **fields)


def test_predictions_and_measurements_are_kept_beside_each_other():
    records = (record(1), measured(record(1), device="A"), record(2))
    assert comparable(records, TARGET) == records


def test_predictions_of_other_versions_go_and_measurements_stay():
    old = record(1, versions={"torch": "1.0"})
    own = measured(record(2, versions={"torch": "1.0"}), device="A")
    new = record(3)
    assert comparable((old, own, new), TARGET) == (own, new)


def test_the_build_of_a_release_is_no_other_version():
    new = record(1, versions={"torch": "2.13.0", "model": "./a+b 12"})
    written = {**new.to_dict(), "versions": {"torch": "2.13.0+cpu", "model": "./a+b 12"}}
    assert TrialRecord.from_dict(written) == new


def test_the_versions_of_trials_are_releases(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert outcome_versions()["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "changes", [{"device": "B"}, {"memory_limit_bytes": 5}, {"versions": {"model": "another"}}]
)
def test_measurements_of_another_device_limit_or_model_go(changes):
    newest = measured(record(1), device="A")
    older = dataclasses.replace(measured(record(2), device="A"), **changes)
    assert comparable((older, newest), TARGET) == (newest,)


def test_measurements_of_other_versions_are_stale():
    old = measured(record(1, versions={"torch": "1.0"}), device="A")
    elsewhere = measured(record(2, versions={"torch": "1.0"}), device="B")
    new = measured(record(3), device="A")
    records = (old, elsewhere, new)
    assert comparable(records, TARGET) == (new,)
    assert sorted_by_use(records, TARGET).stale == (old,)
    assert stale_text((old,), (new,)) == "1 trial of other versions (torch 1.0)"
    assert stale_text((), (new,)) == ""


def test_other_memory_is_another_gpu():
    assert comparable((record(1, gpu_memory_bytes=GIB),), TARGET) == ()


def test_memory_of_another_driver_is_that_of_the_same_card():
    size = TARGET.gpu.memory_bytes
    (found,) = comparable((record(1, gpu_memory_bytes=size + 10 * 2**20),), TARGET)
    assert found.gpu_memory_bytes == size


def test_margin_applies_to_both_kinds():
    one = measured(record(1), device="A")
    free = GPU.memory_bytes - 30 * GIB
    assert one.source is Source.MEASURED
    assert with_margin(one, free).fits
    assert not with_margin(one, free + 1).fits
    changed = with_margin(record(1), free + 1)
    assert changed.outcome.prediction.budget.margin_bytes == free + 1
    assert not changed.fits


def on_cpu(memory_bytes: int) -> SimpleNamespace:
    gpu = dataclasses.replace(CPU, memory_bytes=memory_bytes)
    return SimpleNamespace(space=TARGET.space, gpu=gpu)


def test_of_processors_the_memory_is_judged_anew():
    """It is another at each start of a container; the trials of a processor stay what they are."""
    predicted = record(1, gpu=CPU, device_bytes=20 * GIB)
    ran = measured(record(2, gpu=CPU, device_bytes=10 * GIB), device="A")
    larger = comparable((predicted, ran), on_cpu(CPU.memory_bytes + 4096))
    assert [r.fits for r in larger] == [True, True]
    assert {r.gpu_memory_bytes for r in larger} == {CPU.memory_bytes + 4096}
    smaller = comparable((predicted, ran), on_cpu(12 * GIB))
    assert [r.fits for r in smaller] == [False, True]
    assert smaller[0].outcome.status is Status.OOM
    assert [r.fits for r in comparable(smaller, on_cpu(24 * GIB))] == [True, True]


def test_what_ran_out_of_less_memory_is_tried_again():
    out = dataclasses.replace(record(1, gpu=CPU, status=Status.OOM), device="A")
    out = dataclasses.replace(out, outcome=dataclasses.replace(out.outcome, prediction=None))
    assert comparable((out,), on_cpu(48 * GIB)) == ()
    assert len(comparable((out,), on_cpu(12 * GIB))) == 1
