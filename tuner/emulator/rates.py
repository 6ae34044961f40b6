"""The rates of a GPU type, as plain data too: emulated programs have no catalogue to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.core.gpu import Gpu

TRANSFER, EXCHANGE = "transfer", "exchange"
"""Kinds of work that no trace has: copies to and from the host, and between devices."""

_PCIE_BYTES_PER_S = {7: 15.75e9, 8: 31.5e9, 9: 63e9}
"""One direction of 16 lanes of PCI Express 3, 4 and 5, by the first number of the compute
capability: the generation that boards of that time came with. Later boards have 5."""

_PCIE_SHARE = 0.8
"""What a protocol leaves of a link, as of NVLink (`estimators.parallel.LINK_SHARE`)."""


def pcie_bytes_per_s(gpu: Gpu) -> float:
    """What a copy between host and device reaches."""
    return _PCIE_SHARE * _PCIE_BYTES_PER_S[min(9, max(7, gpu.compute_capability[0]))]


def gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    """What pricing needs of a GPU type; JSON types only."""
    return {
        "id": gpu.id,
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "flops": dict(gpu.flops),
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "compute_capability": list(gpu.compute_capability),
        "sm_count": gpu.sm_count,
        "context_bytes": gpu.context_bytes,
        "power_w": gpu.power_w,
        "link_bytes_per_s": gpu.link_bytes_per_s,
    }


def gpu_from_dict(data: Mapping[str, Any]) -> Gpu:
    """The inverse of `gpu_to_dict`; names of devices, prices and sources are not known."""
    major, minor = data["compute_capability"]
    return Gpu(
        id=data["id"],
        name=data["name"],
        device_names=(),
        aliases=(),
        memory_bytes=data["memory_bytes"],
        flops=dict(data["flops"]),
        bandwidth_bytes_per_s=data["bandwidth_bytes_per_s"],
        compute_capability=(major, minor),
        sm_count=data["sm_count"],
        unsupported={},
        price_usd_per_hour=None,
        price_date=None,
        sources={},
        context_bytes=data["context_bytes"],
        power_w=data["power_w"],
        link_bytes_per_s=data["link_bytes_per_s"],
    )
