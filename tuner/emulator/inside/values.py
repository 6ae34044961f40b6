"""Computes the values that can decide shapes, which emulated kernels don't write.

The real CUDA operator always runs: its outputs and temporaries come from PyTorch's allocator, as on
a device. Then its values are computed on the CPU, on aliases of device memory, and written to its
outputs. Integers and booleans are computed, and so are few floats if their inputs are known. Other
values are made up (see made_up.py) or left alone: large tensors of floats are never computed or
touched.

A compiled graph is a few Triton kernels, which no dispatch mode sees. But its source graph is
known. Before each call, its integers and small float outputs are computed from that graph on the
CPU, node by node as operators are, and written to the outputs after the call.
"""

from __future__ import annotations

import math
import operator as python_operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import arange

from tuner.emulator.inside.faults import guarded, note
from tuner.emulator.inside.lines import Unknowns
from tuner.emulator.inside.made_up import NOISE_LIMIT, MadeUp, Spread
from tuner.emulator.inside.notes import (
    ASSUMED,
    AT_MOST,
    CPU,
    FLOATS,
    LIMITS,
    MADE_UP,
    MEDIUM,
    SMALL,
    alias,
    constant,
    forget_note,
    is_known,
    note_known,
    note_origin,
    note_unknown,
    noted,
    origin_of,
    worst,
)
from tuner.emulator.inside.operators import EMPTY, FINITE, ORDERING, Operator
from tuner.emulator.inside.process import when_imported
from tuner.emulator.inside.readbacks import COUNTED, UNREADABLE, Readbacks, Reading
from tuner.emulator.inside.settling import Handler, Settling, is_wanted
from tuner.emulator.inside.transfers import Transfers

# Booleans and integers that depend on unknown floats are computed up to this many elements.
_FEW = 65_536


