# ruff: noqa: N802 - names are the driver's
"""A driver that answers as NVML does, for machines without one."""

from types import SimpleNamespace

from pynvml import NVMLError  # the real errors, with their codes and texts

NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND = 3, 2, 13
GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999


class FakeNvml:
    """The functions of `pynvml` that the program calls, with their parameters.

    `values` has what each answers; one that is missing is not supported by the device. `lost` has
    the error codes that devices answer everything with, by their index. `reserved` is what the
    driver keeps for itself; None for a driver that does not tell it apart.
    """

    NVMLError = NVMLError
    nvmlMemory_v2 = 33554472  # noqa: N815

    def __init__(self, **values: object) -> None:
        self.values = values
        self.lost: dict[int, int] = {}
        self.count = 1
        self.open = 0

    def _value(self, name: str, handle: int | None = None):
        if handle in self.lost:
            raise NVMLError(self.lost[handle])
        if name not in self.values:
            raise NVMLError(NOT_SUPPORTED)
        return self.values[name]

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= self.count:
            raise NVMLError(INVALID_ARGUMENT)
        if self.lost.get(index) == UNKNOWN:  # "Unable to determine the device handle"
            raise NVMLError(UNKNOWN)
        return index

    def nvmlDeviceGetName(self, handle):
        return self._value("name", handle)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        used, total = self._value("memory", handle)
        reserved = self.values.get("reserved", 0)
        if version is None:
            return SimpleNamespace(used=used + (reserved or 0), total=total)
        if reserved is None:
            raise NVMLError(FUNCTION_NOT_FOUND)
        return SimpleNamespace(used=used, total=total, reserved=reserved)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._value("utilization", handle), memory=0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._value("reasons", handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in self._value("processes", handle)
        ]

    def nvmlSystemGetProcessName(self, pid):
        return f"/usr/bin/program{pid}"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self._value("capability", handle)

    def nvmlSystemGetDriverVersion(self):
        return self._value("driver")

    def nvmlSystemGetCudaDriverVersion(self):
        return self._value("cuda")
