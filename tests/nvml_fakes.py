# ruff: noqa: A002, N802 - names and parameters are the driver's
"""A driver that answers as NVML does, for machines without one."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class FakeNvml:
    """The functions of `pynvml` that the program calls, with their parameters.

    `values` has what each answers; one that is missing is not supported by the device.
    """

    NVMLError = NVMLError

    def __init__(self, **values: object) -> None:
        self.values = values
        self.open = 0

    def _value(self, name: str):
        if name not in self.values:
            raise NVMLError("Not Supported")
        return self.values[name]

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return self._value("name")

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        used, total = self._value("memory")
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._value("utilization"), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._value("power")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._value("power_limit")

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == 0
        return self._value("temperature")

    def nvmlDeviceGetClockInfo(self, handle, type):
        assert type == 1
        return self._value("clock")

    def nvmlDeviceGetMaxClockInfo(self, handle, type):
        assert type == 1
        return self._value("max_clock")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._value("reasons")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._value("processes")
        ]

    def nvmlSystemGetProcessName(self, pid):
        return f"/usr/bin/program{pid}"

    def nvmlSystemGetCudaDriverVersion(self):
        return self._value("cuda")
