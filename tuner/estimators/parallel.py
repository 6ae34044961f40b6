"""What training on several GPUs adds to one rank: memory of DDP, and the time of exchanging.

DistributedDataParallel keeps a second copy of all gradients in buckets, and sends a bucket on its
way as soon as backward has filled it. Sources: torch/csrc/distributed/c10d/reducer.cpp and
comm.cpp, torch/nn/parallel/distributed.py, torch/distributed/fsdp/_fully_shard (PyTorch 2.13).
What NCCL itself keeps on a GPU is not known here: it grows with the channels that a machine has
(github.com/NVIDIA/nccl/issues/986).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.errors import UnavailableError
from tuner.estimators.replay.allocator import round_size
from tuner.estimators.speed.processor import on_its_device
from tuner.estimators.speed.profile import DeviceProfile
from tuner.estimators.speed.roofline import Efficiency, StepTimes
from tuner.estimators.tracing.timeline import Timeline
from tuner.estimators.tracing.workspace import PROCESSOR
from tuner.gpu import Gpu
from tuner.records import Configuration, Memory, MemoryCategory, Phase, Prediction
from tuner.space.distributed_knobs import BUCKET_CAP_MIB, Parallelism
from tuner.units import MIB, format_gib

FIRST_BUCKET_BYTES = MIB
"""`kDefaultFirstBucketBytes`: the first bucket is small, so that sending begins early."""

BROADCAST_BYTES = 250 * MIB
"""`broadcast_bucket_size` of `_sync_module_states`: parameters travel in copies of this size."""

BROADCASTS_AT_ONCE = 2
"""`kMaxInFlight` of `broadcast_coalesced`."""

LINK_SHARE = 0.8
"""What NCCL gets of a link's rate: its protocol takes some 20 % (github.com/NVIDIA/nccl-tests/
issues/212, an author of NCCL: 370 of 450 GB/s on an H100)."""

LARGE_BLOCK_BYTES = 10 * MIB
SEGMENT_BYTES = 2 * MIB
"""PyTorch's CUDA allocator takes blocks from 10 MiB on from the driver in multiples of 2 MiB
(`kMinLargeAlloc`, `kRoundLarge`)."""

LOADED_SHARE = 0.5
"""Of what a training on a processor makes resident beside its tensors, the part that is so when
ranks broadcast: most of it are pages of kernels that the first step touches. Measured with two gloo
ranks on models of 3 and 35 million parameters: 23 MB then and 49 and 61 MB in steps."""

SHARDED_PAGES_BYTES = 7 * MIB
"""What FSDP2 makes resident on a processor beside its tensors, more than a training alone. Measured
with two gloo ranks, all weights in fp32, on models of 3 and 24 million parameters: 57 and 58 MiB,
where trainings alone had 50; with DeepSpeed it was 52."""

NOT_KNOWN = "without what NCCL keeps on a GPU"
"""What a prediction of several GPUs says of itself."""


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


def replicated(
    memory: Memory, buckets: Sequence[int], gpu: Gpu, profile: DeviceProfile | None = None
) -> Memory:
    """`memory` of one GPU alone as that of a rank under DDP.

    The buckets are there from the start of training on. Before them, all parameters are
    broadcast, by way of copies.
    """
    copies = sum(map(round_size, buckets))
    broadcast = min(memory.loaded_bytes, BROADCASTS_AT_ONCE * BROADCAST_BYTES)
    loaded = memory.loaded_bytes
    if gpu.compute_capability == PROCESSOR:
        broadcast = max(0, _live_broadcasting(loaded + broadcast, gpu, profile) - loaded)
    phases = {phase: peak + copies for phase, peak in memory.phase_peak_bytes.items()}
    load = str(Phase.LOAD)
    phases[load] = max(memory.phase_peak_bytes[load], loaded + max(broadcast, copies))
    peak_phase = max(phases, key=phases.__getitem__)
    breakdown = dict(memory.breakdown)
    context = memory.device_bytes - memory.peak_reserved_bytes
    rests = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    if gpu.compute_capability != PROCESSOR:
        large = [size for size in buckets if size >= LARGE_BLOCK_BYTES]
        rests += sum(-size % SEGMENT_BYTES for size in large)
    if peak_phase == load and memory.peak_phase != load:
        adapters = min(copies, loaded)
        breakdown = dict.fromkeys(breakdown, 0)
        breakdown[str(MemoryCategory.WEIGHTS)] = loaded - adapters
        breakdown[str(MemoryCategory.ADAPTERS)] = adapters
        breakdown[str(MemoryCategory.TEMPORARY)] = phases[load] - loaded
        breakdown[str(MemoryCategory.CONTEXT_AND_WORKSPACE)] = context
    else:
        breakdown[str(MemoryCategory.GRADIENTS)] += copies
    reserved = phases[peak_phase] + rests
    overhead = str(MemoryCategory.ALLOCATOR_OVERHEAD)
    breakdown[overhead] += reserved + context - sum(breakdown.values())
    return replace(
        memory,
        peak_allocated_bytes=phases[peak_phase],
        peak_reserved_bytes=reserved,
        device_bytes=reserved + context,
        loaded_bytes=loaded + copies,
        phase_peak_bytes=phases,
        peak_phase=peak_phase,
        breakdown=breakdown,
    )


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
    context = memory.device_bytes - memory.peak_reserved_bytes
    breakdown = dict.fromkeys(memory.breakdown, 0)
    breakdown[str(MemoryCategory.WEIGHTS)] = loading
    breakdown[str(MemoryCategory.ALLOCATOR_OVERHEAD)] = reserved - loading
    breakdown[str(MemoryCategory.CONTEXT_AND_WORKSPACE)] = context
    changed = replace(
        memory,
        peak_allocated_bytes=loading,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + context,
        phase_peak_bytes=phases,
        peak_phase=load,
        breakdown=breakdown,
    )
    intervals = {
        name: (low * factor, high * factor)
        for name, (low, high) in prediction.intervals.items()
        if (factor := getattr(changed, name, 0) / getattr(memory, name, 1))
    }
    return replace(
        prediction,
        fits=prediction.budget.fits(changed.device_bytes),
        memory=changed,
        intervals={**prediction.intervals, **intervals},
    )


def _live_broadcasting(live_bytes: int, gpu: Gpu, profile: DeviceProfile | None) -> int:
    """What is resident while ranks on a processor broadcast, as live bytes of a step.

    `on_its_device` makes resident bytes of live ones as they are in a step. The copies have gone
    by then: they are whole blocks, which malloc gives back, and most of what a step needs beside
    tensors is not resident yet.
    """
    factor = profile.live_factor if profile is not None and profile.live_factor else 1.0
    resident = live_bytes + LOADED_SHARE * gpu.context_bytes
    return round((resident - gpu.context_bytes) / factor)


def replicas(
    memory: Sequence[Memory],
    times: StepTimes,
    parallelism: Sequence[Parallelism],
    gradient_bytes: Sequence[Sequence[int]],
    gpu: Gpu,
    profile: DeviceProfile | None,
) -> tuple[list[Memory], StepTimes]:
    """Memory of a rank under DDP, and times of all ranks, from those of one GPU alone.

    One entry of each for every configuration; one on a single GPU stays as it is. Raises
    `UnavailableError` where nothing says how fast GPUs of this type send to each other.
    """
    buckets = [
        buckets_of(sizes) if p.ranks > 1 else []
        for sizes, p in zip(gradient_bytes, parallelism, strict=True)
    ]
    ranks = [
        on_its_device(replicated(one, sizes, gpu, profile) if sizes else one, gpu, profile)
        for one, sizes in zip(memory, buckets, strict=True)
    ]
    exchanges = [
        Exchange(tuple(sizes), tensors=len(tensors) if sizes else 0)
        for sizes, tensors in zip(buckets, gradient_bytes, strict=True)
    ]
    several = next(index for index, sizes in enumerate(buckets) if sizes)
    return ranks, times_of_ranks(times, exchanges, parallelism, gpu, ranks[several])


def times_of_ranks(
    times: StepTimes,
    exchanges: Sequence[Exchange],
    parallelism: Sequence[Parallelism],
    gpu: Gpu,
    memory: Memory,
) -> StepTimes:
    """Times of ranks from those of each alone; `memory` is of one of them, for an error's text.

    Raises `UnavailableError` where nothing says how fast GPUs of this type send to each other.
    """
    link = link_of(gpu, max(parallelism, key=lambda p: p.ranks), memory)
    copying = np.array([copying_s(exchange, gpu) for exchange in exchanges])
    elementwise = times.breakdown_s.get("elementwise", np.zeros(len(copying))) + copying
    copied = replace(
        times,
        step_s=times.step_s + copying,
        breakdown_s={**times.breakdown_s, "elementwise": elementwise},
    )
    return with_exchange(copied, exchanges, parallelism, link, gpu)


def exchange_of(
    timeline: Timeline, gradient_bytes: Sequence[int], configuration: Configuration
) -> Exchange:
    """What the ranks of a traced step send each other."""
    if Parallelism.of(configuration).is_replicated:
        return Exchange(tuple(buckets_of(gradient_bytes)), tensors=len(gradient_bytes))
    return sharded_exchange(timeline, int(str(configuration.get("grad_accum", 1))))


def sharded_exchange(timeline: Timeline, micro_steps: int) -> Exchange:
    """The collectives of the second step of a trace, which has two micro-steps at most.

    The first of them stands for all but the last, which may send what the others do not. A sum
    that all ranks get (all-reduce) is sent twice: scattered, and gathered.
    """
    gathered = scattered = 0
    for name, size_bytes, mark in timeline.collectives:
        step = timeline.marks[mark]
        if step.step != 1:
            continue
        in_first = step.micro_step == 0 and step.phase is not Phase.OPTIMIZER
        size = size_bytes * (micro_steps - 1 if in_first and micro_steps > 1 else 1)
        if "reduce" in name:
            scattered += size
        if "reduce_scatter" not in name:
            gathered += size
    return Exchange(gathered=gathered, scattered=scattered)


def pages_of(profile: DeviceProfile | None, configuration: Configuration) -> int | None:
    """What is resident beside the tensors of ranks on a processor that give back what they free.

    None where they do not, and where the profile does not know.
    """
    parallelism = Parallelism.of(configuration)
    keeps = parallelism.ranks == 1 or parallelism.is_replicated
    if keeps or profile is None or profile.pages_bytes is None:
        return None
    is_wide = configuration["precision"] in ("fp32", "tf32")
    mixed = configuration.get("mixed_precision", "no")
    alone = profile.pages_bytes.get("fp32" if is_wide and mixed == "no" else "bf16")
    return None if alone is None else alone + SHARDED_PAGES_BYTES * parallelism.is_sharded


def memory_of_rank(gpu: Gpu, parallelism: Parallelism) -> int:
    """What one rank may take: a GPU of its own, or its part of the machine's memory."""
    if gpu.compute_capability == PROCESSOR:
        return gpu.memory_bytes // parallelism.ranks
    return gpu.memory_bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a step send each other, in bytes a rank.

    `buckets` are gradients in the order in which backward fills them, once a step, from so many
    `tensors`.
    `gathered` are weights that each micro-step collects anew, and `scattered` gradients that
    every rank keeps a share of, both under fsdp2 and ZeRO.
    """

    buckets: tuple[int, ...] = ()
    tensors: int = 0
    gathered: int = 0
    scattered: int = 0


def link_of(gpu: Gpu, parallelism: Parallelism, memory: Memory) -> float:
    """Bytes a second between two GPUs of this type. Raises `UnavailableError` if unknown.

    The error says what is known all the same: whether the memory of a rank suffices.
    """
    if gpu.link_bytes_per_s is not None:
        return gpu.link_bytes_per_s
    fits = memory.device_bytes <= memory_of_rank(gpu, parallelism)
    how = (
        "`tuner calibrate --device cpu` measures it"
        if gpu.compute_capability == PROCESSOR
        else f"add link_gb_per_s to an entry `like: {gpu.id}` of your gpus.yaml"
    )
    raise UnavailableError(
        f"how fast {parallelism.ranks} x {gpu.name} train is unknown, because no link rate between "
        f"them is known; a rank needs {format_gib(memory.device_bytes)} and "
        f"{'fits' if fits else 'does not fit'}",
        hint=how,
    )


def with_exchange(
    times: StepTimes,
    exchanges: Sequence[Exchange],
    parallelism: Sequence[Parallelism],
    link_bytes_per_s: float,
    gpu: Gpu,
) -> StepTimes:
    """Step times of one rank alone as those of ranks that exchange gradients.

    A ring sends 2 (n - 1) / n of each bucket through every link, in the order in which backward
    fills the buckets; what is still on its way when backward has ended is waited for. Ranks on one
    processor share its cores: each is as many times slower as there are ranks, and nothing is
    hidden, because copying takes the same cores.
    """
    on_processor = gpu.compute_capability == PROCESSOR
    rate = link_bytes_per_s * (1.0 if on_processor else LINK_SHARE)
    ranks = np.array([p.ranks for p in parallelism], dtype=float)
    scale = ranks if on_processor else np.ones(len(ranks))
    waits = np.array(
        [
            waited_s(e, p, rate, 0.0 if on_processor else float(backward_s))
            for e, p, backward_s in zip(exchanges, parallelism, times.backward_s, strict=True)
        ]
    )
    breakdown = {kind: seconds * scale for kind, seconds in times.breakdown_s.items()}
    breakdown["exchange"] = waits
    return replace(times, step_s=times.step_s * scale + waits, breakdown_s=breakdown)


def waited_s(exchange: Exchange, parallelism: Parallelism, rate: float, backward_s: float) -> float:
    """Seconds for which a rank waits for others in one step; 0 on one GPU."""
    share = (parallelism.ranks - 1) / parallelism.ranks
    total = sum(exchange.buckets)
    sent, done_s = 0, 0.0
    for size in exchange.buckets:
        sent += size
        done_s = max(done_s, backward_s * sent / total) + 2 * share * size / rate
    gathered_s = share * (exchange.gathered + exchange.scattered) / rate
    return max(0.0, done_s - backward_s) + gathered_s


def copying_s(exchange: Exchange, gpu: Gpu) -> float:
    """Seconds for gradients to get into DDP's buckets, and out of them, in one step."""
    efficiency = Efficiency()
    rate = gpu.bandwidth_bytes_per_s * efficiency.bandwidth["elementwise"]
    return max(4 * sum(exchange.buckets) / rate, 2 * exchange.tensors * efficiency.kernel_s)
