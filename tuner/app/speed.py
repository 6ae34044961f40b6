"""What slows a configuration down, each with the number behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.changes import Suggestion
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Measurement, Prediction
from tuner.core.setup.common import QUANTIZED
from tuner.core.units import format_size, significant
from tuner.space import SearchSpace
from tuner.space.lengths import LengthDistribution

LEAST_SHARE = 0.01
"""Smaller parts of a step are not worth a sentence: no change of them would be noticed."""

_TFLOPS = 1e12


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that takes time: what it is called, its share of a whole, and the sentence."""

    kind: str
    share: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"kind": self.kind, "share": self.share, "text": self.text}


def speed_notes(
    space: SearchSpace,
    configuration: Configuration,
    prediction: Prediction,
    gpu: Gpu,
    *,
    changes: Sequence[Suggestion] = (),
    measured: Measurement | None = None,
) -> list[Note]:
    """What slows `configuration`, the largest share first; nothing is said without a number.

    `changes` are predictions of its neighbours, and `measured` what a trial of it came to.
    """
    notes = [
        *_parts(prediction, changes),
        *_tensor_cores(configuration, prediction, gpu),
        *_padding(space, configuration),
        *_loader(configuration, prediction, measured),
    ]
    return sorted(notes, key=lambda note: -note.share)


def compute_precision(configuration: Configuration) -> str:
    """The precision of most matrix products: a key of `Gpu.flops`."""
    precision = str(configuration.get("precision", "fp32"))
    mixed = str(configuration.get("mixed_precision", "no"))
    if precision in QUANTIZED:
        wanted = str(configuration.get("compute_dtype", "auto"))
        if precision == "int8":
            return "int8"
        if wanted != "auto":
            return wanted
        return mixed if mixed != "no" else "bf16"
    return mixed if mixed != "no" else precision


def _parts(prediction: Prediction, changes: Sequence[Suggestion]) -> Iterator[Note]:
    """The parts of the predicted step that are no arithmetic of the model."""
    for kind, text in (
        ("launch", "the GPU waits for the host to start kernels (launch-bound); {fix}"),
        ("recompute", "gradient checkpointing runs forward passes again; {fix}"),
        ("dequantise", "quantised weights are unpacked for their products; {fix}"),
        ("elementwise", "kernels that memory bandwidth limits (norms, copies, masks); {fix}"),
        ("optimizer", "the optimizer's own step; {fix}"),
    ):
        share = _share(prediction, kind)
        if share < LEAST_SHARE:
            continue
        fix = _fix(kind, changes)
        yield Note(kind, share, f"{share:.1%} of the step: {text.format(fix=fix)}".rstrip("; "))


def _share(prediction: Prediction, kind: str) -> float:
    total_s = sum(prediction.speed.breakdown_s.values())
    return prediction.speed.breakdown_s.get(kind, 0.0) / total_s if total_s > 0 else 0.0


_REMEDIES = {
    "launch": "micro_batch",
    "recompute": "gradient_checkpointing",
    "dequantise": "precision",
    "optimizer": "optimizer",
}
"""The knob that acts on a part of the step."""


def _fix(kind: str, changes: Sequence[Suggestion]) -> str:
    """What the fastest other value of the knob that acts on `kind` would do, in numbers."""
    knob = _REMEDIES.get(kind)
    others = [c for c in changes if list(c.settings) == [knob] and c.lost < 0]
    if not others:
        return ""
    best = min(others, key=lambda c: c.lost)
    fits = "fits" if best.prediction.fits else "does not fit"
    return (
        f"{best} would be {-best.lost:.1%} faster and {fits} "
        f"({format_size(best.prediction.memory.device_bytes)})"
    )


def _tensor_cores(configuration: Configuration, prediction: Prediction, gpu: Gpu) -> Iterator[Note]:
    """Products that run at the plain rate although the GPU has tensor cores for others."""
    if gpu.compute_capability < (7, 0):
        return  # a processor, or a GPU before there were any
    precision = compute_precision(configuration)
    share = _share(prediction, "matmul")
    rates = {p: gpu.flops[p] for p in ("tf32", "fp16", "bf16") if p in gpu.flops}
    plain = gpu.flops.get("fp32")
    if (precision in rates or precision == "int8") or not rates or not plain or not share:
        return
    best = max(rates, key=rates.__getitem__)
    if rates[best] <= plain:
        return
    yield Note(
        "no_tensor_cores",
        share,
        f"{share:.1%} of the step are matrix products in {precision}, for which {gpu.name} has no "
        f"tensor cores: {plain / _TFLOPS:.3g} TFLOP/s, where {best} has "
        f"{rates[best] / _TFLOPS:.3g} ({rates[best] / plain:.1f} x)",
    )


def _padding(space: SearchSpace, configuration: Configuration) -> Iterator[Note]:
    if space.data.token_lengths is None or "max_length" not in configuration:
        return
    lengths = LengthDistribution.from_token_lengths(space.data.token_lengths)
    batch, length = (int(str(configuration[name])) for name in ("micro_batch", "max_length"))
    mode = str(configuration.get("padding", space.data.padding or "longest"))
    share = lengths.batch(batch, length, mode).padding_share
    if share.high < LEAST_SHARE:
        return
    exact = share.low == share.high
    text = f"{share.high:.1%}" if exact else f"between {share.low:.0%} and {share.high:.0%}"
    why = "" if exact else "; only mean and maximum of the lengths are known"
    target = "max_length" if mode == "max_length" else "the longest example of each micro-batch"
    yield Note("padding", share.high, f"{text} of the tokens are padding to {target}{why}")


def _loader(
    configuration: Configuration, prediction: Prediction, measured: Measurement | None
) -> Iterator[Note]:
    """The wait for data where it was measured, and what one process has to deliver."""
    if measured is not None and (measured.data_wait_fraction or 0) >= LEAST_SHARE:
        assert measured.data_wait_fraction is not None
        share = measured.data_wait_fraction
        yield Note("data_loader", share, f"{share:.1%} of the measured steps waited for data")
    workers = configuration.get("num_workers")
    if isinstance(workers, int) and workers <= 1:
        rate = significant(prediction.speed.samples_per_s)
        who = "the training process itself" if workers == 0 else "one loader process"
        yield Note(
            "loader_workers", 0.0, f"num_workers={workers}: {who} has to prepare {rate} samples/s"
        )
