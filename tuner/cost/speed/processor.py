"""Memory of a training on a processor, as the kernel counts it: resident pages.

There is no allocator that counts for PyTorch there, so a trial measures by how much its process
grew. That is more than its tensors: pages of libraries that are touched for the first time,
buffers that they keep, and freed memory that malloc has not given back.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuner.core.gpu import Gpu
from tuner.core.records import Memory, MemoryCategory
from tuner.cost.library_memory import PROCESSOR
from tuner.cost.speed.profile import DeviceProfile


def on_its_device(
    memory: Memory, gpu: Gpu, profile: DeviceProfile | None, *, pages_bytes: int | None = None
) -> Memory:
    """`memory` as it would be measured on `gpu`: of a processor, resident bytes throughout.

    `memory` has what is live, and the context in `device_bytes`. `pages_bytes` are all that is
    resident beside it where the process gives back what it frees.
    """
    if gpu.compute_capability != PROCESSOR:
        return memory
    factor = profile.live_factor if profile is not None and profile.live_factor else 1.0
    beside = gpu.context_bytes
    if pages_bytes is not None:
        factor, beside = 1.0, pages_bytes
    resident = round(memory.peak_allocated_bytes * factor) + beside
    breakdown = dict(memory.breakdown)
    breakdown[str(MemoryCategory.CONTEXT_AND_WORKSPACE)] += beside - gpu.context_bytes
    breakdown[str(MemoryCategory.ALLOCATOR_OVERHEAD)] += resident - sum(breakdown.values())
    return replace(
        memory,
        peak_allocated_bytes=resident,
        peak_reserved_bytes=resident,
        device_bytes=resident,
        phase_peak_bytes={
            phase: round(live * factor) + beside for phase, live in memory.phase_peak_bytes.items()
        },
        breakdown=breakdown,
    )


def processor(profile: DeviceProfile) -> Gpu:
    """The processor that a profile was made of, as a device type with the rates measured."""
    rates = {p: profile.peak_flops_per_s(p) for p in ("fp32", "fp16", "bf16", "int8")}
    return Gpu(
        id="cpu",
        name=profile.device,
        device_names=(profile.device,),
        aliases=(),
        memory_bytes=profile.memory_bytes,
        flops={p: rate for p, rate in rates.items() if rate is not None},
        bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s() or math.nan,
        compute_capability=PROCESSOR,
        sm_count=1,
        unsupported={},
        price_usd_per_hour=None,
        price_date=None,
        sources={},
        context_bytes=profile.context_bytes or 0,
        link_bytes_per_s=profile.link_bytes_per_s,
    )
