"""What tells calls of operators apart, as far as their work goes, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tuner.cost.operators.operators import launches_nothing, tensors_in
from tuner.cost.operators.timeline import Work
from tuner.emulator.inside.works import COPIES, ranks_of

_Tensor = torch.Tensor
_STRIDED = torch.strided
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Function:
    """What of an operator's arguments decides its work, and the prices of its calls by that."""

    func: Any
    is_free: bool
    integers_matter: bool
    sides_matter: bool
    is_dynamic: bool
    prices: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, func: Any) -> Function:
        """Of an operator, from its schema and its tags."""
        if not hasattr(func, "_schema"):  # it takes functions, and does nothing itself
            return cls(func, True, False, False, False)
        name = func._schema.name
        dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        # What works in place takes its sizes from tensors: other numbers are steps and indices.
        in_place = func._schema.is_mutable and "att" not in name and "flash" not in name
        return cls(
            func,
            is_free=launches_nothing(func),
            integers_matter=not in_place,
            sides_matter=name.partition("::")[2] in COPIES,
            is_dynamic=bool(dynamic & set(func.tags)),
        )


def key_of(value: Any, kind: Function) -> Any:
    """What of an argument decides the work. Numbers of a step do not."""
    its = type(value)
    if its in _TENSORS and value.layout is _STRIDED:
        return value.shape, value.stride(), value.dtype
    if its is list or its is tuple:
        return tuple([_key_of_item(item) for item in value])
    if its is int:
        return value if kind.integers_matter else None
    if its is float:
        return None
    if its is torch.ScriptObject:  # boxed anew for each call
        return ranks_of(value)
    return _layout(value) if isinstance(value, _Tensor) else value


def _key_of_item(item: Any) -> Any:
    if isinstance(item, _Tensor):
        return _layout(item)
    if type(item) is list:  # what each rank gathers: lists of lists of tensors
        return tuple([_key_of_item(one) for one in item])
    return None if type(item) is float else item


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not _STRIDED:
        return tensor.shape, tensor.layout, tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype


def any_on_device(values: Iterable[Any]) -> bool:
    """Whether one of these arguments or results is on the device, or in a list that is."""
    for value in values:
        if isinstance(value, _Tensor):
            if value.is_cuda:
                return True
        elif isinstance(value, (list, tuple)) and any_on_device(value):
            return True
    return False


def shapes_of(out: Any) -> Any:
    """The shapes of results, where values decide them."""
    return out.shape if isinstance(out, _Tensor) else tuple([t.shape for t in tensors_in(out)])


def sides_of(value: Any) -> Any:
    """Which tensors are on the device, where an operator may copy between it and the host."""
    if isinstance(value, _Tensor):
        return value.is_cuda
    if value is None:  # operators on lists that write into their arguments
        return None
    return tuple([sides_of(v) for v in value if isinstance(v, (_Tensor, list, tuple))])


def label_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operator with the shapes of its tensors, the first four of them."""
    shapes = [
        "x".join(map(str, tensor.shape)) or "scalar"
        for tensor in tensors_in((args, tuple(kwargs.values())))
    ]
    more = f", and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return f"{func._schema.name}({', '.join(shapes[:4])}{more})"


def label_of_work(work: Work) -> str:
    """The operator, with the sizes of a product."""
    if work.shape is None:
        return work.name
    return f"{work.name}({' x '.join(map(str, work.shape))})"
