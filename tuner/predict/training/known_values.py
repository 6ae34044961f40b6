"""Values of small tensors that have no data: what a model's code asks of its own inputs.

A trace runs on tensors without data. Models of images ask for values all the same: where the
tokens of an image stand, how many patches it has. They follow from the inputs, which are known,
by a few operators on small whole numbers. `KnownValues` executes these operators on the processor
too, and answers from there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten

_MOST = 1 << 24
"""Elements of a tensor up to which its values are kept: tokens, masks, coordinates, pixels."""
_UNKNOWN = ("rand", "bernoulli", "dropout", "multinomial", "normal")
"""Parts of the names of operators that draw random results."""


def declare(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """Say of a tensor, where values are known, that it holds this number only; returns it."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, KnownValues) and tensor.is_meta and _is_small(tensor):
            mode.keep(tensor, torch.tensor(number, dtype=tensor.dtype).expand(tensor.shape))
    return tensor


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """Inside, values are known: by the mode that is there already, or by one of its own."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, KnownValues) for mode in modes):
        yield
        return
    with KnownValues():
        yield


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that knows the values of small tensors on the meta device.

    Those that come from the processor are known, and those that follow from known ones alone.
    What is not known stays so, and goes on to the modes below.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakIdKeyDictionary()
        self._spoilt: set[int] = set()
        """Storages into which something unknown was written."""
        self._makers: list[_MadeOnHost] = []

    def __enter__(self) -> KnownValues:
        self._makers.append(_MadeOnHost())
        self._makers[-1].__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._makers.pop().__exit__(*exception)  # type: ignore[no-untyped-call]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, on the processor; None where they are not known."""
        if not tensor.is_meta:
            return tensor
        found: torch.Tensor | None = self._values.get(tensor)
        if found is None or found.untyped_storage()._cdata in self._spoilt:
            return None
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = _BY_VALUE.get(func)
        if rule is not None:
            answer = rule(self, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        before = [self.of(t) for t in _tensors((args, kwargs))]
        out = func(*args, **kwargs)
        results = [t for t in _tensors(out) if t.is_meta]
        if not results:
            return out
        is_unknown = any(word in func._schema.name for word in _UNKNOWN)
        if any(value is None for value in before) or is_unknown:
            self._spoil(func, args)
        elif func.is_view or all(map(_is_small, results)):
            self._learn(func, args, kwargs, out)
        else:
            self._spoil(func, args)
        return out

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Execute it on the values, and keep what comes of it."""
        known_args, known_kwargs = self.on_host(args), self.on_host(kwargs)
        if "device" in known_kwargs:
            known_kwargs["device"] = torch.device("cpu")
        values = func(*known_args, **known_kwargs)
        if "empty" in func._schema.name:  # uninitialised memory; the same in every run
            values.zero_()
        for result, value in zip(_tensors(out), _tensors(values), strict=True):
            self.keep(result, value)

    def keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Remember the values of a tensor."""
        if tensor.is_meta:
            self._values[tensor] = values

    def on_host(self, value: Any) -> Any:
        """Arguments with their values in place of tensors without data."""
        return tree_map_only(torch.Tensor, self.of, value)

    def made(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor without data that has these values."""
        result = torch.empty(values.shape, dtype=values.dtype, device="meta")
        if _is_small(result):
            self.keep(result, values)
        return result

    def _spoil(self, func: Any, args: tuple[Any, ...]) -> None:
        """Forget the values that an operator writes into."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors(value):
                found = self._values.get(tensor) if tensor.is_meta else None
                if found is not None:
                    self._spoilt.add(found.untyped_storage()._cdata)


class _MadeOnHost(TorchFunctionMode):
    """Function mode that makes tensors of numbers on the host first, where they are known."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is not torch.tensor or device is None or torch.device(device).type != "meta":
            return func(*args, **kwargs)
        numbers = tree_map_only(torch.Tensor, torch.Tensor.item, args[0])
        return func(numbers, *args[1:], **{**kwargs, "device": "cpu"}).to(device)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _MOST


# -- operators whose results depend on values ------------------------------------------------

_Rule = Callable[[KnownValues, Any, tuple[Any, ...], dict[str, Any]], Any]


def _number(known: KnownValues, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    values = known.of(args[0]) if args[0].is_meta else None
    return NotImplemented if values is None else values.item()


def _to_host(known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if not args[0].is_meta or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    values = known.of(args[0])
    return NotImplemented if values is None else func(values, *args[1:], **kwargs).clone()


def _copied(known: KnownValues, _func: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    """Into a tensor of the host, from one without data."""
    target, source = args[:2]
    values = known.of(source)
    if target.is_meta or not source.is_meta or values is None:
        return NotImplemented
    return target.copy_(values)


def _by_values(known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Results with their real shapes, if every argument is known."""
    if any(known.of(t) is None for t in _tensors((args, kwargs))):
        return NotImplemented
    if not any(t.is_meta for t in _tensors((args, kwargs))):
        return NotImplemented
    return tree_map_only(
        torch.Tensor, known.made, func(*known.on_host(args), **known.on_host(kwargs))
    )


def _selected(known: KnownValues, _func: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    """`masked_select`, by what its mask has of ones."""
    mask = known.of(args[1]) if args[0].is_meta else None
    if mask is None:
        return NotImplemented
    shape = torch.broadcast_shapes(args[0].shape, mask.shape)  # type: ignore[no-untyped-call]
    return args[0].new_empty(int(mask.sum()) * (math.prod(shape) // max(1, mask.numel())))


def _scattered_back(known: KnownValues, _func: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    """The gradient of what `masked_scatter` reads: as many as there are ones, in their shape."""
    gradient, _mask, sizes = args
    return gradient.new_empty(sizes) if gradient.is_meta else NotImplemented


def _indexed(known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Indexing by masks, which ATen turns into indices (`expandTensors`)."""
    indices = args[1]
    masks = [i for i in indices if i is not None and i.is_meta and i.dtype is torch.bool]
    if not args[0].is_meta or not masks or any(known.of(mask) is None for mask in masks):
        return NotImplemented
    plain: list[Any] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            plain.append(index)
            continue
        values = known.of(index)
        assert values is not None
        places = known.made(values.nonzero())
        with known:
            plain += [places.select(1, axis) for axis in range(values.dim())]
    with known:
        return func(args[0], plain, *args[2:], **kwargs)


def _equal(known: KnownValues, func: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    values = [known.of(t) for t in args]
    return NotImplemented if any(v is None for v in values) else func(*values)


_BY_VALUE: Mapping[Any, _Rule] = {
    _aten._local_scalar_dense.default: _number,
    _aten._to_copy.default: _to_host,
    _aten.copy_.default: _copied,
    _aten.nonzero.default: _by_values,
    _aten.repeat_interleave.Tensor: _by_values,
    _aten._unique2.default: _by_values,
    _aten.unique_consecutive.default: _by_values,
    _aten.unique_dim.default: _by_values,
    _aten.bincount.default: _by_values,
    _aten.equal.default: _equal,
    _aten.masked_select.default: _selected,
    _aten.masked_scatter_backward.default: _scattered_back,
    _aten.index.Tensor: _indexed,
    _aten.index_put.default: _indexed,
    _aten.index_put_.default: _indexed,
    _aten._index_put_impl_.default: _indexed,
}