def _replace(module: ModuleType, settling: Settling) -> None:
    whole, inner = module.compile_fx, module.compile_fx_inner

    def compile_inner(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        graph = _graph_of(gm, settling)  # before the compiler changes it
        compiled = inner(gm, example_inputs, *args, **kwargs)
        return compiled if graph is None else graph.around(compiled)

    def compile_fx(model_: Any, example_inputs_: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch import config

        if not args:
            kwargs.setdefault("inner_compile", compile_inner)
        # Code from autograd's cache would come without its graph.
        with config.patch(enable_autograd_cache=False):
            return whole(model_, example_inputs_, *args, **kwargs)

    module.compile_fx = compile_fx  # type: ignore[attr-defined]


@guarded("a graph that torch.compile compiles")
def _graph_of(gm: Any, settling: Settling) -> _CompiledGraph:
    return _CompiledGraph(gm, settling)


class Unknown:
    """A placeholder for a tensor whose values are not computed."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def dim(self) -> int:
        """The number of dimensions, as in a tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements, as in a tensor."""
        return math.prod(self.shape)


class _Found(dict[str, Any]):
    """Each node's value on the CPU, or an `Unknown`; and the origin of the value (notes.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str | None] = {}


class _CompiledGraph:
    """The part of a compiled graph that computes its integers and small float outputs."""

    def __init__(self, gm: Any, settling: Settling) -> None:
        self._settling = settling
        self._inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._constants = {
            node.name: getattr(gm, node.target)
            for node in gm.graph.nodes
            if node.op == "get_attr" and isinstance(getattr(gm, node.target, None), torch.Tensor)
        }
        graph = torch.fx.Graph()
        copies: dict[Any, Any] = {}
        outputs = graph.graph_copy(gm.graph, copies)
        names = {copy.name: index for index, copy in enumerate(copies[n] for n in self._inputs)}
        self._input_index = names
        self._outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        self._wanted = [
            (index, node)
            for index, node in enumerate(self._outputs)
            if isinstance(node, torch.fx.Node) and _is_wanted(node.meta.get("val"))
        ]
        self._written = [
            node
            for node in graph.nodes
            if node.target is torch.ops.aten.copy_.default
            and node.args[0].op == "placeholder"
            and _is_wanted(node.args[0].meta.get("val"))
        ]
        needed = _ancestors([node for _, node in self._wanted] + self._written)
        # Symbolic sizes are read from the inputs, so all inputs are kept.
        self._nodes = [n for n in graph.nodes if n in needed and n.op != "placeholder"]
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]

    def around(self, compiled: Any) -> Any:
        """`compiled`, with values in its outputs if any are wanted."""
        return _WithValues(compiled, self) if self._wanted or self._written else compiled

    def values(self, inputs: list[Any]) -> _Found:
        """The values of all nodes."""
        found = _Found()
        symbols: dict[Any, int] = {}
        for node, value in zip(self._placeholders, inputs, strict=False):
            found[node.name] = _read(value)
            is_on_device = isinstance(value, torch.Tensor) and value.is_cuda
            found.origins[node.name] = origin_of(value) if is_on_device else None
            _read_symbols(node.meta.get("val"), value, symbols)
        for node in self._nodes:
            origin: str | None = None
            for one in node.all_input_nodes:
                origin = worst(origin, found.origins.get(one.name))
            found.origins[node.name] = origin
            found[node.name] = self._evaluate(node, found, symbols)
        return found

    def write(self, found: _Found, outputs: Any, inputs: dict[str, Any]) -> None:
        """Writes the values of the outputs, and of inputs that the graph writes into."""
        for index, node in self._wanted:
            self._write(outputs[index], found.get(node.name), found.origins.get(node.name))
        for node in self._written:
            target = inputs[node.args[0].name]
            self._write(target, found.get(node.name), found.origins.get(node.name))

    def kept_inputs(self, inputs: list[Any]) -> dict[str, Any]:
        """The inputs that the graph writes into; the call empties the list of inputs."""
        return {n.args[0].name: inputs[self._input_index[n.args[0].name]] for n in self._written}

    def _write(self, target: Any, value: Any, origin: str | None) -> None:
        if not isinstance(target, torch.Tensor) or not target.is_cuda:
            return
        forget_note(target)
        if isinstance(value, torch.Tensor) and value.shape == target.shape:
            alias(target).copy_(value)
            if target.dtype in FLOATS and target.numel() > SMALL:
                note_known(target)
            note_origin(target, origin)
        elif target.dtype in FLOATS:
            self._settling.made_up.write_finite(target)
        elif target.dtype in LIMITS:
            note_unknown(target)

    def _evaluate(self, node: Any, found: _Found, symbols: dict[Any, int]) -> Any:
        if node.op == "get_attr":
            constant = self._constants.get(node.name)
            return _read(constant) if constant is not None else None
        nothing = _nothing(node.meta.get("val"), symbols)
        if isinstance(nothing, Unknown):
            most = MEDIUM if nothing.dtype in FLOATS else LIMITS.get(nothing.dtype, 0)
            if nothing.numel() > most:
                return nothing
        unknown: list[Unknown] = []

        def value_of(one: Any) -> Any:
            value = found.get(one.name, _nothing(one.meta.get("val"), symbols))
            if isinstance(value, Unknown):
                unknown.append(value)
            return value

        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), value_of)
        if node.target is torch.ops.aten.copy_.default:
            return args[1]
        if node.target is python_operator.getitem:
            return args[0][args[1]] if isinstance(args[0], tuple | list) else nothing
        if unknown:
            guess, origin = self._guess(node, args, kwargs, nothing, unknown)
            found.origins[node.name] = origin
            return guess
        return self._compute(node, args, kwargs, nothing)

    def _compute(self, node: Any, args: Any, kwargs: dict[str, Any], nothing: Any) -> Any:
        kwargs = {
            name: CPU if isinstance(value, torch.device) else value
            for name, value in kwargs.items()
            if name != "pin_memory"
        }
        try:
            return node.target(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever an operator raises: it is noted
            self._settling.failures[f"compiled {node.target}"] = f"{type(error).__name__}: {error}"
            return nothing

    def _guess(
        self, node: Any, args: Any, kwargs: dict[str, Any], nothing: Any, unknown: list[Unknown]
    ) -> tuple[Any, str]:
        """A value from partly unknown inputs, as in `Settling`, and its origin."""
        floats = all(one.dtype in FLOATS for one in unknown)
        target = node.target
        name = target.name() if isinstance(target, torch._ops.OpOverload) else ""  # type: ignore[no-untyped-call]
        plain = name.partition(".")[0]
        spread = self._settling.spreads.get(name)
        if floats and spread is not None:
            return _spread_out(spread, args, kwargs, nothing), ASSUMED
        if not floats or not isinstance(nothing, Unknown):
            return nothing, MADE_UP
        if nothing.dtype in FLOATS:
            return self._few(nothing), MADE_UP
        if plain in ORDERING:
            return torch.ones(nothing.shape, dtype=torch.bool), AT_MOST
        if nothing.numel() > _FEW or any(one.numel() > NOISE_LIMIT for one in unknown):
            return nothing, MADE_UP
        order = list(dict.fromkeys(id(one) for one in unknown))

        def stand_in(value: Any) -> Any:
            if isinstance(value, Unknown):
                return self._settling.made_up.noise(
                    torch.empty(value.shape), order.index(id(value))
                )
            if isinstance(value, tuple | list):
                return type(value)([stand_in(one) for one in value])
            return value

        origin = ASSUMED if plain in FINITE else MADE_UP
        return self._compute(node, stand_in(tuple(args)), kwargs, nothing), origin

    def _few(self, nothing: Unknown) -> Any:
        """Made-up floats if they are few; more floats stay unknown."""
        if nothing.numel() > SMALL:
            return nothing
        made = torch.empty(nothing.shape, dtype=nothing.dtype)
        self._settling.made_up.write_finite(made)
        return made


class _WithValues:
    """A compiled graph that is called with a list of inputs, which it empties."""

    def __init__(self, compiled: Callable[..., Any], graph: _CompiledGraph) -> None:
        self._compiled, self._graph = compiled, graph
        self._boxed_call = True  # of the object: PyTorch copies its attributes to a wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, inputs: Any) -> Any:
        """The outputs of the compiled graph, with values."""
        before = self._before(inputs)
        outputs = self._compiled(inputs)
        if before is not None:
            self._after(*before, outputs)
        return outputs

    @guarded("the values of a compiled graph")
    def _before(self, inputs: Any) -> tuple[_Found, dict[str, Any]]:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            return self._graph.values(list(inputs)), self._graph.kept_inputs(inputs)

    @guarded("the values of a compiled graph")
    def _after(self, found: _Found, kept: dict[str, Any], outputs: Any) -> None:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._graph.write(found, outputs, kept)


def _read(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if is_known(value):
        return alias(value)
    note = noted(value)
    one = None if note is None else constant(value, note)
    return Unknown(tuple(value.shape), value.dtype) if one is None else one.expand(value.shape)


def _spread_out(spread: Spread, args: Any, kwargs: dict[str, Any], nothing: Any) -> Any:
    """Outputs of top-k and the like, with indices that go round all candidates."""
    parts = nothing if isinstance(nothing, tuple) else (nothing,)
    out = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in parts)
    spread(args, kwargs, out if isinstance(nothing, tuple) else out[0])
    made = tuple(
        part if part.dtype in FLOATS and part.numel() > SMALL else one
        for part, one in zip(parts, out, strict=True)
    )
    return made if isinstance(nothing, tuple) else made[0]


def _read_symbols(val: Any, value: Any, symbols: dict[Any, int]) -> None:
    """Read the values of the symbols in a graph's sizes for this call into `symbols`."""
    if isinstance(val, torch.SymInt):
        symbols[val.node.expr] = int(value)
    elif isinstance(val, torch.Tensor):
        for size, real in zip(val.shape, value.shape, strict=False):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = int(real)


def _nothing(val: Any, symbols: dict[Any, int]) -> Any:
    """An `Unknown` of the shape that tracing found."""
    if isinstance(val, tuple | list):
        return tuple(_nothing(one, symbols) for one in val)
    if not isinstance(val, torch.Tensor):
        return None

    def number(size: Any) -> int:
        return int(size.node.expr.xreplace(symbols)) if isinstance(size, torch.SymInt) else size

    return Unknown(tuple(number(size) for size in val.shape), val.dtype)


def _hint(val: torch.Tensor) -> int:
    """The number of elements, with the sizes at tracing."""
    return math.prod(
        (size.node.hint or 0) if isinstance(size, torch.SymInt) else size for size in val.shape
    )


def _is_wanted(val: Any) -> bool:
    if not isinstance(val, torch.Tensor) or val.device.type != "cuda":
        return False
    if val.dtype in FLOATS:
        return _hint(val) <= SMALL
    return val.dtype in LIMITS and _hint(val) <= LIMITS[val.dtype]


def _ancestors(nodes: list[Any]) -> set[Any]:
    """These nodes and the nodes they depend on, up to floats that are never computed."""
    needed: set[Any] = set()
    open_nodes = list(nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node in needed:
            continue
        needed.add(node)
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype in FLOATS and _hint(val) > MEDIUM:
            continue
        open_nodes += node.all_input_nodes
    return needed


__all__ = ["Handler", "Values"]


class Values:
    """Chooses the handler for each operator's values, once per operator."""

    def __init__(self, seed: int = 0) -> None:
        made_up = MadeUp(seed)
        self._settling = Settling(made_up)
        self._readbacks = Readbacks(made_up)
        self.transfers = transfers = Transfers(self._settling)
        self._special: dict[str, Callable[[Operator], Handler]] = {
            "aten::_to_copy": transfers.to_copy,
            "aten::copy_": transfers.copy,
            "aten::_local_scalar_dense": transfers.number,
            "aten::equal": self._compared,
            "aten::allclose": self._compared,
            "aten::histc": self._histogram,
            "torchvision::nms": self._suppressed,
        }

    def install(self) -> None:
        """Give values to the outputs of compiled graphs as well."""
        when_imported("torch._inductor.compile_fx", lambda module: _replace(module, self._settling))

    @property
    def unknowns(self) -> Unknowns:
        """The values that could not be computed and may matter for shapes."""
        return self._settling.unknowns

    @property
    def failures(self) -> dict[str, str]:
        """The reason why the CPU could not compute an operator, by operator; for debugging."""
        return self._settling.failures

    def handler(self, func: Any) -> Handler | None:
        """The function to call, with (func, args, kwargs), in place of `func`, or None."""
        if not isinstance(func, torch._ops.OpOverload):
            return _call  # takes functions, whose operators come back one by one
        operator = Operator(func)
        return None if operator.passes else self._handler(operator)

    def _handler(self, operator: Operator) -> Handler:
        settling = self._settling
        if operator.full_name in self._special:
            handler = self._special[operator.full_name](operator)
        elif operator.is_foreach:
            handler = settling.foreach(operator)
        elif operator.name in EMPTY:
            handler = settling.empty
        elif operator.leaves:
            handler = settling.left
        elif operator.is_constant and not operator.mutates:
            handler = settling.constant
        elif operator.full_name in COUNTED:
            handler = self._counted(operator)
        elif operator.mutates:
            handler = settling.written(operator)
        else:
            handler = settling.returned(operator)
        return handler

    def _counted(self, operator: Operator) -> Handler:
        """The handler of operators that read the size of their output from the device."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args[0].is_cuda:
                return func(*args, **kwargs)
            fault = None
            try:
                counts, origin = self._readbacks.counted(operator, args, kwargs)
            except Exception as error:  # noqa: BLE001 - a read of arbitrary memory would be worse
                counts, origin, fault = list(UNREADABLE), MADE_UP, error
            if origin is not None:
                self.unknowns.decided(operator.name, origin)
            try:
                out = self._readbacks.call(func, args, kwargs, counts)
                if fault is not None:
                    note(fault, f"what {operator.full_name} reads back")
            finally:
                del fault
            if operator.mutates:
                if is_wanted(out):
                    self._settling.settle_written(operator, args, kwargs)
                return out
            return self._settling.settle(operator, args, kwargs, out)

        return call

    def _compared(self, operator: Operator) -> Handler:
        """The handler of operators that return a Python boolean."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            one, other = args[:2]
            if not one.is_cuda or one.shape != other.shape:
                return func(*args, **kwargs)
            same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
            reading = Reading(None)
            values = reading.tensor(one), reading.tensor(other)
            if not reading.unknown:
                same = operator.func(*values, *args[2:], **kwargs)
            elif not same:
                self.unknowns.floats_read += 1
            self._readbacks.call(func, args, kwargs, [(int(same), 1)])
            return same

        return call

    def _histogram(self, operator: Operator) -> Handler:
        """The handler of `histc`: the CPU has no histogram of integers, so it counts floats."""
        returned = self._settling.returned(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if not source.is_cuda or source.dtype in FLOATS or not is_known(source):
                return returned(func, args, kwargs)
            out = func(*args, **kwargs)
            counts = operator.func(alias(source).double(), *args[1:], **kwargs)
            alias(out).copy_(counts)
            return out

        return call

    def _suppressed(self, operator: Operator) -> Handler:
        """The handler of non-maximum suppression, which keeps all boxes if they are unknown."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            boxes, scores, threshold = args
            if not boxes.is_cuda or not len(boxes):
                return func(*args, **kwargs)
            reading = Reading(None)
            values = reading.tensor(boxes), reading.tensor(scores)
            origin = AT_MOST if reading.unknown else reading.origin and AT_MOST
            if origin is None:
                kept = func(*(one.float() for one in values), threshold)
            else:
                kept = arange(len(boxes))
                self.unknowns.decided(operator.name, origin)
            out = self._readbacks.call(func, args, kwargs, [(len(kept), 4)])
            alias(out).copy_(kept)
            note_origin(out, origin)
            return out

        return call


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
