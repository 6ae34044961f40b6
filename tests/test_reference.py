"""Small trainings for reference: that they run, and what is learned of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_fakes import profile_of

from tuner.core.errors import UnavailableError
from tuner.core.host import CpuTimes
from tuner.core.units import MIB
from tuner.cost.library_memory import PROCESSOR
from tuner.cost.speed.processor import on_its_device, processor
from tuner.cost.speed.profile import REFERENCE, load_profile
from tuner.predict import measure_device, reference
from tuner.predict.reference import (
    POINTS,
    WORKLOAD,
    ReferenceRun,
    calibrated_on_reference,
    model_config,
    run_reference,
)
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload

PROFILE = replace(profile_of("CPU Testium 9"), step_factor=None, live_factor=None)


@pytest.mark.slow
def test_a_training_is_run_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(reference, "_WITHIN_S", 600.0)
    found, again = run_reference([("fp32", 2, 48)])
    assert not found.gives_back
    assert again.gives_back
    assert (found.precision, found.micro_batch, found.length) == ("fp32", 2, 48)
    assert found.step_s > 0
    assert found.spread >= 0
    weights = sum(p.numel() for p in _session().model.parameters()) * 4
    assert found.resident_bytes > weights


def _session():
    return get_workload(WORKLOAD).open(
        model_config(), reference.configuration("fp32", 2, 48), reference._Processor()
    )


@pytest.mark.slow
def test_what_cannot_be_trained_is_said_with_the_last_words(monkeypatch):
    monkeypatch.setattr(reference, "_WITHIN_S", 600.0)
    with pytest.raises(UnavailableError, match="reference failed"):
        run_reference([("fp31", 2, 48)])


def test_a_profile_without_reference_says_why(monkeypatch):
    def fails():
        raise UnavailableError("no memory left")

    monkeypatch.setattr(measure_device, "run_reference", fails)
    profile = measure_device._with_reference(PROFILE, lambda line: None)
    assert profile.step_factor is None
    assert profile.skipped == (f"{REFERENCE}: no memory left",)
    # It would fail again: nobody waits for it twice.
    assert PROFILE.lacks_reference
    assert not profile.lacks_reference


@pytest.mark.parametrize(("busy", "spread"), [(10, 0.1), (80, 0.8)])
def test_a_busy_processor_is_remembered(monkeypatch, busy, spread):
    ticks = iter([CpuTimes(0, 0), CpuTimes(busy, 100)])
    monkeypatch.setattr(measure_device.host, "cpu_times", lambda: next(ticks))
    monkeypatch.setattr(measure_device, "run_reference", list)
    monkeypatch.setattr(
        measure_device,
        "calibrated_on_reference",
        lambda profile, runs: replace(profile, step_factor=1.0, step_spread=0.1),
    )
    found = measure_device._with_reference(PROFILE, lambda line: None)
    assert found.step_spread == spread


@pytest.mark.slow
def test_what_trainings_were_made_of_is_found_again(tmp_path):
    made = replace(
        PROFILE, launch_s=40e-6, step_factor=2.0, context_bytes=50 * MIB, live_factor=1.5
    )
    runs = [_as_predicted(made, point) for point in POINTS]
    found = calibrated_on_reference(PROFILE, runs)
    assert found.launch_s == pytest.approx(made.launch_s, rel=1e-3)
    assert found.step_factor == pytest.approx(made.step_factor, rel=1e-3)
    assert found.context_bytes == pytest.approx(made.context_bytes, rel=1e-3)
    assert found.live_factor == pytest.approx(made.live_factor, rel=1e-3)
    assert found.step_spread == 0.1
    path = tmp_path / "cpu.yaml"
    found.save(path)
    assert load_profile(path) == found


def _as_predicted(profile, point) -> ReferenceRun:
    """What a training takes where predictions are right."""
    from tuner.cost.memory import peak_memory
    from tuner.cost.speed.kernel_times import ProcessorKernelTimes
    from tuner.cost.speed.roofline import step_times
    from tuner.predict.predict import step_work

    gpu = processor(profile)
    traced = trace(
        get_workload(WORKLOAD),
        model_config(),
        reference.configuration(*point),
        compute_capability=PROCESSOR,
    )
    import numpy as np

    times = ProcessorKernelTimes(profile)
    step = step_times(step_work(traced), gpu, grad_accum=np.array([1]), kernel_times=times)
    live = peak_memory(traced.timeline, context_bytes=gpu.context_bytes, caching=False)
    resident = on_its_device(live, gpu, profile).device_bytes
    return ReferenceRun(*point, float(step.step_s[0]), 0.1, resident)
