"""How long each kernel takes on a GPU that was measured.

`MeasuredKernelTimes` answers from a device profile what the roofline answers from the peaks
of a data sheet: the seconds of one kernel, and the cost of launching it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tuner.estimate.profile import AttentionRate, DeviceProfile
from tuner.estimate.recorder import Work
from tuner.estimate.roofline import Efficiency, kernel_s
from tuner.gpus import Gpu

_NEIGHBOURS = 4
"""Measured points that are averaged for a shape between them."""

_LABELS = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float32": "fp32"}


class KernelTimes(Protocol):
    """How long kernels take on a GPU, and what launching one costs the host."""

    launch_s: float

    def kernel_s(self, work: Work, gpu: Gpu, *, allow_tf32: bool) -> float:
        """Seconds of one kernel on the device."""


class MeasuredKernelTimes:
    """`KernelTimes` from a device profile.

    A product's time is its roofline bound at the best measured rates, divided by the share of
    that bound which measured products of similar shape reached. Between shapes the share is
    averaged over the nearest measured ones, weighted by the inverse square of their distance in
    log2 of (m, n, k); a measured shape gets its measured time. Other kernels interpolate their
    rate in log2 of their size. What was not measured falls back to the roofline's guesses.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.launch_s = profile.launch_s
        self._shortest_s = profile.kernel_s
        self._peaks = {r.dtype: profile.peak_flops_per_s(r.dtype) or 0.0 for r in profile.matmul}
        self._stream = max((r.bytes_per_s for r in profile.traffic), default=math.inf)
        self._matmul: dict[str, list[_Point]] = {}
        for rate in profile.matmul:
            bound_s = self._bound_s(rate.dtype, 1, rate.m, rate.n, rate.k)
            share = bound_s * rate.flops_per_s / (2 * rate.m * rate.n * rate.k)
            point = _Point(_shape_place(rate.m, rate.n, rate.k), share)
            self._matmul.setdefault(rate.dtype, []).append(point)
        self._traffic: dict[str, list[_Point]] = {}
        for traffic in profile.traffic:
            point = _Point((math.log2(traffic.size_bytes),), traffic.bytes_per_s)
            self._traffic.setdefault(traffic.kind, []).append(point)
        self._attention: dict[tuple[str, bool, str], list[_Point]] = {}
        for attention in profile.attention:
            self._add_attention(attention)

    def kernel_s(self, work: Work, gpu: Gpu, *, allow_tf32: bool) -> float:
        """Seconds of one kernel on the device."""
        seconds = self._measured_s(work, allow_tf32)
        if seconds is None:
            seconds = kernel_s(work, gpu, Efficiency(), allow_tf32)
        return max(seconds, self._shortest_s)

    def _measured_s(self, work: Work, allow_tf32: bool) -> float | None:
        if work.kind == "attention":
            return self._attention_s(work)
        if work.flops:
            return self._matmul_s(work, allow_tf32)
        points = self._traffic.get(work.kind) or self._traffic.get("elementwise")
        if not points or not work.bytes_moved:
            return None
        place = (math.log2(work.bytes_moved),)
        return work.bytes_moved / _interpolated(points, place)

    def _matmul_s(self, work: Work, allow_tf32: bool) -> float | None:
        dtype = _LABELS.get(work.dtype, "")
        if dtype == "fp32" and allow_tf32 and "tf32" in self._matmul:
            dtype = "tf32"
        points = self._matmul.get(dtype)
        if not points:
            return None
        if work.shape is None:
            return work.flops / self._peaks[dtype]
        batch, m, n, k = work.shape
        # A batch of products fills the device as one product with as many rows.
        share = _interpolated(points, _shape_place(batch * m, n, k))
        return self._bound_s(dtype, batch, m, n, k) / share

    def _bound_s(self, dtype: str, batch: int, m: int, n: int, k: int) -> float:
        """The roofline of a product at the best measured rates, in seconds."""
        item = 4 if dtype in ("fp32", "tf32") else 1 if dtype == "int8" else 2
        out_item = 4 if dtype == "int8" else item
        moved = batch * ((m * k + k * n) * item + m * n * out_item)
        return max(2 * batch * m * n * k / self._peaks[dtype], moved / self._stream)

    def _add_attention(self, rate: AttentionRate) -> None:
        flops = 2 * rate.batch * rate.heads * rate.length**2 * rate.head_dim
        item = 4 if rate.dtype == "fp32" else 2
        moved = 4 * rate.batch * rate.heads * rate.length * rate.head_dim * item
        for backward, factor, per_s in (
            (False, 1.0, rate.forward_flops_per_s),
            (True, 2.5, rate.backward_flops_per_s),
        ):
            # Backward reads and writes twice as many tensors.
            place = _attention_place(flops * factor, moved * (2 if backward else 1))
            key = (rate.kernel, backward, rate.dtype)
            self._attention.setdefault(key, []).append(_Point(place, per_s))

    def _attention_s(self, work: Work) -> float | None:
        kernel = "efficient" if "efficient" in work.name else "flash"
        key = (kernel, "backward" in work.name, _LABELS.get(work.dtype, ""))
        points = self._attention.get(key)
        if not points or not work.flops or not work.bytes_moved:
            return None
        return work.flops / _interpolated(points, _attention_place(work.flops, work.bytes_moved))


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured value at a place in a space of logarithms of sizes."""

    place: tuple[float, ...]
    value: float


def _shape_place(m: int, n: int, k: int) -> tuple[float, ...]:
    # A product and its transpose do the same work: rows and columns may change places.
    return (math.log2(min(m, n)), math.log2(max(m, n)), math.log2(k))


def _attention_place(flops: float, moved: float) -> tuple[float, ...]:
    # FLOPs a byte grow with the length; how many heads and samples there are is in the FLOPs.
    return (math.log2(flops / moved), math.log2(flops) / 2)


def _interpolated(points: list[_Point], place: tuple[float, ...]) -> float:
    """The value at `place` by inverse distance weighting (Shepard) of the nearest points."""
    near = sorted((math.dist(point.place, place), point.value) for point in points)[:_NEIGHBOURS]
    if near[0][0] < 1e-9:
        return near[0][1]
    weights = [1 / distance**2 for distance, _ in near]
    return sum(w * value for w, (_, value) in zip(weights, near, strict=True)) / sum(weights)
