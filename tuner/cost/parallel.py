"""Training on several GPUs: the time of exchanges between ranks and machines.

DistributedDataParallel sends a bucket of gradients on its way as soon as backward has filled it.
Sources: torch/csrc/distributed/c10d/reducer.cpp and torch/distributed/fsdp/_fully_shard of
PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, Phase
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.core.units import format_gib
from tuner.cost.memory import Course
from tuner.cost.rank_memory import buckets_of, replicated
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
    course: Course, gradient_bytes: Sequence[int], configuration: Configuration
) -> Exchange:
    """The exchange between the ranks of a traced step."""
    if Parallelism.of(configuration).is_replicated:
        return Exchange(tuple(buckets_of(gradient_bytes)), tensors=len(gradient_bytes))
    micro_steps = int(str(configuration.get("grad_accum", 1)))
    copies = Parallelism.of(configuration).strategy == "hsdp"
    return sharded_exchange(course, micro_steps, copies=copies)


def sharded_exchange(course: Course, micro_steps: int, *, copies: bool = False) -> Exchange:
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
    return Exchange(gathered=gathered, scattered=scattered, summed=summed)


@dataclass(frozen=True, slots=True)
class Exchange:
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
    exchanges: Sequence[Exchange],
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
    exchange: Exchange, parallelism: Parallelism, links: Links, backward_s: float
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


def copying_s(exchange: Exchange, gpu: Gpu) -> float:
    """Seconds for gradients to get into DDP's buckets, and out of them, in one step."""
    efficiency = Efficiency()
    rate = gpu.bandwidth_bytes_per_s * efficiency.bandwidth["elementwise"]
    return max(4 * sum(exchange.buckets) / rate, 2 * exchange.tensors * efficiency.kernel_s)
