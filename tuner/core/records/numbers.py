"""Memory and speed as a prediction and a measurement both state them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.core.records.reading import Bytes, Quantity


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a training step on one GPU, in bytes.

    `device_bytes` is what NVML would show for the process (`peak_reserved_bytes` plus CUDA
    context); `breakdown` splits `device_bytes` by `MemoryCategory` and adds up to it exactly.
    `loaded_bytes` is allocated once model, adapters and optimizer exist and before the first
    step. `paged_bytes` is managed memory of paged optimizers, which torch does not count and
    the driver can move to the host: it is not part of `device_bytes`.
    """

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    device_bytes: Bytes
    loaded_bytes: Bytes
    phase_peak_bytes: Mapping[str, Bytes]
    peak_phase: str
    breakdown: Mapping[str, Bytes]
    paged_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a configuration trains, at one fixed effective batch.

    `step_s` is one optimizer step (all its micro-steps), `it_per_s` counts micro-steps as
    the progress bars of trainers do, `tokens_per_s` counts tokens that are not padding.
    `mfu` is model FLOPs per second over the GPU's dense peak in the compute precision, with
    recomputation of checkpointed activations not counted; None where the peak is unknown.
    `breakdown_s` splits `step_s` by kind of work and adds up to it.
    """

    step_s: Quantity
    it_per_s: Quantity
    samples_per_s: Quantity
    tokens_per_s: Quantity
    mfu: Quantity | None
    breakdown_s: Mapping[str, Quantity] = field(default_factory=dict)

    @property
    def counts_micro_steps(self) -> bool:
        """Whether `it_per_s` differs from optimizer steps a second.

        It does not where steps have one micro-step, nor where nobody tells of micro-steps: of
        commands and emulated programs only the updates are known.
        """
        return not math.isclose(self.it_per_s * self.step_s, 1, rel_tol=1e-3)


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage of a training that has several: its peak of device memory, and its speed."""

    device_bytes: Bytes
    samples_per_s: Quantity
    step_s: Quantity


def hardest_stage(stages: Mapping[str, StageNumbers]) -> str | None:
    """The stage that needs most memory; None without stages."""
    return max(stages, key=lambda name: stages[name].device_bytes, default=None)
