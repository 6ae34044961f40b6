"""A trial on several GPUs: one process per rank, supervised by the trial's own process.

As in torchrun, the first rank that fails ends all others, and its failure is the trial's. The ranks
are in the trial's process group and end with its process, so ending the trial ends them all.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from statistics import fmean
from typing import Any

from tuner.core.errors import UnavailableError
from tuner.core.outcome import RANK, is_lost_peer
from tuner.core.processes import die_with, end_like, has_ended
from tuner.core.records import Measurement, RankMemory
from tuner.trial.messages import FAILED, RaisedElsewhere, Report, Said, tell
from tuner.trial.stop_rule import LONGEST_S

_WAIT = timedelta(seconds=2 * LONGEST_S)
"""A rank that hangs ends by the deadline of its trial: no library gives up before."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks connect on this machine only, and don't listen on the network."""


@dataclass(slots=True)
class Rank:
    """The rank `number` of `count`; a trial on one GPU has one, which agrees with itself.

    `store` is the path of a file that the ranks share, by which they find each other.
    """

    number: int = 0
    count: int = 1
    store: str = ""
    _control: Any = field(default=None, repr=False)

    def settle(self) -> None:
        """Make this process the rank: set the variables libraries read, and its processors."""
        import torch

        os.environ |= {
            **LOOPBACK,
            "RANK": str(self.number),
            "LOCAL_RANK": str(self.number),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
        }
        torch.set_num_threads(max(1, torch.get_num_threads() // self.count))

    def join(self, device: str) -> None:
        """Take part in the process group of the trial; waits for the others."""
        if self.count == 1:
            return
        import torch
        import torch.distributed as dist

        backend, parsed = ("gloo", None) if device == "cpu" else ("nccl", torch.device(device))
        dist.init_process_group(
            backend,
            store=dist.FileStore(self.store, self.count),  # type: ignore[attr-defined]
            rank=self.number,
            world_size=self.count,
            timeout=_WAIT,
            device_id=parsed,
        )
        self._control = dist.new_group(backend="gloo", timeout=_WAIT)

    def device(self, first: str) -> str:
        """The device of this rank, if that of the first rank is `first`.

        Raises `UnavailableError` if this process sees fewer GPUs than there are ranks.
        """
        if first == "cpu" or self.count == 1:
            return first
        import torch

        index = int(first.partition(":")[2] or 0) + self.number
        seen = torch.cuda.device_count()
        if index - self.number + self.count > seen:
            raise UnavailableError(
                f"gpus_per_trial {self.count} needs {self.count} GPUs from {first} on, and this "
                f"trial sees {seen}",
                hint="CUDA_VISIBLE_DEVICES and the cluster decide what a trial sees",
            )
        return f"cuda:{index}"

    def most(self, value: float) -> float:
        """The largest value of all ranks, returned in each of them."""
        return self._reduced(value, "MAX")

    def total(self, value: float) -> float:
        """The sum over all ranks, returned in each of them."""
        return self._reduced(value, "SUM")

    def all(self, holds: bool) -> bool:
        """True in all ranks if `holds` is true in each of them."""
        return bool(self._reduced(float(holds), "MIN"))

    def _reduced(self, value: float, how: str) -> float:
        if self.count == 1:
            return value
        import torch
        import torch.distributed as dist

        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=getattr(dist.ReduceOp, how), group=self._control)
        return float(values)


Work = Callable[[int, str, Report], Measurement]
"""The work of a rank. Gets its number, the path of the shared file, and the receiver of facts."""

_SETTLE_S = 5.0
"""Waiting time for the other ranks after one has failed: a rank that failed because it lost a peer
may report before that peer does."""
_LOOK_AGAIN_S = 1.0
"""Interval for checking that a silent rank still lives."""
_CHUNK_BYTES = 1 << 16


_IS_OURS = "tuner.core.errors.TunerError"


class _Process(Said):
    """The process of one rank, with everything received from it."""

    def __init__(self, rank: int, pid: int, lines: int) -> None:
        super().__init__()
        self.rank, self.pid, self.lines = rank, pid, lines
        self.exit_code: int | None = None

    @property
    def has_failed(self) -> bool:
        """True if it has ended without a result, or is about to."""
        return bool(self.raised) or (self.exit_code is not None and self.measurement is None)

    @property
    def is_gone(self) -> bool:
        """True if it has ended and all its output has been read.

        The end is checked first: it may write its last output between the two checks.
        """
        if not has_ended(self.pid):
            return False
        waiting = select.poll()
        waiting.register(self.lines, select.POLLIN)
        return not waiting.poll(0)

    def read(self) -> tuple[dict[str, Any], bool]:
        """New facts, and True if there may be more."""
        data = os.read(self.lines, _CHUNK_BYTES)
        return self.take(data), bool(data)


def run_ranks(count: int, work: Work, report: Report) -> Measurement:
    """Do `work` in `count` processes, and return their merged measurement.

    `report` gets the facts of rank 0, and at a failure those of the rank that failed first.
    Raises `RaisedElsewhere` if a rank raised an exception. If a rank ended without a report, this
    process ends in the same way: by the same signal, or with the same exit code.
    """
    store = os.memfd_create("tuner-ranks")  # in memory: a disk may be full
    processes: list[_Process] = []
    try:
        for rank in range(count):
            others = [process.lines for process in processes]
            processes.append(_start(rank, f"/proc/self/fd/{store}", work, others))
        _listen(processes, report)
    finally:
        _end(processes)
        os.close(store)
    failed = first_failure(processes)
    if failed is None:
        found = [process.measurement for process in processes]
        return merged([Measurement.from_dict(one) for one in found if one is not None])
    report({**failed.facts, RANK: failed.rank})
    if not failed.raised:
        end_like(-signal.SIGKILL if failed.exit_code is None else failed.exit_code or FAILED)
    rank, links = failed.rank, failed.raised
    named = (
        # A wrong request of the user is wrong in every rank.
        link if _IS_OURS in link.kinds else replace(link, text=f"rank {rank}: {link.text}")
        for link in links
    )
    raise RaisedElsewhere(f"rank {rank}: {links[0]}", tuple(named))


def _start(rank: int, store: str, work: Work, foreign: list[int]) -> _Process:
    parent = os.getpid()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for descriptor in (read, *foreign):
            os.close(descriptor)

        def settled(report: Report) -> Measurement:
            die_with(parent)
            return work(rank, store, report)

        tell(write, settled)
    os.close(write)
    return _Process(rank, pid, read)


def _listen(processes: list[_Process], report: Report) -> None:
    """Listen until all ranks have ended, or for `_SETTLE_S` after one has failed."""
    until: float | None = None
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.lines, selectors.EVENT_READ, process)
        while selector.get_map():
            if until is not None and time.monotonic() > until:
                return
            ready = {key.data.rank for key, _ in selector.select(_LOOK_AGAIN_S)}
            for process in [key.data for key in selector.get_map().values()]:
                # Helpers of a rank that was killed may hold its end of the pipe for some time.
                gone = process.rank not in ready and process.is_gone
                facts, more = process.read() if process.rank in ready else ({}, not gone)
                if facts and process.rank == 0:
                    report(facts)
                if not more:
                    selector.unregister(process.lines)
                    process.exit_code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
            if until is None and any(process.has_failed for process in processes):
                until = time.monotonic() + _SETTLE_S


