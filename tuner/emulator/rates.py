"""Rates and properties of a GPU type in the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.units import KIB

if TYPE_CHECKING:  # they import numpy, which starting an emulation does without
    from tuner.cost.speed.roofline import Host, KernelTimes
    from tuner.cost.work_arrays import Floats, WorkArrays

TRANSFER, EXCHANGE = "transfer", "exchange"
"""Kinds of work that no trace has: copies to and from the host, and between devices."""

_PCIE_BYTES_PER_S = {7: 15.75e9, 8: 31.5e9, 9: 63e9}
"""Bytes/s of PCI Express 3, 4 and 5 (16 lanes, one direction), by the major compute capability of
the boards that use it. Later boards use PCI Express 5."""

_PCIE_SHARE = 0.8
"""The share of a link's rate that its protocol leaves, as `tuner.cost.parallel.LINK_SHARE`."""


def pcie_bytes_per_s(gpu: Gpu) -> float:
    """The rate of copies between host and device."""
    return _PCIE_SHARE * _PCIE_BYTES_PER_S[min(9, max(7, gpu.compute_capability[0]))]


class EmulatedTimes:
    """The kernel times of predictions, and those of copies to and from the host.

    Exchanges between devices take no time here: no kernel waits for them.
    """

    def __init__(self, kernels: KernelTimes) -> None:
        self._kernels = kernels

    def host(self, gpu: Gpu) -> Host:
        """See `KernelTimes.host`."""
        return self._kernels.host(gpu)

    def seconds(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool, streams: bool = False
    ) -> Floats:
        """See `KernelTimes.seconds`."""
        found = self._kernels.seconds(works, gpu, allow_tf32=allow_tf32, streams=streams)
        return _with_copies(works, gpu, found)

    def ends(
        self, works: WorkArrays, gpu: Gpu, *, allow_tf32: bool
    ) -> Iterator[tuple[Floats, Floats]]:
        """See `KernelTimes.ends`; the rate of copies is known."""
        for low, high in self._kernels.ends(works, gpu, allow_tf32=allow_tf32):
            yield _with_copies(works, gpu, low), _with_copies(works, gpu, high)


def _with_copies(works: WorkArrays, gpu: Gpu, on_device_s: Floats) -> Floats:
    import numpy as np

    kinds = works.kinds[:, None]
    copied_s = works.bytes_moved / pcie_bytes_per_s(gpu)
    found: Floats = np.where(kinds == TRANSFER, copied_s, on_device_s)
    found[works.kinds == EXCHANGE] = 0.0
    return found


_PRICED = (
    "id", "name", "memory_bytes", "flops", "bandwidth_bytes_per_s", "l2_bytes",
    "compute_capability", "sm_count", "context_bytes", "power_w", "link_bytes_per_s",
)  # fmt: skip
"""The properties of a GPU type that pricing needs."""


def gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    """The properties of a GPU type that pricing needs; JSON types only."""
    found = {name: getattr(gpu, name) for name in _PRICED}
    return {**found, "flops": dict(gpu.flops), "compute_capability": list(gpu.compute_capability)}


def gpu_from_dict(data: Mapping[str, Any]) -> Gpu:
    """The inverse of `gpu_to_dict`, without device names, price and sources."""
    given = {**data, "compute_capability": tuple(data["compute_capability"])}
    names: dict[str, Any] = {"device_names": (), "aliases": ()}
    return Gpu(
        **given, **names, unsupported={}, price_usd_per_hour=None, price_date=None, sources={}
    )


@dataclass(frozen=True, slots=True)
class _Multiprocessor:
    """The limits of one multiprocessor of a compute capability."""

    shared_kib: int
    shared_per_block_kib: int
    threads: int
    blocks: int
    fp32_cores: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Throughput of
# Native Arithmetic Instructions" (fp32 multiply-adds a clock and multiprocessor).
MULTIPROCESSORS = {
    (7, 0): _Multiprocessor(96, 96, 2048, 32, 64),
    (7, 5): _Multiprocessor(64, 64, 1024, 16, 64),
    (8, 0): _Multiprocessor(164, 163, 2048, 32, 64),
    (8, 6): _Multiprocessor(100, 99, 1536, 16, 128),
    (8, 7): _Multiprocessor(164, 163, 1536, 16, 128),
    (8, 9): _Multiprocessor(100, 99, 1536, 24, 128),
    (9, 0): _Multiprocessor(228, 227, 2048, 32, 128),
    (10, 0): _Multiprocessor(228, 227, 2048, 32, 128),
    (10, 3): _Multiprocessor(228, 227, 2048, 32, 128),
    (12, 0): _Multiprocessor(100, 99, 1536, 24, 128),
    (12, 1): _Multiprocessor(100, 99, 1536, 24, 128),
}

BUS_BITS = 512
"""The memory bus width that emulated GPUs report, with the clock that gives their bandwidth: the
catalogue has only the bandwidth."""


def multiprocessor_of(gpu: Gpu) -> _Multiprocessor:
    """The multiprocessor of a GPU type. Raises `InputError` for an unknown compute capability."""
    found = MULTIPROCESSORS.get(gpu.compute_capability)
    if found is None:
        major, minor = gpu.compute_capability
        known = ", ".join(f"{a}.{b}" for a, b in sorted(MULTIPROCESSORS))
        raise InputError(
            f"{gpu.name} cannot be emulated: compute capability {major}.{minor} is not known",
            hint=f"known are {known}",
        )
    return found


def shared_kib_in_bytes(gpu: Gpu) -> tuple[int, int]:
    """Shared memory of a multiprocessor, and the most that one block can use, in bytes."""
    one = multiprocessor_of(gpu)
    return one.shared_kib * KIB, one.shared_per_block_kib * KIB


def clock_khz(gpu: Gpu) -> int:
    """The boost clock implied by the fp32 rate: two operations per core and clock."""
    cores = gpu.sm_count * multiprocessor_of(gpu).fp32_cores
    return round(gpu.flops.get("fp32", 0.0) / (2 * cores) / 1e3)


def memory_clock_khz(gpu: Gpu) -> int:
    """The clock that gives a bus of `BUS_BITS` the type's bandwidth, at two transfers per clock."""
    return round(gpu.bandwidth_bytes_per_s / (2 * BUS_BITS / 8) / 1e3)
