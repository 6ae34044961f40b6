"""Memory of a command on a GPU, as the driver tells it; there is a driver only in pretence."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tuner.core import host, nvml
from tuner.core.host import TreeMemory, descendants
from tuner.core.nvml import DeviceUse, _DeviceProcess

GIB = 2**30


@pytest.fixture
def helper():
    """A process below this one, with one below it."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while len(descendants(process.pid)) < 1:
        assert process.poll() is None
    yield process.pid, descendants(process.pid)[0]
    process.communicate(b"\n")


def pretend(monkeypatch, processes, used_bytes):
    monkeypatch.setattr(nvml, "device_processes", lambda index: processes)
    monkeypatch.setattr(nvml, "device_use", lambda index: DeviceUse(used_bytes, 48 * GIB, None))


def test_processes_below_are_added_up_and_others_left_out(monkeypatch, helper):
    own, below = helper
    memory = TreeMemory(os.getpid(), 0)
    named = [(own, 3 * GIB), (below, 2 * GIB), (1, 30 * GIB), (below, None)]
    pretend(monkeypatch, tuple(_DeviceProcess(p, "python", n) for p, n in named), 40 * GIB)
    assert memory.look(now=True) == 5 * GIB
    pretend(monkeypatch, (_DeviceProcess(own, "python", GIB),), 40 * GIB)
    assert memory.look(now=True) == GIB
    assert memory.peak_bytes == 5 * GIB
    assert not memory.is_of_device


def test_what_the_device_holds_more_stands_in_where_processes_are_hidden(monkeypatch):
    pretend(monkeypatch, None, 10 * GIB)
    memory = TreeMemory(os.getpid(), 0)
    assert memory.look(now=True) == 0
    pretend(monkeypatch, (_DeviceProcess(1, "process 1", 9 * GIB),), 17 * GIB)
    assert memory.look(now=True) == 7 * GIB
    assert memory.is_of_device


def test_it_does_not_look_all_the_time(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now_s))
    pretend(monkeypatch, None, 0)
    memory = TreeMemory(os.getpid(), 0)
    memory.look()
    pretend(monkeypatch, None, 5 * GIB)
    assert memory.look() == 0
    assert memory.look(now=True) == 5 * GIB
    pretend(monkeypatch, None, 6 * GIB)
    now_s += host._EVERY_S
    assert memory.look() == 6 * GIB
