"""Model FLOPs utilisation of a measured step."""

from __future__ import annotations

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.core.setup.common import QUANTIZED, TORCH_DTYPES
from tuner.cost.speed.rates import matmul_peak


def mfu(flops_per_s: float | None, configuration: Configuration, gpu: Gpu | None) -> float | None:
    """Model FLOP/s over the dense peak of the precision in which most products run.

    The same precision as in a prediction: that of autocast, else of the weights, and bf16 for
    quantised ones. None where the FLOPs or the device's peak are not known.
    """
    if flops_per_s is None:
        return None
    mixed = str(configuration.get("mixed_precision", "no"))
    precision = mixed if mixed != "no" else str(configuration.get("precision"))
    if precision in QUANTIZED:
        precision = "bf16"
    if gpu is None or precision not in gpu.flops:
        return None
    return flops_per_s / matmul_peak(gpu, TORCH_DTYPES[precision], precision == "tf32")
