"""Measures one device in about a minute: what `tuner calibrate` runs.

Every figure is the median of several samples after warm-up, with its spread. Events
time the kernels, and the device sleeps while the host issues them, so that launching costs
nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.core.setup.common import TORCH_DTYPES
from tuner.core.units import MIB
from tuner.cost.operators.operators import launches_nothing

_SLEEP_CYCLES = 5_000_000
"""About 2.5 ms on a GPU: time for the host to issue the kernels of a sample."""
_FIGURE_S = 0.06
"""Time that one figure may take."""
_SAMPLE_S = 1e-3
_MAX_CALLS = 64
_MAX_SAMPLES = 15
_LARGEST_ROTATION = 16
_TYPICAL_L2_BYTES = 64 * MIB
"""Larger than the L2 cache of nearly all GPUs (an H200 has 60 MB)."""


class _Timing(NamedTuple):
    """Typical seconds of one call, and the interquartile range over the median."""

    typical_s: float
    spread: float


@dataclass(slots=True)
class Stopwatch:
    """Times calls on a GPU."""

    device: torch.device

    def time(self, call: Callable[[], Any]) -> _Timing:
        """Seconds of one call when many follow each other."""
        for _ in range(2):
            call()
        once_s = self._sample(call, 1)
        calls = max(1, min(_MAX_CALLS, int(_SAMPLE_S / max(once_s, 1e-7))))
        samples = int(_FIGURE_S / max(calls * once_s, 1e-7))
        samples = max(5 if once_s < _FIGURE_S else 3, min(_MAX_SAMPLES, samples))
        times = [self._sample(call, calls) for _ in range(samples)]
        return _timing(times)

    def host_time(self, call: Callable[[], Any], *, samples: int = 7) -> _Timing:
        """Seconds of one call until the device has finished, as the host sees it."""
        call()
        times = []
        for _ in range(samples):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return _timing(times)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def _sample(self, call: Callable[[], Any], calls: int) -> float:
        cuda: Any = torch.cuda  # PyTorch leaves these functions untyped
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize(self.device)
        cuda._sleep(_SLEEP_CYCLES)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) / 1e3 / calls


def _timing(times: Sequence[float]) -> _Timing:
    low, median, high = statistics.quantiles(times, n=4)
    return _Timing(median, (high - low) / median)


DTYPES: dict[str, torch.dtype] = {
    **{word: getattr(torch, name) for word, name in TORCH_DTYPES.items()},
    "int8": torch.int8,
}


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The int8 product that LLM.int8() runs: [m, k] by [n, k], accumulated in int32."""
    import bitsandbytes  # noqa: F401  (registers the operator)

    product: torch.Tensor = torch.ops.bitsandbytes.int8_linear_matmul.default(a, b)
    return product


