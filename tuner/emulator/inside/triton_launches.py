"""Prices kernels that run outside PyTorch's operators: Triton's, compiled ones, and CUDA graphs.

Triton 3.2 to 3.7 calls `CompiledKernel.launch_metadata` with all arguments before each launch.
Compiled code (inductor) has its own launchers, behind `CachingAutotuner.run`. Both compare variants
of a kernel by timing them: on the emulated device each variant is timed by the virtual clock with a
few launches, so that equal variants tie and the first one is taken.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from tuner.cost.operators.timeline import Work
from tuner.emulator.inside.pricing import Described, Pricer
from tuner.emulator.inside.process import replaces, when_imported
from tuner.emulator.rates import gpu_from_dict

_FEW = {
    "warmup": 0,
    "rep": 0,
    "estimation_iters": 1,
    "memory_warmup_iters": 1,
    "benchmark_iters": 1,
}
"""Arguments for functions that time kernels, instead of their defaults of 25 to 100."""


def watch(pricer: Pricer, mode: Any) -> None:
    """Have these kernels priced from now on, or once their package is imported."""
    inside = _Inside(pricer, mode)
    when_imported("triton.compiler.compiler", inside.watch_triton)
    when_imported("triton.testing", inside.watch_timing("do_bench", "do_bench_cudagraph"))
    when_imported("torch._inductor.runtime.triton_heuristics", inside.watch_compiled)
    when_imported("torch._inductor.runtime.benchmarking", inside.watch_benchmarkers)
    when_imported("torch.utils.checkpoint", functools.partial(_watch_checkpoints, pricer))
    when_imported("torch.cuda.graphs", functools.partial(_watch_graphs, pricer))


class _Inside:
    """Wraps the functions that launch Triton's kernels, and those that time them."""

    def __init__(self, pricer: Pricer, mode: Any) -> None:
        self._pricer, self._mode = pricer, mode
        self._compiled_runs = False
        self._timed: Callable[[], Described] | None = None
        """Describes the kernel that is being timed."""

    def watch_triton(self, module: ModuleType) -> None:
        """Price each launch of a kernel that is written in Triton."""

        @replaces(module.CompiledKernel, "launch_metadata")
        def launch_metadata(launch: Any, kernel: Any, grid: Any, stream: Any, *args: Any) -> Any:
            if not self._compiled_runs:
                tensors = list(_tensors(args))
                multiplies = "tt.dot" in str(kernel.asm.get("ttir", ""))
                self._pricer.launched(
                    ("triton", kernel.name, kernel.hash, _layouts(tensors)),
                    lambda: describe_kernel(kernel.name, tensors, multiplies=multiplies),
                )
                self._tell(tensors)
            return launch(kernel, grid, stream, *args)

    def _tell(self, tensors: list[torch.Tensor]) -> None:
        if self._mode.updates is not None:
            self._mode.updates.launched(tensors)

    def watch_compiled(self, module: ModuleType) -> None:
        """Price each launch of a kernel that inductor generated."""

        @replaces(module.CachingAutotuner, "run")
        def run_and_price(run: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._compiled_runs = self._compiled_runs, True
            try:
                result = run(kernel, *args, **kwargs)
            finally:
                self._compiled_runs = before
            tensors = list(_tensors(args))
            self._pricer.launched(
                ("compiled", id(kernel), _layouts(tensors)),
                lambda: _describe_compiled(kernel, tensors),
                done=True,
            )
            self._tell(tensors)
            return result

        @replaces(module.CachingAutotuner, "bench")
        def bench_briefly(bench: Any, kernel: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors(args))
            before, self._timed = self._timed, lambda: _describe_compiled(kernel, tensors)
            try:
                with self._pricer.discarding():
                    return bench(kernel, launcher, *args, **kwargs)
            finally:
                self._timed = before

    def watch_benchmarkers(self, module: ModuleType) -> None:
        """Shorten the timing by which inductor compares kernels."""
        for name in ("TritonBenchmarker", "InductorBenchmarker"):
            owner = getattr(module, name, None)
            if owner is not None and "benchmark_gpu" in vars(owner):
                owner.benchmark_gpu = self._briefly(owner.benchmark_gpu, function_at=1)

    def watch_timing(self, *names: str) -> Callable[[ModuleType], None]:
        """A callback that shortens the timing in functions of a module."""

        def then(module: ModuleType) -> None:
            for name in names:
                setattr(module, name, self._briefly(getattr(module, name), function_at=0))

        return then

    def _briefly(self, original: Callable[..., Any], *, function_at: int) -> Callable[..., Any]:
        """`original` with few repetitions; it times its argument number `function_at`."""
        signature = inspect.signature(original)
        few = {name: value for name, value in _FEW.items() if name in signature.parameters}

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            function, described = args[function_at], self._timed

            def run() -> Any:
                result = function()
                self._pricer.time(None if described is None else described().works)
                return result

            bound = signature.bind(*args[:function_at], run, *args[function_at + 1 :], **kwargs)
            bound.arguments.update(few)
            with self._pricer.discarding():
                return original(*bound.args, **bound.kwargs)

        return timed


def _watch_checkpoints(pricer: Pricer, module: ModuleType) -> None:
    """Tell repeated forwards of `torch.utils.checkpoint` from the backward pass around them."""
    hook: Any = module._recomputation_hook

    @replaces(hook, "__enter__")
    def entered(enter: Any, self: Any) -> Any:
        self._tuner_before = pricer.recomputing
        pricer.recomputing = True
        return enter(self)

    @replaces(hook, "__exit__")
    def left(leave: Any, self: Any, *exception: Any) -> Any:
        pricer.recomputing = self._tuner_before
        return leave(self, *exception)

    _watch_reentrant(pricer, module.CheckpointFunction)


def _watch_reentrant(pricer: Pricer, function: Any) -> None:
    backward = function.backward

    def backward_and_tell(ctx: Any, *args: Any) -> Any:
        run = ctx.run_function

        def run_again(*inputs: Any) -> Any:
            before, pricer.recomputing = pricer.recomputing, True
            try:
                return run(*inputs)
            finally:
                pricer.recomputing = before

        ctx.run_function = run_again
        try:
            return backward(ctx, *args)
        finally:
            ctx.run_function = run

    function.backward = staticmethod(backward_and_tell)


def _watch_graphs(pricer: Pricer, module: ModuleType) -> None:
    """Count the calls that a CUDA graph recorded whenever it is launched."""
    graph: Any = module.CUDAGraph

    @replaces(graph, "capture_begin")
    def capture_begin(begin: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(*args, **kwargs)
        pricer.capture()
        return result

    @replaces(graph, "capture_end")
    def capture_end(end: Any, self: Any) -> Any:
        self._tuner_recorded = pricer.captured()
        return end(self)

    @replaces(graph, "replay")
    def replay_and_count(replay: Any, self: Any) -> Any:
        result = replay(self)
        pricer.replayed(getattr(self, "_tuner_recorded", None) or {})
        return result


def describe_kernel(
    name: str, tensors: list[torch.Tensor], *, multiplies: bool, flops: float | None = None
) -> Described:
    """Describe a kernel by its tensor arguments, each read or written once.

    A kernel that `multiplies` matrices without known `flops` is taken for the product of its three
    largest tensors: m k, k n and m n, so that the root of their product is m k n.
    """
    sizes = [
        t.element_size() * math.prod(s for s, each in zip(t.shape, t.stride(), strict=True) if each)
        for t in tensors
    ]
    if flops is None and multiplies:
        largest = sorted((tensor.numel() for tensor in tensors), reverse=True)[:3]
        flops = 2 * math.sqrt(math.prod(largest)) if len(largest) == 3 else 0
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = str(max(floats, key=torch.Tensor.numel).dtype) if floats else "torch.uint8"
    kind = "matmul" if multiplies else "elementwise"
    work = Work(name, kind, int(flops or 0), tuple(sizes), dtype.removeprefix("torch."), None, ())
    shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors[:4])
    return Described(f"{name}({shapes})", "product" if multiplies else "triton", (work,), 1)


def _describe_compiled(kernel: Any, tensors: list[torch.Tensor]) -> Described:
    meta = kernel.inductor_meta
    name = str(meta.get("kernel_name") or kernel.fn.__name__)
    multiplies = "tl.dot" in str(getattr(kernel.fn, "src", ""))
    return describe_kernel(name, tensors, multiplies=multiplies, flops=meta.get("kernel_flop"))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors on the device among a kernel's arguments, descriptors of tensors included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(getattr(value, "base", None), torch.Tensor):
            yield value.base


def _layouts(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


def price_operators(mode: Any, rates: Mapping[str, Any]) -> Any | None:
    """Have all operators and kernels priced from now on, at the rates of a GPU (`gpu_to_dict`).

    `mode` passes operators to its `observer`, and calls `before` before each. Returns None in an
    environment without numpy, which the rooflines need: then only memory is emulated.
    """
    if find_spec("numpy") is None:
        return None
    from tuner.emulator.inside.core import DeviceCore
    from tuner.emulator.inside.pricing import Pricer

    pricer = Pricer(gpu_from_dict(rates), DeviceCore(), mode.repeats)
    mode.observer, mode.before = pricer.note, pricer.before
    watch(pricer, mode)
    return pricer
