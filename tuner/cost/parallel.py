"""Training on several GPUs: the time of exchanges, and the memory of one rank.

DistributedDataParallel sends a bucket of gradients on its way as soon as backward has filled it.
The buckets are a second copy of all gradients. Sources: reducer.cpp and comm.cpp in
torch/csrc/distributed/c10d, torch/nn/parallel/distributed.py and
torch/distributed/fsdp/_fully_shard of PyTorch 2.13. `tuner.cost.library_memory` has the memory of
NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, MemoryCategory, Phase, Prediction
from tuner.core.setup.distributed_knobs import BUCKET_CAP_MIB, Parallelism
from tuner.core.units import MIB, format_gib, format_size
from tuner.cost.allocator import round_size
from tuner.cost.library_memory import nccl_bytes
from tuner.cost.memory import Course
from tuner.cost.speed.roofline import Efficiency, StepTimes

LINK_SHARE = 0.8
"""Share of a link's rate that NCCL reaches: its protocol takes some 20 %
(github.com/NVIDIA/nccl-tests/issues/212, an author of NCCL: 370 of 450 GB/s on an H100).
Of a network too: 600 of 800 Gb/s between two machines of eight A100 was "roughly
matching our expectation" (nccl/issues/495)."""

ALL_REDUCE = "c10d::allreduce_"
"""The collective by which HSDP adds up the gradients of its copies, as a trace names it."""

LINK, NETWORK = "link_gb_per_s", "network_gb_per_s"
"""Fields of the GPU catalogue: between GPUs of a machine, and to other machines."""


def replicas(
    memory: Sequence[Memory],
    times: StepTimes,
    parallelism: Sequence[Parallelism],
    gradient_bytes: Sequence[Sequence[int]],
    gpu: Gpu,
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
        replicated(one, sizes) if sizes else one for one, sizes in zip(memory, buckets, strict=True)
    ]
    exchanges = [
        _Exchange(tuple(sizes), tensors=len(tensors) if sizes else 0)
        for sizes, tensors in zip(buckets, gradient_bytes, strict=True)
    ]
    several = next(index for index, sizes in enumerate(buckets) if sizes)
    return ranks, times_of_ranks(times, exchanges, parallelism, gpu, ranks[several])


def times_of_ranks(
    times: StepTimes,
    exchanges: Sequence[_Exchange],
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
    course: Course, gradient_bytes: Sequence[int], configuration: Configuration
) -> _Exchange:
    """The exchange between the ranks of a traced step."""
    if Parallelism.of(configuration).is_replicated:
        return _Exchange(tuple(buckets_of(gradient_bytes)), tensors=len(gradient_bytes))
    micro_steps = int(str(configuration.get("grad_accum", 1)))
    copies = Parallelism.of(configuration).strategy == "hsdp"
    return sharded_exchange(course, micro_steps, copies=copies)


