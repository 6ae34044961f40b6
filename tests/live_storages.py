"""What real tensors take on the processor while they live, to hold traces against."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.core.records import Phase


class LiveStorages(TorchDispatchMode):
    """Sums the storages that are alive, and notes each phase's start and peak in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.phases: list[tuple[Phase, int]] = []
        self.peaks: list[int] = []
        self._alive: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[address]
            self.now -= size

        self._alive[address] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)
        if self.peaks:
            self.peaks[-1] = max(self.peaks[-1], self.now)

    def enter(self, phase: Phase) -> None:
        self.phases.append((phase, self.now))
        self.peaks.append(self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, torch.Tensor):
                self.add(item)
        return out
