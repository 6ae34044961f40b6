"""Memory of a training on a processor, as the kernel counts it: resident pages.

There is no allocator that counts for PyTorch there, so a trial measures by how much its process
grew. That is more than its tensors: pages of libraries that are touched for the first time,
buffers that they keep, and freed memory that malloc has not given back. How much more is
measured once, on small trainings (`reference`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

from tuner.core.environment import own_python
from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Memory, MemoryCategory
from tuner.core.units import MIB
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


SIZE_BYTES = 8 * MIB
"""Between the first bucket of DDP, of 1 MiB, and the others, of 25."""
REPEATS = 12
WITHIN_S = 120.0
"""Two imports of torch on a busy machine take tens of seconds."""
_RANKS = 2


def measure_link() -> float:
    """Bytes a second through the link of one of two ranks, by a ring's count of what passes.

    Raises `UnavailableError` where the two do not come to a result.
    """
    store = os.memfd_create("tuner-link")
    started = [
        subprocess.Popen(  # noqa: S603 - this program itself
            own_python(__name__, str(rank), str(store)),
            pass_fds=[store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Gloo listens on the loopback interface only; no rank has a GPU.
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(_RANKS)
    ]
    try:
        said = [process.communicate(timeout=WITHIN_S) for process in started]
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"two processes had not measured after {WITHIN_S:g} s") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.close(store)
    if any(process.returncode for process in started):
        text = said[0][1].decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"gloo does not work here: {text[-1][:160] if text else 'no text'}")
    return float(said[0][0])


def main(rank: int, store: str) -> None:
    """Be one of the ranks; the first one writes the rate to its output."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, _RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=_RANKS,
    )
    values = torch.ones(SIZE_BYTES // 4)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - started)
        values.fill_(1.0)
    dist.destroy_process_group()
    if rank == 0:
        moved = 2 * (_RANKS - 1) / _RANKS * SIZE_BYTES
        print(moved / median(times[REPEATS // 4 :]))


if __name__ == "__main__":
    main(int(sys.argv[1]), f"/proc/self/fd/{sys.argv[2]}")
