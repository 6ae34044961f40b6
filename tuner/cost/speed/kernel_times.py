"""Kernel times on a GPU that was measured.

`_MeasuredKernelTimes` answers from a device profile what `Roofline` answers from the peaks of
a data sheet: the seconds of kernels, and the cost of launching one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.core.gpu import Gpu
from tuner.core.setup.common import QUANTIZED, TORCH_DTYPES
from tuner.cost.library_memory import context_bytes
from tuner.cost.speed.profile import METHOD, AttentionRate, DeviceProfile
from tuner.cost.speed.rates import matmul_peak
from tuner.cost.speed.roofline import BLOCKWISE, Host, KernelTimes, Roofline
from tuner.cost.work_arrays import Floats, WorkArrays

if TYPE_CHECKING:  # it imports msgspec, which an emulated program may not have
    from tuner.core.records import Configuration

CATALOGUE = "roofline from the GPU catalogue"
"""Method of a prediction whose kernel times come from the data sheet's peaks."""

_LABELS = {"int8": "int8", **{TORCH_DTYPES[word]: word for word in ("fp16", "bf16", "fp32")}}

_SOFTENING = 1e-9
"""Added to squared distances in octaves, so that a measured place gets its measured value."""

_CHUNK = 1 << 14
"""Places that are interpolated at a time: bounds the memory of their distances."""


class _MeasuredKernelTimes:
    """`KernelTimes` from a device profile.

    A product's time is its roofline bound at the best measured rates, divided by the share of
    that bound which measured products of similar shape reached. Between shapes the share is
    averaged over the measured ones, weighted by distance^-6 in log2 of (m, n, k): a measured
    shape gets its measured time. Attention is interpolated in the same way by its FLOPs and its
    FLOPs a byte, which grow with the length. The rate of memory traffic is interpolated in
    log2 of its size. What was not measured falls back to the roofline's guesses.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self._host = Host(profile.launch_s, profile.launch_s, profile.launch_s)
        self._shortest_s = profile.kernel_s
        self._stream = max(r.bytes_per_s for r in profile.traffic)
        self._peaks: dict[str, float] = {}
        self._products: dict[str, _Scattered] = {}
        for dtype in dict.fromkeys(rate.dtype for rate in profile.matmul):
            rates = [rate for rate in profile.matmul if rate.dtype == dtype]
            self._peaks[dtype] = max(rate.flops_per_s for rate in rates)
            shapes = np.array([(1, r.m, r.n, r.k) for r in rates], dtype=float)
            measured_s = 2 * shapes.prod(axis=1) / [rate.flops_per_s for rate in rates]
            share = self._bound_s(dtype, shapes) / measured_s
            self._products[dtype] = _Scattered(_shape_places(shapes), share)
        self._traffic: dict[str, tuple[Floats, Floats]] = {}
        for kind in dict.fromkeys(rate.kind for rate in profile.traffic):
            sizes = sorted((r.size_bytes, r.bytes_per_s) for r in profile.traffic if r.kind == kind)
            table = np.array(sizes, dtype=float)
            self._traffic[kind] = (np.log2(table[:, 0]), table[:, 1])
        self._attention = _attention_tables(profile)

    def host(self, gpu: Gpu) -> Host:
        """The host that was measured."""
        return self._host

    def seconds(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool, streams: bool = False
    ) -> Floats:
        """Seconds of each operator at each point, shape (W, P); see `KernelTimes.seconds`."""
        seconds = Roofline().seconds(works, gpu, allow_tf32=allow_tf32, streams=streams)
        for dtype in np.unique(works.dtypes):
            label = self._label(str(dtype), allow_tf32)
            of_dtype = works.dtypes == dtype
            if label in self._products:
                chosen = of_dtype & works.has_shape & (works.kinds != "attention")
                seconds[chosen] = self._product_s(label, works.shapes[chosen])
            if label in self._attention:
                chosen = of_dtype & (works.kinds == "attention")
                flops, moved = works.flops[chosen], works.bytes_moved[chosen]
                rate = self._attention[label].at(_attention_places(flops.ravel(), moved.ravel()))
                seconds[chosen] = flops / rate.reshape(flops.shape)
        without_flops = ~works.has_shape & ~works.flops.any(axis=1) & (works.names != BLOCKWISE)
        for kind in np.unique(works.kinds[without_flops]):
            chosen = without_flops & (works.kinds == kind)
            rates = self._traffic.get(str(kind), self._traffic.get("elementwise"))
            if rates is not None:
                moved = works.bytes_moved[chosen]
                seconds[chosen] = moved / np.interp(np.log2(np.maximum(moved, 1)), *rates)
        return np.maximum(seconds, self._shortest_s)

    def ends(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool
    ) -> Iterator[tuple[Floats, Floats]]:
        """Nothing: this board's kernels were measured."""
        return iter(())

    def _label(self, dtype: str, allow_tf32: bool) -> str:
        label = _LABELS.get(dtype, "")
        return "tf32" if label == "fp32" and allow_tf32 and "tf32" in self._products else label

    def _product_s(self, dtype: str, shapes: Floats) -> Floats:
        """Seconds of products: `shapes` (W, 4, P) to (W, P)."""
        rows = np.moveaxis(shapes, 1, 2).reshape(-1, 4)
        unique, where = np.unique(rows, axis=0, return_inverse=True)
        share = self._products[dtype].at(_shape_places(unique))
        found: Floats = (self._bound_s(dtype, unique) / share)[where.ravel()]
        return found.reshape(shapes.shape[0], shapes.shape[2])

    def _bound_s(self, dtype: str, shapes: Floats) -> Floats:
        """The roofline of products (N, 4) at the best measured rates, in seconds."""
        item = {"fp32": 4, "tf32": 4, "int8": 1}.get(dtype, 2)
        out_item = max(item, 4 if dtype == "int8" else 1)
        batch, m, n, k = shapes.T
        moved = batch * ((m * k + k * n) * item + m * n * out_item)
        bound: Floats = np.maximum(
            2 * shapes.prod(axis=1) / self._peaks[dtype], moved / self._stream
        )
        return bound


