"""Runs the measurements of `microbench` on one device and collects them in a profile.

The plan has the shapes, sizes and precisions of `tuner calibrate` for a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from tuner import __version__
from tuner.core.errors import InputError, UnavailableError
from tuner.core.nvml import device_identity, device_use
from tuner.core.units import GIB, KIB, MIB
from tuner.cost.speed import microbench
from tuner.cost.speed.microbench import AttentionCase, Stopwatch
from tuner.cost.speed.profile import AttentionRate, DeviceProfile, MatmulRate, TrafficRate
from tuner.space.gpus import match_device

Shape = tuple[int, int, int]
"""(m, n, k) of a product of [m, k] by [k, n]."""

TRAINING_WIDTHS = (
    (2048, 2048), (4096, 4096), (14336, 4096), (32000, 2048), (128, 4096), (16, 4096), (64, 14336),
)  # fmt: skip
"""Output and input width of layers: square ones, MLPs, output heads, LoRA of rank 16 to 128."""

TRAINING_TOKENS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class _MeasurePlan:
    """Measurements to make on a GPU."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    largest_traffic_bytes: int
    weights: tuple[tuple[int, int], ...]
    """Shapes of the weights that are dequantised."""
    attention: tuple[AttentionCase, ...]
    memory_bytes: int
    """Limit for the operands of one figure."""


