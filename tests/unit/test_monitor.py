"""Readings of devices and host, what they advise, and how `tuner monitor` prints them."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import sys

import pynvml
import pytest
from device_fakes import A6000, pretend
from nvml_fakes import FakeNvml
from rich.console import Console

from tuner.app.cli import monitor
from tuner.app.cli.main import run
from tuner.app.watch import DeviceReading, HostReading, MachineReading, Watcher, advice
from tuner.core import host, nvml
from tuner.core.nvml import DeviceProcess, DeviceReader
from tuner.core.units import GIB

WHOLE = {
    "name": "NVIDIA RTX A6000",
    "memory": (40 * GIB, 48 * GIB),
    "utilization": 97,
    "power": 287_000,
    "power_limit": 300_000,
    "temperature": 81,
    "clock": 1200,
    "max_clock": 2100,
    "reasons": 0x4 | 0x20 | 0x1,
    "processes": [(12, 39 * GIB), (13, None)],
    "cuda": 12_080,
}
TRAINER = DeviceProcess(12, "python", 39 * GIB)


def test_the_fake_has_the_drivers_signatures():
    names = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = list(inspect.signature(getattr(pynvml, name)).parameters)
        fake = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        assert len(fake) == len(real), name
    assert pynvml.NVML_TEMPERATURE_GPU == 0
    assert pynvml.NVML_CLOCK_SM == 1


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


def test_a_reader_reads_in_base_units():
    reader = DeviceReader(FakeNvml(**WHOLE), 0)
    assert reader.memory() == (40 * GIB, 48 * GIB)
    assert (reader.power_w(), reader.power_limit_w()) == (287.0, 300.0)
    assert reader.temperature_c() == 81
    assert reader.clocks_hz() == (1.2e9, 2.1e9)
    assert reader.slowdowns() == ("power limit", "temperature (driver)")
    assert reader.processes() == (
        DeviceProcess(12, "program12", 39 * GIB),
        DeviceProcess(13, "program13", None),
    )


def test_what_a_device_does_not_tell_is_unknown():
    reader = DeviceReader(FakeNvml(name="a GPU"), 0)
    assert reader.memory() is None
    assert reader.clocks_hz() is None
    assert reader.slowdowns() is None
    assert reader.processes() is None
    assert (reader.temperature_c(), reader.power_limit_w()) == (None, None)


def test_cuda_version_of_the_driver(monkeypatch):
    driver = FakeNvml(**WHOLE)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert nvml.driver_cuda_version() == (12, 8)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert nvml.driver_cuda_version() is None
    assert driver.open == 0


@pytest.fixture
def watched(monkeypatch):
    """A machine with one busy device."""
    driver = FakeNvml(**WHOLE)
    pretend(monkeypatch, A6000)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(monitor, "FIRST_S", 0.0)
    return driver


def test_a_watcher_reads_everything_and_lets_go(watched):
    watcher = Watcher([0])
    (device,) = watcher.read().devices
    watcher.close()
    assert device.utilization == 0.97
    assert device.total_bytes == 48 * GIB
    assert device.slowdowns == ("power limit", "temperature (driver)")
    assert watched.open == 0


def test_the_processors_share_is_that_between_two_readings(monkeypatch):
    times = [host.CpuTimes(10, 100), host.CpuTimes(40, 200), host.CpuTimes(40, 200)]
    monkeypatch.setattr(host, "cpu_times", lambda: times.pop(0))
    watcher = Watcher([])
    assert watcher.read().host.cpu_share == pytest.approx(0.3)
    assert watcher.read().host.cpu_share is None  # no tick has passed


BUSY = DeviceReading(
    0, "GPU", 40 * GIB, 48 * GIB, utilization=0.98, processes=(TRAINER,), clock_hz=2e9
)
FREE_HOST = HostReading(16, 0.2, 10 * GIB, 64 * GIB)


def said(device: DeviceReading | None, machine: HostReading = FREE_HOST, number: int = 5) -> str:
    reading = MachineReading((device,) if device else (), machine)
    return "\n".join(advice([reading] * number))


def change(**changes) -> DeviceReading:
    return dataclasses.replace(BUSY, **changes)


class TestAdvice:
    def test_nothing_is_said_of_a_busy_healthy_device(self):
        assert said(BUSY) == ""
        assert advice([]) == []

    def test_slow_clocks(self):
        text = said(change(slowdowns=("power limit",), clock_hz=1.2e9, max_clock_hz=2.1e9))
        assert "clocks are held down by power limit: 1200 of 2100 MHz" in text

    def test_an_idle_device_waits_for_busy_processors_or_has_too_few_workers(self):
        idle = change(utilization=0.4)
        assert "idle 60% of the time and the processors are busy (97%)" in said(
            idle, dataclasses.replace(FREE_HOST, cpu_share=0.97)
        )
        assert "more num_workers" in said(idle)
        assert "idle" not in said(idle, number=1)  # one moment says nothing
        assert "idle" not in said(change(utilization=0.0, processes=()))  # nobody trains

    def test_memory_that_is_free_or_nearly_full(self):
        assert "28.00 GiB are free" in said(change(used_bytes=20 * GIB))
        assert "98% of the memory is in use" in said(change(used_bytes=47 * GIB))

    def test_processes_that_share_a_device(self):
        other = DeviceProcess(99, "notebook", None)
        text = said(change(processes=(TRAINER, other)))
        assert "2 processes share it: python (12), notebook (99)" in text

    def test_host_memory(self):
        full = dataclasses.replace(FREE_HOST, used_bytes=63 * GIB)
        assert "host: 98% of the memory is in use" in said(None, full)

    def test_everything_said_has_a_number(self):
        text = said(change(utilization=0.1, used_bytes=GIB, slowdowns=("sync boost",)))
        assert len(text.splitlines()) == 3
        assert all(any(c.isdigit() for c in line) for line in text.splitlines())


class TestCommand:
    def test_once_prints_devices_processes_and_host(self, watched, capsys):
        assert run(["monitor", "--once"]) == 0
        text = capsys.readouterr().out
        assert "GPU 0 NVIDIA RTX A6000: memory 40.00 GiB of 48.00 GiB (83%)" in text
        assert "power 287 of 300 W" in text
        assert "temperature 81 C" in text
        assert "clock 1200 of 2100 MHz" in text
        assert "process 12 program12 39.00 GiB" in text
        assert "host: " in text
        assert "advice: GPU 0: clocks are held down by power limit" in text

    def test_json_is_one_document(self, watched, capsys):
        assert run(["monitor", "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["devices"][0]["temperature_c"] == 81
        assert found["devices"][0]["processes"][1]["used_bytes"] is None
        assert any("power limit" in text for text in found["advice"])

    def test_without_a_gpu_it_says_so_and_shows_the_host(self, monkeypatch, capsys):
        pretend(monkeypatch)
        assert run(["monitor", "--once"]) == 0
        text = capsys.readouterr().out
        assert "no NVIDIA GPU with a working driver" in text
        assert "processors" in text

    def test_a_pipe_gets_a_line_for_each_reading_until_it_is_interrupted(
        self, watched, monkeypatch, capsys
    ):
        left = [None, None, None]

        def sleep(seconds: float) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()

        monkeypatch.setattr(monitor.time, "sleep", sleep)
        assert run(["monitor", "--interval", "5s"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(" GPU 0 " in line for line in lines) == 3
        assert sum("advice: GPU 0: clocks" in line for line in lines) == 1  # said once
        assert watched.open == 0

    def test_the_live_display_has_everything(self, watched):
        watcher = Watcher([0])
        out = Console(file=io.StringIO(), width=100)
        out.print(monitor.drawn([watcher.read()]))
        watcher.close()
        text = out.file.getvalue()
        for part in ("NVIDIA RTX A6000", "temperature", "81 C", "12 program12", "host", "- GPU 0"):
            assert part in text