class _Scattered:
    """Values measured at scattered places (N, D), interpolated by inverse distance (Shepard)."""

    def __init__(self, places: Floats, values: Floats) -> None:
        self._places = places
        self._values = values

    def at(self, places: Floats) -> Floats:
        """The values at `places` (M, D): (M,)."""
        parts = [places[i : i + _CHUNK] for i in range(0, len(places), _CHUNK)]
        return np.concatenate([self._part(part) for part in parts] or [np.zeros(0)])

    def _part(self, places: Floats) -> Floats:
        squared = np.zeros((len(places), len(self._places)))
        for axis in range(self._places.shape[1]):
            squared += (places[:, axis, None] - self._places[None, :, axis]) ** 2
        weights = (squared + _SOFTENING) ** -3.0
        found: Floats = weights @ self._values / weights.sum(axis=1)
        return found


def _shape_places(shapes: Floats) -> Floats:
    """log2 of (smaller side, larger side, k): a product and its transpose do the same work.

    A batch of products fills the device as one product with as many rows.
    """
    batch, m, n, k = np.log2(shapes).T
    rows = batch + m
    return np.stack([np.minimum(rows, n), np.maximum(rows, n), k], axis=1)


def _attention_places(flops: Floats, moved: Floats) -> Floats:
    return np.stack([np.log2(flops / moved), np.log2(flops) / 2], axis=1)


def _attention_tables(profile: DeviceProfile) -> dict[str, _Scattered]:
    """Rates of attention by precision, forward and backward together.

    Those of the kernel that PyTorch prefers: flash where it was measured, else memory-efficient.
    """
    tables = {}
    for dtype in dict.fromkeys(rate.dtype for rate in profile.attention):
        for kernel in ("flash", "efficient"):
            rates = [r for r in profile.attention if (r.dtype, r.kernel) == (dtype, kernel)]
            if rates:
                tables[dtype] = _Scattered(
                    _attention_places(*np.array([_attention_work(r) for r in rates]).T),
                    # A backward pass has 2.5 times the FLOPs of a forward pass.
                    np.array(
                        [
                            3.5 / (1 / r.forward_flops_per_s + 2.5 / r.backward_flops_per_s)
                            for r in rates
                        ]
                    ),
                )
                break
    return tables


def _attention_work(rate: AttentionRate) -> tuple[float, float]:
    """FLOPs and bytes of a forward pass: half of two products; query, key, value and output."""
    elements = rate.batch * rate.heads * rate.length * rate.head_dim
    return 2.0 * elements * rate.length, 4.0 * elements * (4 if rate.dtype == "fp32" else 2)


def on_measured_device(
    gpu: Gpu, profile: DeviceProfile | None, configuration: Configuration | None = None
) -> tuple[Gpu, KernelTimes, str]:
    """The GPU as measured, its kernel times, and what a prediction's method says of them.

    Without a profile all come from the catalogue, with the context of `configuration`. The context
    that calibration saw replaces the catalogue's; the memory stays, because the user may have set
    it.
    """
    if configuration is not None:
        gpu = replace(gpu, context_bytes=context_bytes(gpu, configuration))
    if profile is None:
        return gpu, Roofline(), CATALOGUE
    if profile.context_bytes is not None:
        gpu = replace(gpu, context_bytes=profile.context_bytes)
    return gpu, _MeasuredKernelTimes(profile), METHOD


def mfu(flops_per_s: float, configuration: Configuration, gpu: Gpu) -> float | None:
    """Model FLOP/s over the dense peak of the precision in which most products run.

    That is autocast's, else that of the weights, and bf16 for quantised ones. None where the GPU
    has no such peak.
    """
    mixed = str(configuration.get("mixed_precision", "no"))
    precision = mixed if mixed != "no" else str(configuration.get("precision"))
    if precision in QUANTIZED:
        precision = "bf16"
    if precision not in gpu.flops:
        return None
    return flops_per_s / matmul_peak(gpu, TORCH_DTYPES[precision], precision == "tf32")