def _end(processes: list[_Process]) -> None:
    """End the ranks that still run. They are children that were not reaped: the ids are theirs."""
    for process in processes:
        if process.exit_code is None:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        os.close(process.lines)


def first_failure(processes: list[_Process]) -> _Process | None:
    """The rank whose failure made the others fail; None if none has failed.

    The earliest exception comes first, then a rank that was killed without a report, then an abort:
    NCCL's watchdog aborts a rank whose peers are gone. Ranks that lost a peer come last, because
    they report the peer's end, not a failure of their own.
    """

    def order(process: _Process) -> tuple[int, float]:
        if not process.raised:
            return (2 if process.exit_code == -signal.SIGABRT else 1), 0.0
        lost = any(is_lost_peer(link.text) for link in process.raised)
        return (3 if lost else 0), process.raised_at_s

    return min((p for p in processes if p.has_failed), key=order, default=None)


def merged(ranks: list[Measurement]) -> Measurement:
    """One measurement of all ranks: that of the rank with most memory, with totals over the others.

    The rates of each rank are already totals (`tuner.trial.steps`).
    """
    fullest = max(ranks, key=lambda m: m.memory.device_bytes)
    return replace(
        fullest,
        load_s=if_all_known(max, (m.load_s for m in ranks)),
        data_wait_fraction=if_all_known(max, (m.data_wait_fraction for m in ranks)),
        num_alloc_retries=if_all_known(max, (m.num_alloc_retries for m in ranks)),
        timed_alloc_retries=if_all_known(max, (m.timed_alloc_retries for m in ranks)),
        gpu_utilization=if_all_known(fmean, (m.gpu_utilization for m in ranks)),
        ranks=tuple(RankMemory.of(m.memory) for m in ranks),
    )


def if_all_known(how: Callable[[list[Any]], Any], values: Iterator[Any]) -> Any:
    """`how` of the values; None if one of them is unknown."""
    found = list(values)
    return None if any(value is None for value in found) else how(found)
