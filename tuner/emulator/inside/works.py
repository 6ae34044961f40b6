"""Describes calls of PyTorch as work that can be priced: its kind, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tuner.core.gpu import Gpu
from tuner.cost.operators.aten_kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES, Kernels
from tuner.cost.operators.bnb_kernels import bnb_kernels
from tuner.cost.operators.operators import WRAPPING, launches_nothing, tensors_in, work_of
from tuner.cost.operators.timeline import Work
from tuner.cost.speed.roofline import Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.inside.notes import STRIDED, parts_of
from tuner.emulator.rates import EXCHANGE, TRANSFER, pcie_bytes_per_s

COPIES = frozenset({"_to_copy", "copy_", "_copy_from", "_foreach_copy_"})
"""Operators that may copy between host and device."""

_OWN_RULES = ("aten", "prims", "bitsandbytes", "c10d", "_c10d_functional")
"""Namespaces whose operators are priced by rules. What others launch says what they do."""


class Prices:
    """Seconds of works on one GPU type, each priced once."""

    def __init__(self, gpu: Gpu, *, allow_tf32: bool = False) -> None:
        self._gpu, self._times = gpu, Roofline()
        self._allow_tf32 = allow_tf32
        self._known: dict[Work, float] = {}
        self.launch_s = self._times.launch_s

    def seconds(self, work: Work) -> float:
        """On the device; 0 for exchanges between devices, which no kernel waits for."""
        known = self._known.get(work)
        if known is None:
            known = self._known[work] = self._price(work)
        return known

    def total(self, works: Sequence[Work]) -> float:
        """Seconds of works that are done one after another."""
        return sum(map(self.seconds, works))

    def _price(self, work: Work) -> float:
        if work.kind == EXCHANGE:
            return 0.0
        if work.kind == TRANSFER:
            return work.bytes_moved / pcie_bytes_per_s(self._gpu)
        found = self._times.seconds(
            WorkArrays.of_works([work]), self._gpu, allow_tf32=self._allow_tf32
        )
        return float(found[0, 0])


def has_own_rules(func: Any) -> bool:
    """Whether an operator is priced by its arguments, not by what it launches."""
    return func.namespace in _OWN_RULES


class Describer:
    """Turns calls into works, with the rules that a trace goes by."""

    def __init__(self) -> None:
        self._kernels: Kernels | None = None
        self._namespaces = 0

    def works_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[Work, ...]:
        """The works of one call; none of them where it launches nothing."""
        if launches_nothing(func):
            return ()
        if func.namespace in {"c10d", "_c10d_functional"}:
            return () if func._opname in WRAPPING else (_exchange(func, args, kwargs, out),)
        name = func._schema.name.partition("::")[2]
        moved = _transferred(args, kwargs, out) if name in COPIES else None
        if moved is not None:
            return (Work(name, TRANSFER, 0, (moved,), "uint8", None, ()),)
        tensors = list(tensors_in((args, tuple(kwargs.values()), out)))
        if any(tensor.layout is not STRIDED for tensor in tensors):
            return (Work(func._schema.name, "unpriced", 0, (), "uint8", None, ()),)
        kernels = self._rules()
        decomposition = kernels.decompositions.get(func)
        with _disable_current_modes():
            if decomposition is not None:
                return _decomposed(kernels, decomposition, args, kwargs)
            return (work_of(kernels, func, args, kwargs, out),) if tensors else ()

    def _rules(self) -> Kernels:
        """Those for bitsandbytes join when the program has registered its operators."""
        registered = len(dir(torch.ops.bitsandbytes))
        if self._kernels is None or registered != self._namespaces:
            self._namespaces = registered
            bnb = bnb_kernels()
            self._kernels = Kernels(
                {**bnb.decompositions, **ATEN_DECOMPOSITIONS}, {**bnb.leaves, **ATEN_LEAVES}
            )
        return self._kernels


class _Collector(TorchDispatchMode):
    """Notes the works of what runs on tensors without data."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels
        self.works: list[Work] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        decomposition = self._kernels.decompositions.get(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        out = func(*args, **kwargs)
        if not launches_nothing(func):
            self.works.append(work_of(self._kernels, func, args, kwargs, out))
        return out


def _decomposed(
    kernels: Kernels, decomposition: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Work, ...]:
    """The works of an operator that runs as others, found on tensors without data."""
    with _Collector(kernels) as collector, torch.no_grad():
        decomposition(*map(_without_data, args), **{k: _without_data(v) for k, v in kwargs.items()})
    return tuple(collector.works)


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _transferred(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Bytes that pass between host and device; None where all tensors are on one side."""
    on_device: list[torch.Tensor] = []
    on_host: list[torch.Tensor] = []
    for tensor in tensors_in((args, tuple(kwargs.values()), out)):
        (on_device if tensor.is_cuda else on_host).append(tensor)
    return sum(map(_nbytes, on_host)) if on_device and on_host else None


def _nbytes(tensor: torch.Tensor) -> int:
    parts = (tensor,) if tensor.layout is STRIDED else parts_of(tensor)
    return sum(part.nbytes for part in parts)


def _exchange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """A collective: the bytes of its largest tensor, as a trace counts them, and who takes part.

    Its shape begins with the number of ranks, and how far apart they are.
    """
    size = max((t.nbytes for t in tensors_in((args, tuple(kwargs.values())))), default=0)
    size = max([size, *(t.nbytes for t in tensors_in(out))]) if not _is_work(out) else size
    ranks = next(filter(None, map(ranks_of, (*args, *kwargs.values()))), None)
    shape = None
    if ranks is not None:
        shape = (len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, 1, 1)
    return Work(func._schema.name, EXCHANGE, 0, (size,), "uint8", shape, ())


def ranks_of(value: Any) -> tuple[int, ...] | None:
    """The ranks of a process group, which operators get boxed or by its name; None for others."""
    distributed = torch.distributed
    if not isinstance(value, str | torch.ScriptObject) or not distributed.is_initialized():
        return None
    try:
        if isinstance(value, str):
            group = distributed.distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined,arg-type]
        else:
            group = distributed.ProcessGroup.unbox(value)
        return tuple(distributed.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):  # another word, or another object: a reduction
        return None


def _is_work(out: Any) -> bool:
    return not isinstance(out, (torch.Tensor, list, tuple))


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