def time_product(watch: Stopwatch, dtype: str, shape: tuple[int, int, int]) -> _Timing:
    """Time of a product of [m, k] by [k, n]; the operands are rotated so that none stay in L2."""
    m, n, k = shape
    element = DTYPES[dtype].itemsize
    one = (m * k + k * n) * element
    copies = max(1, min(_LARGEST_ROTATION, 2 * _TYPICAL_L2_BYTES // one))
    pairs = [_operands(dtype, shape, watch.device) for _ in range(copies)]
    turn = 0

    def call() -> None:
        nonlocal turn
        a, b = pairs[turn % copies]
        turn += 1
        if dtype == "int8":
            int8_product(a, b)
        else:
            torch.mm(a, b.t())

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        return watch.time(call)
    finally:
        torch.set_float32_matmul_precision(before)


def _operands(
    dtype: str, shape: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    # Weights are stored [out, in]: the second factor is transposed, as in a linear layer.
    if dtype == "int8":
        return tuple(  # type: ignore[return-value]
            torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n)
        )
    # Random values: products of zeros draw less power and run faster.
    a, b = (torch.randn(rows, k, device=device).to(DTYPES[dtype]) for rows in (m, n))
    return a, b


def time_traffic(watch: Stopwatch, kind: str, size_bytes: int) -> tuple[int, _Timing]:
    """Bytes moved and time of a kernel that moves about `size_bytes`.

    `copy` reads one tensor and writes one, `elementwise` reads two and writes one (a residual
    connection), `read` sums one.
    """
    tensors = {"copy": 2, "elementwise": 3, "read": 1}[kind]
    count = max(1, size_bytes // tensors // 2)
    x, y, z = (
        torch.ones(count, dtype=torch.bfloat16, device=watch.device) if n < tensors else None
        for n in range(3)
    )
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: y.copy_(x),  # type: ignore[union-attr, arg-type]
        "elementwise": lambda: torch.add(x, y, out=z),  # type: ignore[arg-type]
        "read": x.sum,  # type: ignore[union-attr]
    }
    return tensors * count * 2, watch.time(calls[kind])


def time_dequantise(watch: Stopwatch, kind: str, rows: int, columns: int) -> tuple[int, _Timing]:
    """Bytes moved and time of unpacking an NF4 weight, or of scaling an int8 product."""
    import bitsandbytes  # noqa: F401  (registers the operators)

    device, operators = watch.device, torch.ops.bitsandbytes
    if kind == "nf4":
        packed = torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8, device=device)
        scales = torch.rand(rows * columns // 64, device=device)
        moved = packed.numel() + 4 * scales.numel() + 2 * rows * columns

        def unpack() -> None:
            operators.dequantize_4bit.default(
                packed, scales, 64, "nf4", [rows, columns], torch.bfloat16
            )

        return moved, watch.time(unpack)
    product = torch.randint(-1000, 1000, (rows, columns), dtype=torch.int32, device=device)
    row_scales, column_scales = (torch.rand(size, device=device) for size in (rows, columns))

    def scale() -> None:
        operators.int8_mm_dequant.default(product, row_scales, column_scales)

    return 6 * rows * columns + 4 * (rows + columns), watch.time(scale)


class AttentionCase(NamedTuple):
    """Causal self-attention of `heads` heads without grouping."""

    kernel: str
    dtype: str
    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def forward_flops(self) -> int:
        """Two products over the lower triangle."""
        return 2 * self.batch * self.heads * self.length**2 * self.head_dim


def time_attention(watch: Stopwatch, case: AttentionCase) -> tuple[_Timing, _Timing]:
    """Times of the forward and of the backward pass. Raises RuntimeError where not supported."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (case.batch, case.heads, case.length, case.head_dim)
    query, key, value = (
        torch.randn(shape, device=watch.device).to(DTYPES[case.dtype]).requires_grad_()
        for _ in range(3)
    )
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}

    def attend() -> torch.Tensor:
        if case.kernel == "eager":
            return _eager(query, key, value)
        with sdpa_kernel(backends[case.kernel]):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )

    with torch.no_grad():
        forward = watch.time(attend)
    out = attend()
    gradient = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    return forward, watch.time(backward)


def _eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as transformers' eager implementation computes it: scores in full."""
    length, head_dim = query.shape[-2:]
    mask = torch.full((length, length), float("-inf"), device=query.device).triu(1)
    scores = query @ key.transpose(-1, -2) * head_dim**-0.5 + mask.to(query.dtype)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def spin_up(watch: Stopwatch) -> None:
    """Keep the device busy, so that its clocks are where they are under load."""
    a = torch.randn(2048, 2048, device=watch.device)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.5:
        torch.mm(a, a)
        watch.synchronize()


def time_shortest_kernel(watch: Stopwatch) -> _Timing:
    """Time of a kernel that does nearly nothing, when many follow each other."""
    x = torch.ones(16, device=watch.device)
    return watch.time(lambda: x.add_(1.0))


def time_launch(watch: Stopwatch) -> _Timing:
    """Host time of one operator issued from Python, autograd included.

    A deep stack of tiny layers is bound by the host: its wall time over the number of operators
    that run in its forward and backward pass.
    """
    width, depth = 16, 24
    layers = torch.nn.Sequential(
        *(
            layer
            for _ in range(depth)
            for layer in (torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.SiLU())
        )
    ).to(watch.device)
    x = torch.ones(4, width, device=watch.device)

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        layers(x).sum().backward()

    step()
    with _OperatorCount() as counter:
        step()
    timing = watch.host_time(step, samples=15)
    return _Timing(timing.typical_s / counter.operators, timing.spread)


class _OperatorCount(TorchDispatchMode):
    """Counts operators that launch a kernel: views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.operators += not launches_nothing(func)
        return func(*args, **(kwargs or {}))
