"""The interval of predicted memory, by what is not known of it: in bytes, part by part.

Device memory is allocated blocks, what PyTorch's allocator holds beside them (the *gap*), and the
CUDA context. Allocated memory is counted; the gap depends on the order of requests and on what an
allocator did before, so that it can be half as large or half as large again; a context differs
between drivers by some tens of MiB, whatever the training. So a training whose gap is small has a
narrow interval. An end is the prediction plus the root of the summed squares of what each part may
be off by, and a `Doubt` adds a share of the whole: an interval never gets narrower with a doubt.

Near the limit the allocator returns its free blocks before it gives up. Where the upper end passes
the limit, the lower one is therefore what is allocated, with the context.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tuner.core.records import Doubt, Memory

Ends = tuple[float, float]
"""Lower and upper end of an interval."""


@dataclass(frozen=True, slots=True)
class Share:
    """Shares by which a size is off at its lower and upper end, and allocated memory at each."""

    below: float
    above: float
    allocated: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """The errors of each part of predicted memory at the ends of the 90 % interval.

    What is learned was printed by `python -m benchmarks.accuracy.memory_intervals`.
    """

    allocated: float = 0.008
    """Share of allocated memory: gaps left by loading 4-bit weights change 0.1 to 0.8 %."""
    context: float = 0.2
    """Share of the CUDA context: published readings of one GPU type differ by up to 20 % from the
    catalogue's (A100: 409 to 503 MiB, RTX 3090: 255 to 420, RTX 5090: 499 to 595)."""
    gap_below: float = 0.18
    """Share of the gap, learned from 70 plain runs of grade A: 3 programs on 3 GPU types."""
    gap_above: float = 0.71
    least_gap: float = 0.03
    """Share of reserved memory that a gap counts as at least: no plain run has one below 2.7 %."""
    doubts: Mapping[Doubt, Share] = field(
        default_factory=lambda: {
            # The 90 % of 120 configurations that were replayed too (docs/notebook/how-it-works.md).
            Doubt.ESTIMATED: Share(0.084, 0.042),
            # 29 runs; allocated memory was up to 2.2 % less than predicted.
            Doubt.KERNELS: Share(0.03, 0.19, 0.025),
            # The interval of the prior, of all programs alike (`calibrate.prior_of`).
            Doubt.UNCOMPARED: Share(0.134, 0.155, 0.013),
            # transformers 5.12 needs 7 % more than 5.23 for one configuration; 17 runs with 4.49
            # needed 1 to 5 % less than is predicted for it.
            Doubt.RELEASES: Share(0.07, 0.07, 0.07),
            # 21 runs of 2019 to 2022.
            Doubt.OLD_RELEASES: Share(0.07, 0.85, 0.07),
        }
    )

    def ends(
        self,
        memory: Memory,
        *,
        limit_bytes: int | None = None,
        measured_context: bool = False,
        doubts: Collection[Doubt] = (),
    ) -> tuple[Ends, Ends, Ends]:
        """Bytes at the ends of device, reserved and allocated memory."""
        shares = [self.doubts[doubt] for doubt in doubts]
        allocated = memory.peak_allocated_bytes
        gap = memory.peak_reserved_bytes - allocated
        context = memory.device_bytes - memory.peak_reserved_bytes
        counted = self.allocated * allocated
        uncertain = max(gap, round(self.least_gap * memory.peak_reserved_bytes))

        def above(size: int, *parts: float) -> float:
            return math.hypot(
                counted, self.gap_above * uncertain, *(s.above * size for s in shares), *parts
            )

        def below(size: int, *parts: float) -> float:
            off = math.hypot(counted, *(s.below * size for s in shares), *parts)
            usual = math.hypot(off, self.gap_below * uncertain)
            return max(usual, gap + off) if is_short else usual

        context_off = 0.0 if measured_context else self.context * context
        device, reserved = memory.device_bytes, memory.peak_reserved_bytes
        high = device + above(device, context_off)
        is_short = limit_bytes is not None and high > limit_bytes
        off = math.hypot(counted, *(s.allocated * allocated for s in shares))
        return (
            (device - below(device, context_off), high),
            (reserved - below(reserved), reserved + above(reserved)),
            (allocated - off, allocated + off),
        )


MEMORY_ERRORS = MemoryErrors()
