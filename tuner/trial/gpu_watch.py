"""What the driver says of a GPU while steps run: utilisation, power, energy.

A thread of its own asks ten times a second; a question takes microseconds, and the training
thread never waits for one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType

from tuner.core.nvml import DeviceReader, open_reader

INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """Means over a span of time; None is unknown. `utilization` is from 0 to 1."""

    utilization: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_source: str | None = None


class GpuWatch:
    """Watches CUDA device `index` between `__enter__` and `__exit__`; None watches nothing.

    `activity` is what was seen. Energy comes from the driver's counter, which GPUs have since
    Volta (nvmlDeviceGetTotalEnergyConsumption), else from mean sampled power and time.
    """

    def __init__(self, index: int | None) -> None:
        self._reader: DeviceReader | None = open_reader(index) if index is not None else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._utilizations: list[float] = []
        self._powers_w: list[float] = []
        self._start_j: float | None = None
        self._started = 0.0
        self.activity = GpuActivity()

    def __enter__(self) -> GpuWatch:
        if self._reader is not None:
            self._start_j = self._reader.energy_j()
            self._started = time.perf_counter()
            self._thread = threading.Thread(target=self._sample, daemon=True, name="gpu-watch")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reader is None or self._thread is None:
            return
        elapsed_s = time.perf_counter() - self._started
        end_j = self._reader.energy_j()
        self._stop.set()
        self._thread.join()
        self._reader.close()
        self.activity = _summary(
            self._utilizations, self._powers_w, (self._start_j, end_j), elapsed_s
        )

    def _sample(self) -> None:
        assert self._reader is not None
        while True:
            utilization, power_w = self._reader.utilization(), self._reader.power_w()
            if utilization is not None:
                self._utilizations.append(utilization)
            if power_w is not None:
                self._powers_w.append(power_w)
            if self._stop.wait(INTERVAL_S):
                return


def _summary(
    utilizations: list[float],
    powers_w: list[float],
    counter_j: tuple[float | None, float | None],
    elapsed_s: float,
) -> GpuActivity:
    utilization = fmean(utilizations) if utilizations else None
    start_j, end_j = counter_j
    if start_j is not None and end_j is not None and end_j > start_j:
        energy_j = end_j - start_j
        return GpuActivity(utilization, energy_j / elapsed_s, energy_j, "counter")
    if powers_w:
        power_w = fmean(powers_w)
        return GpuActivity(utilization, power_w, power_w * elapsed_s, "sampled power")
    return GpuActivity(utilization)
