"""Readings of devices, from a driver that answers as NVML does."""

import inspect
import sys

import pynvml
import pytest
from nvml_fakes import FakeNvml

from tuner.core import nvml
from tuner.core.nvml import DeviceReader, _DeviceProcess
from tuner.core.units import GIB


def test_the_fake_has_the_drivers_signatures():
    assert pynvml.nvmlMemory_v2 == FakeNvml.nvmlMemory_v2
    names = [n for n in dir(FakeNvml) if n.startswith("nvml") and callable(getattr(FakeNvml, n))]
    assert len(names) > 10
    for name in names:
        real = list(inspect.signature(getattr(pynvml, name)).parameters)
        fake = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        assert len(fake) == len(real), name


def test_words_for_slow_clocks_are_those_of_the_header():
    named = {
        "SwPowerCap": "power limit",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "temperature (driver)",
        "HwThermalSlowdown": "temperature (hardware)",
        "HwPowerBrakeSlowdown": "power brake",
    }
    bits = {getattr(pynvml, f"nvmlClocksEventReason{name}"): text for name, text in named.items()}
    assert bits == nvml.SLOWDOWNS


def test_a_reader_tells_what_slows_a_device_and_who_uses_it():
    processes = [(12, 39 * GIB), (13, None)]
    reader = DeviceReader(FakeNvml(reasons=0x4 | 0x20 | 0x1, processes=processes), 0)
    assert reader.slowdowns() == ("power limit", "temperature (driver)")
    assert reader.processes() == (
        _DeviceProcess(12, "program12", 39 * GIB),
        _DeviceProcess(13, "program13", None),
    )


def test_what_a_device_does_not_tell_is_unknown():
    reader = DeviceReader(FakeNvml(name="a GPU"), 0)
    assert reader.slowdowns() is None
    assert reader.processes() is None


@pytest.mark.parametrize(
    ("reserved", "used", "total"),
    # As an H100 80GB with driver 580.159.04 answers, and as a driver before 510 would.
    [(503_316_480, 3_407_872, 85_017_493_504), (None, 3_407_872, 85_520_809_984)],
)
def test_memory_that_the_driver_keeps_is_told_apart(monkeypatch, reserved, used, total):
    driver = FakeNvml(
        name="NVIDIA H100 80GB HBM3", memory=(3_407_872, 85_520_809_984), reserved=reserved,
        capability=(9, 0), driver="580.159.04",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert nvml.device_use() == nvml.DeviceUse(used, total, None)
    assert nvml.device_identity().total_bytes == total


def test_cuda_version_of_the_driver(monkeypatch):
    driver = FakeNvml(cuda=12_080)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert nvml.driver_cuda_version() == (12, 8)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert nvml.driver_cuda_version() is None
    assert driver.open == 0
