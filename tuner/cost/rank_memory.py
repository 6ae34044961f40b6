"""Memory of one rank of several: DDP's buckets, NCCL's buffers, and a model loaded whole.

DistributedDataParallel keeps a second copy of all gradients in buckets. Sources:
torch/csrc/distributed/c10d/reducer.cpp and comm.cpp, torch/nn/parallel/distributed.py
(PyTorch 2.13). What NCCL takes says `tuner.cost.library_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, MemoryCategory, Phase, Prediction
from tuner.core.setup.distributed_knobs import BUCKET_CAP_MIB, Parallelism
from tuner.core.units import MIB, format_size
from tuner.cost.allocator import round_size
from tuner.cost.library_memory import nccl_bytes

FIRST_BUCKET_BYTES = MIB
"""`kDefaultFirstBucketBytes`: the first bucket is small, so that sending begins early."""

BROADCAST_BYTES = 250 * MIB
"""`broadcast_bucket_size` of `_sync_module_states`: parameters travel in copies of this size."""

BROADCASTS_AT_ONCE = 2
"""`kMaxInFlight` of `broadcast_coalesced`."""

LARGE_BLOCK_BYTES = 10 * MIB
SEGMENT_BYTES = 2 * MIB
"""PyTorch's CUDA allocator takes blocks from 10 MiB on from the driver in multiples of 2 MiB
(`kMinLargeAlloc`, `kRoundLarge`)."""


def buckets_of(gradient_bytes: Sequence[int]) -> list[int]:
    """Sizes of DDP's buckets in bytes, in the order in which they are sent.

    Gradients come in the reverse of the order of their parameters. A bucket is closed by the
    gradient that reaches its limit (`compute_bucket_assignment_by_size`).
    """
    sizes: list[int] = []
    filled = 0
    for size in reversed(gradient_bytes):
        filled += size
        if filled >= (BUCKET_CAP_MIB * MIB if sizes else FIRST_BUCKET_BYTES):
            sizes.append(filled)
            filled = 0
    return [*sizes, filled] if filled else sizes


def replicated(memory: Memory, buckets: Sequence[int]) -> Memory:
    """`memory` of one GPU alone as that of a rank under DDP.

    The buckets are there from the start of training on. Before them, all parameters are
    broadcast, by way of copies.
    """
    copies = sum(map(round_size, buckets))
    broadcast = min(memory.loaded_bytes, BROADCASTS_AT_ONCE * BROADCAST_BYTES)
    loaded = memory.loaded_bytes
    phases = {phase: peak + copies for phase, peak in memory.phase_peak_bytes.items()}
    load = str(Phase.LOAD)
    phases[load] = max(memory.phase_peak_bytes[load], loaded + max(broadcast, copies))
    rests = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    rests += sum(-size % SEGMENT_BYTES for size in buckets if size >= LARGE_BLOCK_BYTES)
    reserved = max(phases.values()) + rests
    if phases[load] == max(phases.values()) and memory.peak_phase != load:
        adapters = min(copies, loaded)
        parts = {
            MemoryCategory.WEIGHTS: loaded - adapters,
            MemoryCategory.ADAPTERS: adapters,
            MemoryCategory.TEMPORARY: phases[load] - loaded,
        }
        grown = _peaking_at_load(memory, phases, reserved, parts)
    else:
        gradients = memory.breakdown[str(MemoryCategory.GRADIENTS)] + copies
        kept = {**memory.breakdown, str(MemoryCategory.GRADIENTS): gradients}
        grown = _with_peaks(memory, phases, reserved, kept)
    return replace(grown, loaded_bytes=loaded + copies)


def _peaking_at_load(
    memory: Memory,
    phases: Mapping[str, int],
    reserved_bytes: int,
    parts: Mapping[MemoryCategory, int],
) -> Memory:
    """`memory` that is highest while loading, of these `parts` beside the context."""
    breakdown = dict.fromkeys(memory.breakdown, 0) | {str(part): n for part, n in parts.items()}
    context = memory.device_bytes - memory.peak_reserved_bytes
    breakdown[str(MemoryCategory.CONTEXT_AND_WORKSPACE)] = context
    return _with_peaks(memory, phases, reserved_bytes, breakdown)


def _with_peaks(
    memory: Memory, phases: Mapping[str, int], reserved_bytes: int, breakdown: Mapping[str, int]
) -> Memory:
    """`memory` with these peaks; what `breakdown` does not explain is the allocator's."""
    device_bytes = memory.device_bytes - memory.peak_reserved_bytes + reserved_bytes
    peak_phase = max(phases, key=phases.__getitem__)
    overhead = str(MemoryCategory.ALLOCATOR_OVERHEAD)
    rest = device_bytes - sum(breakdown.values())
    return replace(
        memory,
        peak_allocated_bytes=phases[peak_phase],
        peak_reserved_bytes=reserved_bytes,
        device_bytes=device_bytes,
        phase_peak_bytes=phases,
        peak_phase=peak_phase,
        breakdown={**breakdown, overhead: breakdown[overhead] + rest},
    )


