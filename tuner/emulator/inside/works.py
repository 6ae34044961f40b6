"""Describes PyTorch calls as works that can be priced, with kind, FLOPs and bytes."""

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
from tuner.cost.speed.host import launches_of
from tuner.cost.speed.roofline import Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.inside.notes import STRIDED, parts_of
from tuner.emulator.rates import EXCHANGE, TRANSFER, EmulatedTimes

COPIES = frozenset({"_to_copy", "copy_", "_copy_from", "_foreach_copy_"})
"""Operators that may copy between host and device."""

_OWN_RULES = ("aten", "prims", "bitsandbytes", "c10d", "_c10d_functional")
"""Namespaces whose operators are priced by rules; others are priced by their launches."""


class Prices:
    """The times of works on one GPU type, each priced once."""

    def __init__(self, gpu: Gpu, *, allow_tf32: bool = False) -> None:
        self._gpu, self._times = gpu, EmulatedTimes(Roofline())
        self._allow_tf32 = allow_tf32
        self._known: dict[Work, float] = {}
        self.launch_s = self._times.host(gpu).launch_s

    def seconds(self, work: Work) -> float:
        """Seconds on the device; 0 for exchanges between devices, as no kernel waits for them."""
        known = self._known.get(work)
        if known is None:
            known = self._known[work] = self._price(work)
        return known

    def total(self, works: Sequence[Work]) -> float:
        """Seconds of works that run one after another."""
        return sum(map(self.seconds, works))

    def launches(self, works: Sequence[Work]) -> float:
        """Launches that works take of the host."""
        return float(launches_of(WorkArrays.of_works(works).names).sum())

    def _price(self, work: Work) -> float:
        found = self._times.seconds(
            WorkArrays.of_works([work]), self._gpu, allow_tf32=self._allow_tf32
        )
        return float(found[0, 0])


def has_own_rules(func: Any) -> bool:
    """True if an operator is priced by rules on its arguments, not by its launches."""
    return func.namespace in _OWN_RULES


class Describer:
    """Turns calls into works, by the same rules as a trace."""

    def __init__(self) -> None:
        self._kernels: Kernels | None = None
        self._namespaces = 0

    def works_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[Work, ...]:
        """The works of one call; empty if it launches nothing."""
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
        """The rules for operators, with bitsandbytes' once its operators are registered."""
        registered = len(dir(torch.ops.bitsandbytes))
        if self._kernels is None or registered != self._namespaces:
            self._namespaces = registered
            bnb = bnb_kernels()
            self._kernels = Kernels(
                {**bnb.decompositions, **ATEN_DECOMPOSITIONS}, {**bnb.leaves, **ATEN_LEAVES}
            )
        return self._kernels


class _Collector(TorchDispatchMode):
    """Collects the works of the operators that run on tensors without data."""

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
    """The work of a collective: the bytes of its largest tensor, as in a trace, and its ranks.

    Its shape begins with the number of ranks and the distance between them.
    """
    size = max((t.nbytes for t in tensors_in((args, tuple(kwargs.values())))), default=0)
    size = max([size, *(t.nbytes for t in tensors_in(out))]) if not _is_work(out) else size
    ranks = next(filter(None, map(ranks_of, (*args, *kwargs.values()))), None)
    shape = None
    if ranks is not None:
        shape = (len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, 1, 1)
    return Work(func._schema.name, EXCHANGE, 0, (size,), "uint8", shape, ())


def ranks_of(value: Any) -> tuple[int, ...] | None:
    """The ranks of a process group, given boxed or by name; None for other values."""
    distributed = torch.distributed
    if not isinstance(value, str | torch.ScriptObject) or not distributed.is_initialized():
        return None
    try:
        if isinstance(value, str):
            group = distributed.distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined,arg-type]
        else:
            group = distributed.ProcessGroup.unbox(value)
        return tuple(distributed.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):  # another string or object, such as a reduction
        return None


def _is_work(out: Any) -> bool:
    return not isinstance(out, (torch.Tensor, list, tuple))


_Tensor = torch.Tensor
_STRIDED = torch.strided
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Function:
    """The properties of an operator that decide the key of its calls, and their prices by key."""

    func: Any
    is_free: bool
    integers_matter: bool
    sides_matter: bool
    is_dynamic: bool
    prices: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, func: Any) -> Function:
        """Read the properties of an operator from its schema and its tags."""
        if not hasattr(func, "_schema"):  # takes functions and launches nothing itself
            return cls(func, True, False, False, False)
        name = func._schema.name
        dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        # In-place operators take their sizes from tensors: other numbers are steps and indices.
        in_place = func._schema.is_mutable and "att" not in name and "flash" not in name
        return cls(
            func,
            is_free=launches_nothing(func),
            integers_matter=not in_place,
            sides_matter=name.partition("::")[2] in COPIES,
            is_dynamic=bool(dynamic & set(func.tags)),
        )


def key_of(value: Any, kind: Function) -> Any:
    """The part of an argument that decides the work, without numbers that vary by step."""
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
    if type(item) is list:  # lists of lists of tensors, gathered by each rank
        return tuple([_key_of_item(one) for one in item])
    return None if type(item) is float else item


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not _STRIDED:
        return tensor.shape, tensor.layout, tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype


def any_on_device(values: Iterable[Any]) -> bool:
    """True if one of these arguments or results, or a tensor in their lists, is on the device."""
    for value in values:
        if isinstance(value, _Tensor):
            if value.is_cuda:
                return True
        elif isinstance(value, (list, tuple)) and any_on_device(value):
            return True
    return False


def shapes_of(out: Any) -> Any:
    """The shapes of results, which matter if values decide them."""
    return out.shape if isinstance(out, _Tensor) else tuple([t.shape for t in tensors_in(out)])


def sides_of(value: Any) -> Any:
    """For each tensor, True if on the device; matters for copies to or from the host."""
    if isinstance(value, _Tensor):
        return value.is_cuda
    if value is None:  # operators on lists that write into their arguments
        return None
    return tuple([sides_of(v) for v in value if isinstance(v, (_Tensor, list, tuple))])


def label_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operator's name with the shapes of its first four tensors."""
    shapes = [
        "x".join(map(str, tensor.shape)) or "scalar"
        for tensor in tensors_in((args, tuple(kwargs.values())))
    ]
    more = f", and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return f"{func._schema.name}({', '.join(shapes[:4])}{more})"


def label_of_work(work: Work) -> str:
    """The operator's name, with the sizes of a product."""
    if work.shape is None:
        return work.name
    return f"{work.name}({' x '.join(map(str, work.shape))})"
