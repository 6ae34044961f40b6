"""A GPU type, as the rest of the package knows it.

The emulator imports this in the environment of somebody's program, so it needs nothing of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.core.errors import unknown

NATIVE_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")
"""Precisions that hardware has a rate for: the keys of `Gpu.flops`."""

PRECISIONS = (*NATIVE_PRECISIONS, "nf4")
"""Values of the knob `precision`."""

ARCHITECTURES = {
    **dict.fromkeys([(5, 0), (5, 2), (5, 3)], "Maxwell"),
    **dict.fromkeys([(6, 0), (6, 1), (6, 2)], "Pascal"),
    **dict.fromkeys([(7, 0), (7, 2)], "Volta"),
    (7, 5): "Turing",
    **dict.fromkeys([(8, 0), (8, 6), (8, 7), (8, 8)], "Ampere"),
    (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    **dict.fromkeys([(10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)], "Blackwell"),
}
"""The compute capabilities of NVIDIA's GPUs (CUDA C++ Programming Guide 12 and 13)."""

VENDORS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}
"""Makers of GPUs by the word of a catalogue's entry. Only those of the first are supported."""


def not_supported(vendor: str) -> str:
    """The message about a GPU of another vendor than NVIDIA."""
    return f"no GPU of {vendor} is supported"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU type.

    `memory_bytes` is what torch reports as `total_memory`. `flops` has the dense peak per precision
    in operations per second; a precision it lacks has its reason in `unsupported`. `context_bytes`
    is what a process holds on the device beyond what torch has reserved. `power_w` is the board's
    default power limit in watts, None where it is not known or differs between boards of the type.
    `l2_bytes` is the size of its L2 cache, None where it is not known. `link_bytes_per_s` is what
    one GPU sends to another of its machine, in one direction, and `network_bytes_per_s` what it has
    of its machine's network cards; None where that is not known. `nccl_channels` are those that
    NCCL opens over NVLink in the type's usual machine. `sources` says where the numbers come from,
    by group (device, memory, tflops, bandwidth, l2, link, network, nccl, power, context, price).
    """

    id: str
    name: str
    device_names: tuple[str, ...]
    aliases: tuple[str, ...]
    memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    bandwidth_bytes_per_s: float
    compute_capability: tuple[int, int]
    sm_count: int
    unsupported: Mapping[str, str] = field(hash=False)
    price_usd_per_hour: float | None
    price_date: str | None
    sources: Mapping[str, str] = field(hash=False)
    context_bytes: int
    ecc_memory_bytes: int | None = None
    power_w: float | None = None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    nccl_channels: int | None = None
    l2_bytes: int | None = None

    @property
    def has_bf16(self) -> bool:
        """False for a GPU that computes in fp16 and not in bf16."""
        return "bf16" in self.flops or "fp16" not in self.flops

    @property
    def architecture(self) -> str:
        """The generation's name ("Turing"), or the compute capability where it has none here."""
        major, minor = self.compute_capability
        return ARCHITECTURES.get((major, minor), f"compute capability {major}.{minor}")

    def unsupported_reason(self, precision: str) -> str | None:
        """Why a configuration of this `precision` cannot run here, or None when it can.

        NF4 is a storage format that is computed in fp16 or bf16, so one of them suffices.
        """
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        if precision == "nf4":
            if {"fp16", "bf16"} <= self.unsupported.keys():
                return f"NF4 computes in fp16 or bf16: {self.unsupported['fp16']}"
            return None
        return self.unsupported.get(precision)