def with_nccl(memory: Memory, gpu: Gpu, configuration: Configuration) -> Memory:
    """`memory` with the buffers of a rank's communicators, where their size is known."""
    added = nccl_of(gpu, configuration) or 0
    context = str(MemoryCategory.CONTEXT_AND_WORKSPACE)
    return replace(
        memory,
        device_bytes=memory.device_bytes + added,
        breakdown={**memory.breakdown, context: memory.breakdown[context] + added},
    )


def nccl_of(gpu: Gpu, configuration: Configuration) -> int | None:
    """Bytes of a rank's communicators; None where they are not known.

    There is one of all ranks, and under hsdp one each way. In Trainer with DeepSpeed, accelerate
    exchanges over one of all ranks, and DeepSpeed over its copy: so do programs on the emulator.
    """
    parallelism = Parallelism.of(configuration)
    if parallelism.machines > 1:
        return None
    sizes = [parallelism.group, parallelism.ranks // parallelism.group]
    if parallelism.zero_stage and configuration.get("training_loop", "trainer") == "trainer":
        sizes.append(parallelism.ranks)
    found = [nccl_bytes(gpu, size) for size in sizes]
    return None if None in found else sum(filter(None, found))


def nccl_text(gpu: Gpu, configuration: Configuration) -> str:
    """Notes on NCCL in a prediction of several GPUs."""
    counted = nccl_of(gpu, configuration)
    if counted is None:
        return ", without what NCCL keeps on a GPU"
    return f", with {format_size(counted)} of buffers of NCCL, counted from its source"


def loaded_whole(prediction: Prediction, alone: Prediction) -> Prediction:
    """`prediction` of the first rank of a program that has the whole model before it is sharded.

    So do programs that let transformers quantise: while the shards are made, the GPU of the first
    rank has both. `alone` is the same training on one GPU. On NF4, two and four emulated ranks of
    a Llama of 1.2 billion parameters took 1.46 and 1.22 GiB then, where this says 1.48 and 1.24,
    and two of one of 8 billion took 8.03 GiB, where it says 8.14.
    """
    memory, load = prediction.memory, str(Phase.LOAD)
    loading = alone.memory.loaded_bytes + memory.loaded_bytes
    loading = max(loading, memory.phase_peak_bytes[load])
    phases = {**memory.phase_peak_bytes, load: loading}
    if loading <= memory.peak_allocated_bytes:
        return replace(prediction, memory=replace(memory, phase_peak_bytes=phases))
    reserved = max(memory.peak_reserved_bytes, loading)
    changed = _peaking_at_load(memory, phases, reserved, {MemoryCategory.WEIGHTS: loading})
    intervals = {
        name: (low * factor, high * factor)
        for name, (low, high) in prediction.intervals.items()
        if (factor := getattr(changed, name, 0) / getattr(memory, name, 1))
    }
    return replace(
        prediction,
        memory=changed,
        intervals={**prediction.intervals, **intervals},
    )
