"""The memory that a trial may take: that of its GPU, less what is to stay free."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MARGIN_FRACTION = 0.03
"""Part of the GPU's memory to keep free: reserved memory differed by up to 11.7 % between two
identical published runs, and drivers and displays take their share."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`limit_bytes` of memory, of which `margin_bytes` are to stay free."""

    limit_bytes: int
    margin_bytes: int = 0

    @classmethod
    def of(cls, limit_bytes: int, margin_fraction: float | None = None) -> MemoryBudget:
        """The budget with a margin of `margin_fraction` of the memory, or of the default."""
        fraction = DEFAULT_MARGIN_FRACTION if margin_fraction is None else margin_fraction
        return cls(limit_bytes, round(limit_bytes * fraction))

    @property
    def usable_bytes(self) -> int:
        """What may be used."""
        return self.limit_bytes - self.margin_bytes

    def fits(self, used_bytes: float) -> bool:
        """Whether so much memory leaves the margin free."""
        return used_bytes <= self.usable_bytes
