"""The look at a device before a trial: waited for or refused, with names, and never cleared."""

import pytest

from tuner.core import nvml
from tuner.core.errors import UnavailableError
from tuner.core.nvml import DeviceUse, UnknownDeviceError, _DeviceProcess
from tuner.trial import preflight
from tuner.trial.base import MeasureOptions

GIB = 2**30
TRAINER = _DeviceProcess(pid=4711, name="train.py", used_bytes=5 * GIB)
HIDDEN = _DeviceProcess(pid=99, name="process 99", used_bytes=None)


class Driver:
    """What NVML would answer; `looks` counts how often it was asked."""

    def __init__(self, *answers, used_bytes=0, total_bytes=48 * GIB):
        self.answers = list(answers)
        self.use = DeviceUse(used_bytes, total_bytes, None)
        self.looks = []

    def device_processes(self, index: int = 0) -> tuple[_DeviceProcess, ...] | None:
        self.looks.append(index)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def device_use(self, index: int = 0, *, pid: int | None = None) -> DeviceUse | None:
        return self.use


@pytest.fixture
def install(monkeypatch):
    monkeypatch.setattr(preflight, "SETTLE_S", 0.0)
    monkeypatch.setattr(preflight, "time", CLOCK)

    def install(driver):
        monkeypatch.setattr(nvml, "device_processes", driver.device_processes)
        monkeypatch.setattr(nvml, "device_use", driver.device_use)
        return driver

    return install


class Clock:
    """Goes on when somebody waits, and then only."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def never(self, seconds: float) -> bool:
        """Wait; nobody gives the trial up."""
        self._now_s += seconds
        return False


CLOCK = Clock()


def wait(device="cuda:0", given_up=CLOCK.never, **known):
    return preflight.wait_for_device(MeasureOptions(device=device, **known), given_up)


def test_a_free_device_is_taken_at_once(install):
    driver = install(Driver((), used_bytes=GIB // 2))
    assert wait("cuda:3")
    assert driver.looks == [3]


def test_a_device_in_use_is_refused_with_names(install):
    install(Driver((TRAINER, HIDDEN), used_bytes=6 * GIB))
    with pytest.raises(UnavailableError) as caught:
        wait()
    assert "train.py (process 4711, 5.00 GiB), process 99 (process 99)" in caught.value.message
    assert "never ends other people's processes" in caught.value.hint


def test_a_device_in_use_is_waited_for(install, monkeypatch):
    monkeypatch.setattr(preflight, "SETTLE_S", 20.0)
    driver = install(Driver((TRAINER,), (TRAINER,), (), used_bytes=0))
    assert wait()
    assert len(driver.looks) == 3


@pytest.mark.parametrize(
    ("used_gib", "limit_gib", "free"),
    [(0.6, None, True), (5, None, False), (5, 24, True), (5, 43, False), (30, 24, False)],
)
def test_memory_without_a_name_counts_where_it_may_be_needed(install, used_gib, limit_gib, free):
    install(Driver((), used_bytes=round(used_gib * GIB)))
    limit = None if limit_gib is None else limit_gib * GIB
    options = MeasureOptions(device="cuda:0", memory_limit_bytes=limit)
    text = preflight.obstacle(options)
    assert (text is None) == free
    if not free:
        assert f"{used_gib:.2f} GiB of cuda:0" in text


def test_without_the_drivers_word_the_memory_decides(install):
    install(Driver(None, used_bytes=0))
    assert wait()
    install(Driver(None, used_bytes=9 * GIB))
    with pytest.raises(UnavailableError, match="does not name"):
        wait()


def test_a_device_that_is_lost_is_named(install):
    install(Driver(UnknownDeviceError("the driver knows no CUDA device 1")))
    with pytest.raises(UnavailableError, match="no CUDA device 1"):
        wait("cuda:1")


def test_on_the_cpu_the_limit_must_be_free(install):
    install(Driver(AssertionError("not to be asked")))
    assert wait("cpu")
    assert wait("cpu", memory_limit_bytes=2**20)
    with pytest.raises(UnavailableError, match="memory are free on this machine"):
        wait("cpu", memory_limit_bytes=2**60)
