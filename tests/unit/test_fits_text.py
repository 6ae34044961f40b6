"""The verdict with the arithmetic behind it."""

from __future__ import annotations

import pytest

from tuner.core.records import Memory, MemoryBudget, Prediction, Speed
from tuner.report.terminal.evidence import verdict_text

GIB = 1 << 30
BUDGET = MemoryBudget(24 * GIB, GIB)


def prediction(high_bytes: int) -> Prediction:
    memory = Memory(
        peak_allocated_bytes=20 * GIB, peak_reserved_bytes=21 * GIB, device_bytes=22 * GIB,
        loaded_bytes=10 * GIB, phase_peak_bytes={}, peak_phase="backward", breakdown={},
    )  # fmt: skip
    speed = Speed(step_s=1.0, it_per_s=1.0, samples_per_s=1.0, tokens_per_s=1.0, mfu=None)
    return Prediction(
        budget=BUDGET, memory=memory, speed=speed,
        trainable_params=1, total_params=1, gpu="rtx4090", method="",
        intervals={"device_bytes": (20.0 * GIB, float(high_bytes))},
    )  # fmt: skip


@pytest.mark.parametrize(("high", "words"), [(25, "tight (likely fits)"), (23, "fits")])
def test_an_interval_that_reaches_past_the_card_makes_it_tight(high: int, words: str) -> None:
    rest = "22.00 GiB of 24.00 GiB, 2.00 GiB free, headroom 1.00 GiB"
    assert verdict_text(prediction(high * GIB), BUDGET) == f"{words}: {rest}"
