"""One rank of a trial on several GPUs: how it finds the others, and agrees with them.

Ranks are processes of one machine. Gradients travel over NCCL between GPUs and over gloo between
processors. What decides how a trial goes on (times, memory) travels over a gloo group of its
own, so that all ranks stop at the same step and no GPU memory is taken for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from tuner.core.errors import UnavailableError
from tuner.trial.deadline import LONGEST_S

_WAIT = timedelta(seconds=2 * LONGEST_S)
"""A rank that hangs ends by the deadline of its trial: no library gives up before."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks find each other on this machine, and listen to nothing beyond it."""


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
        """Make this process the rank: what libraries read of it, and its share of processors."""
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
        """The device of this rank, where the first one has `first`.

        Raises `UnavailableError` where this process sees fewer GPUs than there are ranks.
        """
        if first == "cpu" or self.count == 1:
            return first
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
        """The largest value of all ranks, which all of them get."""
        return self._reduced(value, "MAX")

    def total(self, value: float) -> float:
        """The sum over all ranks, which all of them get."""
        return self._reduced(value, "SUM")

    def all(self, holds: bool) -> bool:
        """Whether something holds in all ranks."""
        return bool(self._reduced(float(holds), "MIN"))

    def _reduced(self, value: float, how: str) -> float:
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=getattr(dist.ReduceOp, how), group=self._control)
        return float(values)