def cuda_plan(compute_capability: tuple[int, int], free_bytes: int) -> _MeasurePlan:
    """Shapes of 1B to 14B models; a minute on a data-centre GPU."""
    dtypes = ["fp16", "fp32"]
    if compute_capability >= (8, 0):
        dtypes = ["bf16", "fp16", "tf32", "fp32"]
    if compute_capability >= (7, 5):
        dtypes.append("int8")
    squares = [(size, size, size) for size in (1024, 4096, 8192)]
    training = product_shapes(tokens=TRAINING_TOKENS, widths=TRAINING_WIDTHS)
    half = "bf16" if compute_capability >= (8, 0) else "fp16"
    kernels = ("flash", "efficient", "eager") if compute_capability >= (8, 0) else ("efficient",)
    cases = [
        AttentionCase(kernel, half, max(1, 4096 // length), 16, length, head_dim)
        for length in (512, 2048, 4096)
        for head_dim in (64, 128, 256)
        for kernel in kernels
    ]
    cases += [AttentionCase("efficient", "fp32", 1, 16, length, 128) for length in (512, 2048)]
    return _MeasurePlan(
        dtypes=tuple(dtypes),
        shapes=tuple(sorted({*squares, *training}, key=lambda s: s[0] * s[1] * s[2])),
        largest_traffic_bytes=min(GIB, free_bytes // 8),
        weights=((2048, 2048), (4096, 4096), (14336, 4096)),
        attention=tuple(cases),
        memory_bytes=free_bytes // 4,
    )


def product_shapes(*, tokens: Sequence[int], widths: Sequence[tuple[int, int]]) -> list[Shape]:
    """The shapes (m, n, k) of training: each layer forward, for its input and for its weight."""
    shapes = {
        shape
        for count in tokens
        for n, k in widths
        for shape in ((count, n, k), (count, k, n), (n, k, count))
    }
    return sorted(shapes, key=math.prod)


def traffic_sizes(largest_bytes: int) -> list[int]:
    """Sizes in bytes from 256 KiB up, four times as large each."""
    sizes = []
    size = 256 * KIB
    while size <= largest_bytes:
        sizes.append(size)
        size *= 4
    return sizes


def fitting(shapes: Sequence[Shape], item: int, limit_bytes: int) -> Iterator[Shape]:
    """The products whose factors and result take at most `limit_bytes`."""
    for m, n, k in shapes:
        if (m * k + k * n) * item + m * n * max(item, 4) <= limit_bytes:
            yield m, n, k


Report = Callable[[str], None]
"""Called with one line for people after each figure."""

_SLOWEST_CALL_S = 0.25
"""Shapes that would take longer are left out: they run at the rate of somewhat smaller ones."""


@dataclass(slots=True)
class _Survey:
    """Figures so far. A figure that fails for want of support or memory is listed as skipped."""

    watch: Stopwatch
    deadline: float
    report: Report
    skipped: list[str] = field(default_factory=list)

    def attempt(self, label: str, measure: Callable[..., Any], *arguments: Any) -> Any | None:
        if time.monotonic() > self.deadline:
            self.skipped.append(f"{label}: no time left")
            return None
        try:
            return measure(self.watch, *arguments)
        # What a library raises for what a device cannot do: no kernel, no memory.
        except (
            RuntimeError,
            NotImplementedError,
            ImportError,
            AssertionError,
            ValueError,
        ) as error:
            self.skipped.append(f"{label}: {str(error).splitlines()[0][:160]}")
            return None
        finally:
            torch.cuda.empty_cache()


def measure_device(
    device: str, *, budget_s: float = 90.0, report: Report = lambda line: None
) -> DeviceProfile:
    """Measure "cuda:0". Raises `UnavailableError` without such a device."""
    started = time.monotonic()
    torch_device = _torch_device(device)
    use_before = device_use(torch_device.index or 0)
    plan = _plan(torch_device)
    watch = Stopwatch(torch_device)
    survey = _Survey(watch, started + budget_s, report)
    microbench.spin_up(watch)
    launch = microbench.time_launch(watch)
    report(f"launch  {launch.typical_s * 1e6:.2f} us an operator")
    shortest = microbench.time_shortest_kernel(watch)
    report(f"kernel  {shortest.typical_s * 1e6:.2f} us at least")
    traffic: tuple[TrafficRate, ...] = tuple(_traffic(survey, plan))
    for kind, name in (("nf4", "dequantise"), ("int8", "dequantise_int8")):
        for rows, columns in plan.weights:
            label = f"{name} {rows}x{columns}"
            measure = microbench.time_dequantise
            traffic += tuple(_rate(survey, name, label, measure, kind, rows, columns))
    attention = tuple(_attention(survey, plan))
    matmul = tuple(_matmul(survey, plan))
    if not matmul:
        raise UnavailableError(
            f"{device}: no matrix product could be measured", hint="; ".join(survey.skipped[:3])
        )
    return DeviceProfile(
        **_identity(torch_device),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(torch_device),
        launch_s=launch.typical_s,
        kernel_s=shortest.typical_s,
        context_bytes=_context_bytes(torch_device, use_before.used_bytes if use_before else None),
        matmul=matmul,
        traffic=traffic,
        attention=attention,
        skipped=tuple(survey.skipped),
        duration_s=time.monotonic() - started,
    )


def _torch_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(f"device {text!r} does not exist", hint="write cuda:0") from None
    if device.type != "cuda":
        raise InputError(f"device {text!r} cannot be measured", hint="write cuda:0")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise UnavailableError(f"there is no CUDA device {index} on this machine")
    return torch.device("cuda", index)


def _plan(device: torch.device) -> _MeasurePlan:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return cuda_plan(torch.cuda.get_device_capability(device), free_bytes)


def _traffic(survey: _Survey, plan: _MeasurePlan) -> Iterator[TrafficRate]:
    for kind in ("elementwise", "copy", "read"):
        for size in traffic_sizes(plan.largest_traffic_bytes):
            label = f"{kind} {size}"
            yield from _rate(survey, kind, label, microbench.time_traffic, kind, size)


def _rate(
    survey: _Survey, kind: str, label: str, measure: Callable[..., Any], *arguments: Any
) -> Iterator[TrafficRate]:
    """The rate of kernels of this kind, from the bytes that `measure` moved and their time."""
    found = survey.attempt(label, measure, *arguments)
    if found is not None:
        moved, timing = found
        rate = TrafficRate(kind, moved, moved / timing.typical_s, timing.spread)
        width = 21 - len(kind)
        survey.report(f"{kind}{moved / MIB:{width}.1f} MiB {rate.bytes_per_s / 1e9:9.1f} GB/s")
        yield rate


def _attention(survey: _Survey, plan: _MeasurePlan) -> Iterator[AttentionRate]:
    for case in plan.attention:
        label = (
            f"{case.kernel} {case.dtype} {case.batch}x{case.heads}x{case.length}x{case.head_dim}"
        )
        found = survey.attempt(f"attention {label}", microbench.time_attention, case)
        if found is not None:
            forward, backward = found
            rate = AttentionRate(
                *case,
                forward_flops_per_s=case.forward_flops / forward.typical_s,
                backward_flops_per_s=2.5 * case.forward_flops / backward.typical_s,
                spread=max(forward.spread, backward.spread),
            )
            survey.report(
                f"attention {label}: {rate.forward_flops_per_s / 1e12:.2f} forward, "
                f"{rate.backward_flops_per_s / 1e12:.2f} TFLOP/s backward"
            )
            yield rate


def _matmul(survey: _Survey, plan: _MeasurePlan) -> Iterator[MatmulRate]:
    best = dict.fromkeys(plan.dtypes, 0.0)
    items = {dtype: microbench.DTYPES[dtype].itemsize for dtype in plan.dtypes}
    # Small shapes of all dtypes first: a cut for want of time leaves the large ones out.
    for shape in fitting(plan.shapes, max(items.values()), plan.memory_bytes):
        m, n, k = shape
        for dtype in plan.dtypes:
            if best[dtype] and 2 * m * n * k / best[dtype] > _SLOWEST_CALL_S:
                continue
            timing = survey.attempt(
                f"matmul {dtype} {m}x{n}x{k}", microbench.time_product, dtype, shape
            )
            if timing is not None:
                rate = 2 * m * n * k / timing.typical_s
                best[dtype] = max(best[dtype], rate)
                survey.report(f"matmul {dtype} {m}x{n}x{k}: {rate / 1e12:.3f} TFLOP/s")
                yield MatmulRate(dtype, m, n, k, rate, timing.spread)


def _identity(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    gpu = match_device(properties.name, properties.total_memory)
    return {
        "device": properties.name,
        "gpu": gpu.id if gpu else None,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"tuner": __version__, "torch": str(torch.__version__)}
    try:
        versions["bitsandbytes"] = metadata.version("bitsandbytes")
    except metadata.PackageNotFoundError:
        versions["bitsandbytes"] = "not installed"
    identity = device_identity(device.index or 0)
    versions["cuda"] = str(torch.version.cuda)
    versions["driver"] = identity.driver if identity else "unknown"
    return versions


def _context_bytes(device: torch.device, used_before_bytes: int | None) -> int | None:
    """Device memory of this process beyond what torch reserved; None where it cannot be told.

    Where the driver does not tell processes apart, all memory that the device lost since before
    the measurement counts, which is right as long as nothing else runs on it.
    """
    torch.cuda.empty_cache()
    use = device_use(device.index or 0)
    if use is None:
        return None
    reserved = torch.cuda.memory_reserved(device)
    if use.process_bytes is not None:
        return max(0, use.process_bytes - reserved)
    if used_before_bytes is None:
        return None
    return max(0, use.used_bytes - used_before_bytes - reserved)