def sharded_exchange(course: Course, micro_steps: int, *, copies: bool = False) -> _Exchange:
    """The collectives of the second step of a trace, which has two micro-steps at most.

    The first of them stands for all but the last, which may send what the others do not. A sum
    that all ranks get (all-reduce) is sent twice: scattered, and gathered; under hsdp, one of
    gradients is between the copies of the model.
    """
    gathered = scattered = summed = 0
    for name, size_bytes, mark in course.collectives:
        step = course.marks[mark]
        if step.step != 1:
            continue
        in_first = step.micro_step == 0 and step.phase is not Phase.OPTIMIZER
        size = size_bytes * (micro_steps - 1 if in_first and micro_steps > 1 else 1)
        if copies and name == ALL_REDUCE:
            summed += size
            continue
        if "reduce" in name:
            scattered += size
        if "reduce_scatter" not in name:
            gathered += size
    return _Exchange(gathered=gathered, scattered=scattered, summed=summed)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Bytes that each rank sends in a step.

    `buckets` are the gradients of `tensors` tensors, in the order in which backward fills them.
    `gathered` are weights that each micro-step collects anew, and `scattered` gradients that
    every rank keeps a share of, both under fsdp2, hsdp and ZeRO. `summed` are the shares of
    gradients that the copies of a model add up under hsdp.
    """

    buckets: tuple[int, ...] = ()
    tensors: int = 0
    gathered: int = 0
    scattered: int = 0
    summed: int = 0


def link_of(gpu: Gpu, parallelism: Parallelism, memory: Memory) -> float:
    """Bytes a second between two GPUs of this type. Raises `UnavailableError` if unknown.

    The error says what is known all the same: whether the memory of a rank suffices.
    """
    lacking = unknown_rate(gpu, parallelism)
    if lacking is None:
        assert gpu.link_bytes_per_s is not None
        return gpu.link_bytes_per_s
    fits = memory.device_bytes <= gpu.memory_bytes
    where = "machines with them" if lacking == NETWORK else "them"
    raise UnavailableError(
        f"how fast {parallelism.ranks} x {gpu.name} train is unknown, because no link rate between "
        f"{where} is known; a rank needs {format_gib(memory.device_bytes)} and "
        f"{'fits' if fits else 'does not fit'}",
        hint=f"add {lacking} to an entry `like: {gpu.id}` of your gpus.yaml",
    )


def unknown_rate(gpu: Gpu, parallelism: Parallelism) -> str | None:
    """The field of the catalogue that is missing for the time of these ranks; None for nothing."""
    if parallelism.ranks > 1 and gpu.link_bytes_per_s is None:
        return LINK
    if parallelism.machines > 1 and gpu.network_bytes_per_s is None:
        return NETWORK
    return None


def rate_of_ring(
    link: float, network: float | None, *, stride: int, members: int, per_machine: int
) -> float:
    """Bytes a second that a ring of ranks `stride` apart sends, in `link`'s unit.

    NCCL makes a ring for each network card, so that all cards of the machine's members carry one
    (nccl-tests, doc/PERFORMANCE.md: the bus bandwidth is that of the slowest link on the way).
    """
    local = max(1, min(members, per_machine // stride))
    if local == members or network is None:
        return link
    return min(link, network * local) if local > 1 else network


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes a second that ranks send each other, of a training with `per_machine` in each machine.

    `link` is between GPUs of a machine, `network` that of a GPU to another machine: None for
    unknown, or where there is one machine.
    """

    link: float
    network: float | None
    per_machine: int

    @classmethod
    def of(cls, gpu: Gpu, link_bytes_per_s: float, parallelism: Parallelism) -> Links:
        """Rates that the protocol leaves of the catalogue's."""
        network = gpu.network_bytes_per_s
        several = parallelism.machines > 1 and network is not None
        return cls(
            link_bytes_per_s * LINK_SHARE,
            network * LINK_SHARE if several and network is not None else None,
            parallelism.per_machine,
        )

    def collective_s(
        self, size_bytes: float, *, members: int, stride: int = 1, sums: bool = False
    ) -> float:
        """Seconds of one collective among `members` ranks that are `stride` apart.

        A ring sends (n - 1) / n of all bytes through every link. A sum that every rank gets is
        sent twice: scattered, and gathered.
        """
        rate = rate_of_ring(
            self.link, self.network, stride=stride, members=members, per_machine=self.per_machine
        )
        return (2 if sums else 1) * (members - 1) / members * size_bytes / rate


def with_exchange(
    times: StepTimes,
    exchanges: Sequence[_Exchange],
    parallelism: Sequence[Parallelism],
    link_bytes_per_s: float,
    gpu: Gpu,
) -> StepTimes:
    """Step times of one rank alone as those of ranks that exchange gradients.

    Buckets are sent in the order in which backward fills them; what is still on its way when
    backward has ended is waited for.
    """
    waits = np.array(
        [
            waited_s(e, p, Links.of(gpu, link_bytes_per_s, p), float(backward_s))
            for e, p, backward_s in zip(exchanges, parallelism, times.backward_s, strict=True)
        ]
    )
    return replace(
        times, step_s=times.step_s + waits, breakdown_s={**times.breakdown_s, "exchange": waits}
    )


def waited_s(
    exchange: _Exchange, parallelism: Parallelism, links: Links, backward_s: float
) -> float:
    """Seconds for which a rank waits for others in one step; 0 on one GPU."""
    p = parallelism
    total = sum(exchange.buckets)
    sent, done_s = 0, 0.0
    for size in exchange.buckets:
        sent += size
        bucket_s = links.collective_s(size, members=p.ranks, sums=True)
        done_s = max(done_s, backward_s * sent / total) + bucket_s
    shared_s = links.collective_s(exchange.gathered + exchange.scattered, members=p.group)
    summed_s = links.collective_s(
        exchange.summed, members=p.ranks // p.group, stride=p.group, sums=True
    )
    return max(0.0, done_s - backward_s) + shared_s + summed_s


def left_of_sums(sums_s: Sequence[float], backward_s: float) -> float:
    """Seconds for which a rank waits for sums of gradients that take `sums_s` each.

    They begin evenly over the `backward_s` seconds of the backward pass, the last at its end. That
    is `waited_s` of equal buckets, where their order and sizes are not known.
    """
    if not sums_s:
        return 0.0
    return max(min(sums_s), sum(sums_s) - backward_s * (1 - 1 / len(sums_s)))


def copying_s(exchange: _Exchange, gpu: Gpu) -> float:
    """Seconds for gradients to get into DDP's buckets, and out of them, in one step."""
    efficiency = Efficiency()
    rate = gpu.bandwidth_bytes_per_s * efficiency.bandwidth["elementwise"]
    return max(4 * sum(exchange.buckets) / rate, 2 * exchange.tensors * efficiency.kernel_s)


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
    return replace(prediction, memory=changed, intervals={**prediction.intervals, **intervals})
