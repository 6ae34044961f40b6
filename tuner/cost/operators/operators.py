"""An operator in a trace: its work, its results' layouts, and the key that identifies it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import flop_registry

from tuner.cost.operators.kernels import Kernels, attention_by_name
from tuner.cost.operators.timeline import MASK, Work

_aten = torch.ops.aten

_FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "_int_mm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm_": (1, 2),
    "_addmm_activation": (1, 2),
}
"""Matrix products, with the positions of their two factors."""

_MATMULS = {
    getattr(packet, overload): factors
    for packet, factors in ((getattr(_aten, name), places) for name, places in _FACTORS.items())
    for overload in packet.overloads()
}
"""These operators with every overload: compiled code writes into existing buffers ("out")."""


NO_KERNEL = frozenset({"detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided"})
"""Operators that launch no kernel although they are not views by their schema."""

_ASKS_OR_MAKES = frozenset({
    "new_empty", "new_empty_strided", "empty_permuted", "empty_quantized",
    "_empty_affine_quantized", "lift", "set_", "resize_", "_resize_output_", "_unsafe_view",
    "_reshape_alias", "record_stream", "is_pinned", "_pin_memory", "pin_memory", "is_same_size",
    "_has_compatible_shallow_copy_type", "_fused_sdp_choice", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "device", "_version", "size", "stride", "numel", "is_contiguous", "dim",
})  # fmt: skip
"""Operators of a real device that ask something of a tensor, or make one without filling it."""


WRAPPING = ("wait_tensor", "_wrap_tensor_autograd")
"""Functional collectives that give back the tensor that they get. Without data PyTorch has made a
new one of some (`torch/distributed/_functional_collectives.py`, 2.13)."""


def launches_nothing(func: Any) -> bool:
    """True of an operator that only makes, describes or shares memory."""
    name = func._schema.name.partition("::")[2]
    return bool(func.is_view or name in NO_KERNEL or name in _ASKS_OR_MAKES)


def work_of(
    kernels: Kernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Work:
    """The work of an operator with these arguments and results, and the bytes that it moves."""
    name = func._schema.name.partition("::")[2]
    inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
    outputs = list(tensors_in(out))
    dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
    moved = tuple(map(touched_bytes, [*inputs, *outputs]))
    if func in _MATMULS:
        left, right = (args[position].shape for position in _MATMULS[func])
        shape = (left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1])
        if 0 in shape:  # of no rows: zeros are written where a result has any size
            return Work(name, "elementwise", 0, moved, dtype, None, ())
        return Work(name, "matmul", 2 * math.prod(shape), moved, dtype, shape, ())
    rule = kernels.leaves.get(func)
    leaf = attention_by_name(func, args, kwargs) if rule is None else rule(func, args, out)
    if leaf is not None:
        return Work(
            f"{name}{MASK}" if leaf.has_mask else name,
            leaf.kind,
            leaf.flops,
            moved,
            leaf.dtype or dtype,
            leaf.shape,
            leaf.workspace_bytes,
        )
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        flops = int(formula(*args, **kwargs, out_val=out))
        return Work(name, "matmul", flops, moved, dtype, None, ())
    return Work(name, "elementwise", 0, moved, dtype, None, ())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an operator's arguments or results (which nest one or two deep)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)) or value is None:
        return
    elif hasattr(value, "__iter__"):
        for item in value:
            yield from tensors_in(item)


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A key that determines the layout of the results, or None when there is none."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, list):
            if any(isinstance(item, torch.Tensor) for item in value):
                return None
            parts.append(tuple(value))
        elif isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return None
        else:
            parts.append((type(value), value))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def makes_new_tensors(func: Any) -> bool:
    """True if the schema makes every result a new tensor."""
    schema = func._schema
    return not schema.is_mutable and all(r.alias_info is None for r in schema.returns)


def returns_first_argument(func: Any) -> bool:
    """True of an operator that works in place and returns its first argument."""
    # An in-place operator on tensors without data has nothing to do.
    schema = func._schema
    return bool(schema.name.endswith("_") and schema.is_mutable and len(schema.returns) == 1)


def layouts_of(out: Any) -> tuple[Any, ...] | None:
    """Shape, stride and dtype of each result without data; None where one is something else."""
    results = out if isinstance(out, tuple) else (out,)
    layouts: list[Any] = []
    for result in results:
        if result is None:
            layouts.append(None)
        elif isinstance(result, torch.Tensor) and result.is_meta:
            layouts.append((tuple(result.shape), result.stride(), result.dtype))
        else:
            return None
    return tuple(layouts)


def from_layouts(layouts: tuple[Any, ...], *, is_tuple: bool) -> Any:
    """Results without data of these layouts; the only one of them unless `is_tuple`."""
    results = tuple(
        None
        if layout is None
        else torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")
        for layout in layouts
    )
    return results if is_tuple else results[0]


def touches_gpu(args: tuple[Any, ...], out: Any) -> bool:
    """True if an argument or a result is on the traced device: without data."""
    return any(tensor.is_meta for tensor in tensors_in((args, out)))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes."""
    # An expanded dimension (stride 0) is read once, whatever its logical size.
    sizes = [
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0
    ]
    return math.prod(sizes) * tensor.element_size()


def following_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Any:
    """A patch, for `start` and `stop`, that calls `resized` with each storage of another size.

    FSDP2 frees gathered weights that autograd still refers to by taking their storage away
    (`storage.resize_(0)`), and gives it back before the backward pass.
    """
    resize = torch.UntypedStorage.resize_

    def followed(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    return mock.patch.object(torch.UntypedStorage, "resize_", followed)
