"""A prediction multiplied by what measured trials say of it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.core.records import Memory, MemoryCategory, Prediction, StageNumbers

DEVICE, RESERVED, ALLOCATED = "device_bytes", "peak_reserved_bytes", "peak_allocated_bytes"
STEP, TOKENS = "step_s", "tokens_per_s"

QUANTITIES = (DEVICE, RESERVED, ALLOCATED, STEP)
"""Calibrated quantities. Rates follow from `step_s`: the work of a step is known."""


def sizes_of(memory: Memory) -> dict[str, int]:
    """The peaks that are calibrated, by quantity."""
    return {
        DEVICE: memory.device_bytes,
        RESERVED: memory.peak_reserved_bytes,
        ALLOCATED: memory.peak_allocated_bytes,
    }


def uncorrected(prediction: Prediction) -> Prediction:
    """The prediction as the model of the GPU made it, before any correction by trials."""
    if not prediction.corrections:
        return prediction
    undo = {name: 1.0 / factor for name, factor in prediction.corrections.items()}
    return replace(multiplied(prediction, undo), corrections={})


def multiplied(prediction: Prediction, factors: Mapping[str, float]) -> Prediction:
    """The prediction with its quantities multiplied, and the verdict on the result."""
    if not factors:
        return prediction
    memory = _corrected_memory(prediction.memory, factors)
    before, after = sizes_of(prediction.memory), sizes_of(memory)
    corrections = {n: after[n] / before[n] for n in before if n in factors and before[n]}
    if STEP in factors:
        corrections[STEP] = factors[STEP]
    slower = factors.get(STEP, 1.0)
    return replace(
        prediction,
        memory=memory,
        speed=prediction.speed.slowed(slower),
        corrections=corrections,
        stages={
            name: StageNumbers(
                device_bytes=round(stage.device_bytes * factors.get(DEVICE, 1.0)),
                samples_per_s=stage.samples_per_s / slower,
                step_s=stage.step_s * slower,
            )
            for name, stage in prediction.stages.items()
        },
    )


def _corrected_memory(memory: Memory, factors: Mapping[str, float]) -> Memory:
    device = round(memory.device_bytes * factors.get(DEVICE, 1.0))
    # Each is part of the one before, whatever was learned of each alone.
    reserved = min(device, round(memory.peak_reserved_bytes * factors.get(RESERVED, 1.0)))
    allocated = min(reserved, round(memory.peak_allocated_bytes * factors.get(ALLOCATED, 1.0)))
    share = allocated / memory.peak_allocated_bytes if memory.peak_allocated_bytes else 1.0
    return replace(
        memory,
        device_bytes=device,
        peak_reserved_bytes=reserved,
        peak_allocated_bytes=allocated,
        phase_peak_bytes={
            name: round(size * share) for name, size in memory.phase_peak_bytes.items()
        },
        breakdown=_with_sum(memory.breakdown, device),
    )


def _with_sum(breakdown: Mapping[str, int], total: int) -> dict[str, int]:
    """The breakdown with another sum; the allocator's overhead, the least certain, gives first."""
    parts = dict(breakdown)
    overhead = str(MemoryCategory.ALLOCATOR_OVERHEAD)
    parts[overhead] = max(0, parts.get(overhead, 0) + total - sum(parts.values()))
    excess = sum(parts.values()) - total
    if excess:
        share = total / sum(parts.values())
        parts = {name: round(size * share) for name, size in parts.items()}
        largest = max(parts, key=parts.__getitem__)
        parts[largest] += total - sum(parts.values())
    return parts
