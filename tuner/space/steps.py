"""The number of optimizer steps of an epoch, as transformers' Trainer counts them."""

from __future__ import annotations

import math


def steps_per_epoch(
    rows: int,
    micro_batch: int,
    *,
    accumulation: int = 1,
    ranks: int = 1,
    drop_last: bool = False,
    split_batches: bool = False,
) -> int:
    """Optimizer steps of one pass over `rows`, which are packed rows where rows are packed.

    Ranks take turns at batches (accelerate's `BatchSamplerShard`) or share each with
    `split_batches`. A last, partial accumulation is a step (`Trainer.set_initial_training_values`
    of transformers 5.23). The order of the rows changes nothing. 0 where `drop_last` leaves no
    batch: Trainer then refuses to start.
    """
    batches = rows // micro_batch if drop_last else math.ceil(rows / micro_batch)
    if not split_batches:
        batches = batches // ranks if drop_last else math.ceil(batches / ranks)
    return math.ceil(batches / accumulation)
