"""Trials on several GPUs, or in several ranks on a processor: how many, and what each takes."""

from __future__ import annotations

from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Measurement, Prediction
from tuner.core.records.trial import PROCESSOR
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.core.units import format_size

OF_ONE = "all memory is of one of them"


def counted_gpus(configuration: Configuration) -> int:
    """How many GPUs, or ranks on a processor, train together.

    1 where a name of the user's own means something else.
    """
    value = configuration.get(GPUS_PER_TRIAL, 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def paid_gpus(configuration: Configuration, gpu: Gpu) -> int:
    """How many GPUs are paid for: ranks on a processor have one between them."""
    return 1 if gpu.id == PROCESSOR else counted_gpus(configuration)


def times_text(count: int, name: str) -> str:
    """The name with how many there are, "2 x NVIDIA A40"; of one the name alone."""
    return f"{count} x {name}" if count > 1 else name


def gpus_text(configuration: Configuration, gpu: Gpu) -> str:
    """The GPU's name; of several with how many, and whose the numbers of memory are."""
    count = counted_gpus(configuration)
    if count == 1:
        return gpu.name
    several = f"{count} ranks on" if gpu.id == PROCESSOR else f"{count} x"
    return f"{several} {gpu.name}, {OF_ONE}"


def ranks_text(evidence: Prediction | Measurement) -> str:
    """Device memory of each rank that was measured; empty for one GPU."""
    ranks = evidence.ranks if isinstance(evidence, Measurement) else ()
    return ", ".join(format_size(rank.device_bytes) for rank in ranks)


def ranks_dict(evidence: Prediction | Measurement) -> dict[str, Any]:
    """JSON types; nothing for one GPU."""
    ranks = evidence.ranks if isinstance(evidence, Measurement) else ()
    return {"rank_device_bytes": [rank.device_bytes for rank in ranks]} if ranks else {}
