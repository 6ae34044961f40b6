"""A GPU that falls off the bus: said as what it is, and never taken for a trial's doing.

The driver is a fake with the errors of the real one (`pynvml.NVMLError`).
"""

import sys

import pynvml
import pytest
from nvml_fakes import GPU_IS_LOST, NOT_SUPPORTED, RESET_REQUIRED, UNKNOWN, FakeNvml

from tuner.app.cli.machine import examine
from tuner.app.device import local_gpus, lost_gpus
from tuner.core import nvml
from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration, Status
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import GpuWatch
from tuner.trial.factories import VerifiedFactory
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.preflight import obstacle, require_answer

MEMORY = get_gpu("a6000").memory_bytes
LOST = [GPU_IS_LOST, RESET_REQUIRED, UNKNOWN]
ON_GPU = MeasureOptions(device="cuda:0")
JOB = TrialJob("causal_lm", "plain", get_gpu("a6000"))


@pytest.fixture
def driver(monkeypatch):
    """Two RTX A6000 that answer."""
    fake = FakeNvml(
        name="NVIDIA RTX A6000", memory=(0, MEMORY), capability=(8, 6), driver="580.1",
        processes=[], utilization=97, cuda=12_080,
    )  # fmt: skip
    fake.count = 2
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_the_codes_are_those_of_the_header():
    assert pynvml.NVML_ERROR_GPU_IS_LOST == GPU_IS_LOST
    assert pynvml.NVML_ERROR_RESET_REQUIRED == RESET_REQUIRED
    assert pynvml.NVML_ERROR_UNKNOWN == UNKNOWN
    named = (
        "INSUFFICIENT_POWER",
        "TIMEOUT",
        "IRQ_ISSUE",
        "GPU_IS_LOST",
        "RESET_REQUIRED",
        "UNKNOWN",
    )
    assert tuple(getattr(pynvml, f"NVML_ERROR_{name}") for name in named) == nvml._LOST


@pytest.mark.parametrize("code", LOST)
class TestReadings:
    def test_a_lost_device_is_an_answer_with_what_to_do(self, driver, code):
        driver.lost = {0: code}
        for ask in (nvml.device_use, nvml.device_identity, nvml.device_processes):
            with pytest.raises(nvml.DeviceLostError, match="GPU 0 does not answer") as raised:
                ask(0)
            assert isinstance(raised.value, UnavailableError)
            assert "xid" in str(raised.value)
        assert nvml.device_fault(0)
        assert nvml.device_fault(1) is None
        assert driver.open == 0

    def test_the_other_devices_keep_their_numbers(self, driver, code):
        driver.lost = {0: code}
        assert [gpu.index for gpu in local_gpus()] == [1]
        (text,) = lost_gpus()
        assert text.startswith("GPU 0 does not answer its driver")

    def test_a_trial_does_not_begin_on_it(self, driver, code):
        driver.lost = {0: code}
        with pytest.raises(nvml.DeviceLostError):
            obstacle(ON_GPU)
        with pytest.raises(UnavailableError):
            VerifiedFactory(lambda: None, ("NVIDIA RTX A6000",), (MEMORY,))()

    def test_a_watch_over_steps_ends_with_what_it_saw(self, driver, code):
        with GpuWatch(0) as watch:
            driver.lost = {0: code}
        assert watch.utilization in (None, 0.97)
        assert driver.open == 0


def test_what_a_healthy_device_does_not_support_is_no_fault(driver):
    assert nvml.device_fault(0) is None
    driver.lost = {0: NOT_SUPPORTED}
    assert nvml.device_fault(0) is None
    require_answer(ON_GPU)
    require_answer(MeasureOptions(device="cpu"))


def test_without_a_driver_nothing_is_lost(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert lost_gpus() == []
    assert nvml.device_fault(0) is None
    require_answer(ON_GPU)


class TestTrial:
    def run(self, fault):
        nothing = lambda options, given_up: True  # noqa: E731 - a preflight that finds nothing
        with IsolatedRunner(JOB, ON_GPU, body="runner_bodies:PLAIN", preflight=nothing) as runner:
            return runner.run(Configuration({"act": fault}))

    def test_a_crash_on_a_lost_device_is_not_the_trials(self, driver):
        driver.lost = {0: GPU_IS_LOST}
        with pytest.raises(nvml.DeviceLostError):
            self.run("segfault")

    def test_a_crash_on_a_healthy_device_is(self, driver):
        assert self.run("segfault").status is Status.CRASHED


@pytest.mark.parametrize("code", LOST)
def test_doctor_has_it_as_a_problem(driver, code):
    driver.lost = {0: code, 1: code}
    found = [f for f in examine(print) if f.check == "GPU"]
    assert [f.level for f in found] == ["problem", "problem"]
    assert "xid" in found[0].fix
