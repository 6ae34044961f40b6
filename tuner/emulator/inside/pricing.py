"""Prices the operators of an emulated program on the device, and advances the virtual clock.

The mode that sees every operator (`mode`) calls `Pricer.before` just before it runs and
`Pricer.note` after it. An operator is identified by its function and the layouts of its arguments:
it is described and priced at its first call, with the code that prices a trace, and only counted
afterwards. Kernels that are launched between operators belong to none. Among them, Triton kernels
are priced by their tensor arguments (`triton_launches`), cuBLAS products by their sizes, and all
others are counted by name.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tuner.core.gpu import Gpu
from tuner.cost.operators.kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES, Kernels, bnb_kernels
from tuner.cost.operators.operators import WRAPPING, launches_nothing, tensors_in, work_of
from tuner.cost.operators.timeline import Work
from tuner.cost.speed.roofline import RECOMPUTED, TRAINED, Roofline, launches_of
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.inside.core import (
    MOST_KEPT,
    DeviceCore,
    KernelLaunch,
    Repeats,
    Shared,
    readable,
)
from tuner.emulator.inside.faults import guarded
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


class _Describer:
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
    if not on_device or not on_host:
        return None
    parts = ((one,) if one.layout is STRIDED else parts_of(one) for one in on_host)
    return sum(part.nbytes for own in parts for part in own)


def _exchange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """The work of a collective: the bytes of its largest tensor, as in a trace, and its ranks.

    Its shape begins with the number of ranks and the distance between them.
    """
    size = max((t.nbytes for t in tensors_in((args, tuple(kwargs.values())))), default=0)
    if isinstance(out, (torch.Tensor, list, tuple)):  # and no `Work`, which is waited for
        size = max([size, *(t.nbytes for t in tensors_in(out))])
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


_NS = 1e9
_UNSEEN: Any = object()

OPTIMIZER, BACKWARD = "optimizer", "backward"

_RANKS_OF_A_MACHINE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

Counts = dict[int, int]
"""The number of calls of each kind, by the kind's number in `Pricer.described`."""


class Price(NamedTuple):
    """The cost of one kind of call, in ns of the host and the device; `number` is the kind's."""

    number: int
    host_ns: float
    device_ns: float


class Described(NamedTuple):
    """One kind of call for a report.

    `label` is the operator with the shapes of its tensors. `source` is the source of its works:
    "operator" for rules on the arguments, "triton" for the tensor arguments of a kernel, "product"
    for those of a kernel that multiplies matrices, "launch" if only the kernel's name is known.
    """

    label: str
    source: str
    works: tuple[Work, ...]
    host_launches: float


class Pricer:
    """Prices and counts the operators and kernels of an emulated program; see the module."""

    def __init__(self, gpu: Gpu, core: DeviceCore, repeats: Repeats | None = None) -> None:
        self._core = core
        self._repeats = repeats
        self._shared = Shared() if repeats is None else repeats.shared
        if repeats is not None:
            repeats.restart()
        self._prices = Prices(gpu, allow_tf32=_allows_tf32())
        self._describer = _Describer()
        self._functions: dict[int, Function] = {}
        """By the address of an operator: its hash is a Python function, and slow."""
        self._known: dict[Any, Price] = {}
        """Prices of kernels that are launched between operators."""
        self.described: list[Described] = []
        self.counts: dict[tuple[int, str, bool], Counts] = {}
        """By step, phase, and True for recomputation of a checkpointed forward."""
        self._work: Callable[[float, float], None] = core.work
        self._launch_count = core.launch_count
        self._shared.seen = core.launch_count()
        self._running = False
        self._trained = 0
        self._started_at = 0
        self._works_inside: list[Work] = []
        self._discard(False)
        self.begin("load", 0)

    # -- calls from the program -------------------------------------------------------------------

    @guarded("the time of a phase")
    def begin(self, phase: str, step: int, trained: int = 0) -> None:
        """Begin a phase of an optimizer step, to which the operators from now on belong.

        An optimizer updates `trained` parameters, which is what its launches take of the host.
        """
        if self._launch_count() != self._shared.seen and not self._running:
            self._look_at_launches()
        self._take_repeats()
        self.phase, self.step = phase, step
        self._shared.in_backward = phase == BACKWARD
        self._shared.host = phase != OPTIMIZER
        self._shared.recomputed = RECOMPUTED
        if phase == OPTIMIZER:
            self._trained = trained
            self._work(TRAINED * trained * self._prices.launch_s * _NS, 0.0)
        if not self._discarded:
            self._plain = self.counts.setdefault((step, phase, False), {})
            self._again = self.counts.setdefault((step, phase, True), {})

    @guarded("the time of kernels")
    def before(self) -> None:
        """Note that an operator is about to run; launches since the last one belong to none."""
        count = self._launch_count()
        if count != self._shared.seen:
            if self._running:  # the last operator failed, and is not noted
                self._shared.seen = count
            else:
                self._look_at_launches()
        self._running, self._started_at = True, count
        if self._works_inside:
            self._works_inside = []

    @property
    def recomputing(self) -> bool:
        """True while a checkpoint runs its forward pass again."""
        return bool(self._shared.recomputing)

    @recomputing.setter
    def recomputing(self, value: bool) -> None:
        self._shared.recomputing = value

    @guarded("the time of an operator")
    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Price | None:
        """Count an operator that ran, and advance the clock; returns its price, if it has any."""
        price: Price | None = None
        kind = self._functions.get(id(func))
        if kind is None:
            kind = self._functions[id(func)] = Function.of(func)
        if not kind.is_free and (
            any_on_device(args) or any_on_device((out,)) or any_on_device(kwargs.values())
        ):
            parts = [key_of(value, kind) for value in args]
            for name, value in kwargs.items():
                parts += (name, key_of(value, kind))
            if kind.is_dynamic:
                parts.append(tuple([t.shape for t in tensors_in(out)]))
            if kind.sides_matter:
                parts += (sides_of(args), sides_of(out))
            key = tuple(parts)
            price = kind.prices.get(key, _UNSEEN)
            if price is _UNSEEN:
                price = kind.prices[key] = self._learn(func, args, kwargs, out)
            if price is not None:
                self._count(price)
        self._running = False
        self._shared.seen = self._launch_count()
        return price

    @guarded("the time of a kernel of Triton")
    def launched(self, key: Any, describe: Callable[[], Described], *, done: bool = False) -> None:
        """Count a Triton kernel by its `key`: the next launch, or with `done` the last one.

        Inside an operator without rules, the kernel's works become the operator's.
        """
        if self._running:
            self._works_inside += describe().works
            return
        if done:
            self._shared.seen = self._launch_count()
        else:
            if self._launch_count() != self._shared.seen:
                self._look_at_launches()
            self._shared.seen += 1
        price = self._known.get(key)
        if price is None:
            price = self._known[key] = self._add(describe())
        self._count(price)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """A context for comparing kernels: the clock advances, but nothing is counted."""
        before = self._discarded
        self._discard(True)
        try:
            yield
        finally:
            self._discard(before)
            self._shared.seen = self._launch_count()
            if not before:
                self.begin(self.phase, self.step)

    @guarded("the time of a kernel that is compared with others")
    def time(self, works: tuple[Work, ...] | None) -> None:
        """Advance the clock by the works of a kernel that ran for a comparison.

        Without works, advance it by the launches that no operator has been noted for.
        """
        if works is not None:
            self._work(self._prices.launch_s * _NS, self._prices.total(works) * _NS)
            self._shared.seen = self._launch_count()
        elif self._launch_count() != self._shared.seen:
            self._look_at_launches()

    # -- graphs: recorded once, launched as one -------------------------------------------------

    @guarded("a CUDA graph")
    def capture(self) -> None:
        """Begin to record into a CUDA graph, without running anything."""
        if self._launch_count() != self._shared.seen:
            self._look_at_launches()
        self._discard(True)
        self._work = _no_work

    @guarded("a CUDA graph")
    def captured(self) -> Counts:
        """End the recording of a graph, and return the calls that it runs when launched."""
        if self._launch_count() != self._shared.seen:
            self._look_at_launches()
        recorded: Counter[int] = Counter(self._plain)
        recorded.update(self._again)
        self._discard(False)
        self._work = self._core.work
        self.begin(self.phase, self.step)
        return dict(recorded)

    @guarded("the time of a CUDA graph")
    def replayed(self, recorded: Counts) -> None:
        """Count all calls of a graph that was launched, for the host time of one launch."""
        self._shared.seen = self._launch_count()
        device_ns = 0.0
        for number, count in recorded.items():
            self._plain[number] = self._plain.get(number, 0) + count
            device_ns += count * self._prices.total(self.described[number].works) * _NS
        self._work(self._prices.launch_s * _NS, device_ns)

    # -- loops that are extrapolated ------------------------------------------------------------

    def counted(self) -> Counts:
        """The calls of the running phase up to now."""
        return dict(self._plain)

    def repeat(self, counts: Counts, times: int) -> None:
        """Count these calls of the running phase `times` times more, and advance the clock."""
        host_ns = device_ns = 0.0
        for number, count in counts.items():
            described = self.described[number]
            self._plain[number] = self._plain.get(number, 0) + times * count
            host_ns += times * count * described.host_launches * self._prices.launch_s * _NS
            device_ns += times * count * self._prices.total(described.works) * _NS
        self._work(max(0.0, host_ns - device_ns), device_ns)  # they overlap

    # -- the result -----------------------------------------------------------------------------

    @guarded("the time of a step")
    def snapshot(self, trained: int = 0) -> dict[str, Any]:
        """All counts up to now, for `tuner.emulator.step_time`; JSON types only.

        `trained` is the number of parameters that optimizers update, where no step that is timed
        began with it: a second training of a process adds nothing to the steps of the first.
        """
        self._take_repeats()
        return {
            "trained": self._trained or trained,
            "reads_loss": "transformers.trainer" in sys.modules,
            "allow_tf32": _allows_tf32(),
            "ranks": _ranks(),
            "machines": _machines(),
            "described": [
                [d.label, d.source, [list(work) for work in d.works], d.host_launches]
                for d in list(self.described)
            ],
            "counts": [
                [step, phase, again, sorted(counts.items())]
                for (step, phase, again), counts in list(self.counts.items())
                if counts
            ],
        }

    def _discard(self, value: bool) -> None:
        """Count nothing from now on, or again from the next phase on."""
        self._take_repeats()
        self._discarded = value
        self._shared.on = self._repeats is not None and not value
        if value:
            self._plain, self._again = {}, {}

    def _take_repeats(self) -> None:
        if self._repeats is not None:
            for again, number, count in self._repeats.take(len(self.described)):
                counts = self._again if again else self._plain
                counts[number] = counts.get(number, 0) + count

    # -- learning -------------------------------------------------------------------------------

    def _count(self, price: Price) -> None:
        again = self._shared.recomputing or (self._shared.in_backward and torch.is_grad_enabled())
        counts = self._again if again else self._plain
        counts[price.number] = counts.get(price.number, 0) + 1
        host_ns = price.host_ns if self._shared.host else 0.0
        self._work(host_ns * RECOMPUTED if again else host_ns, price.device_ns)

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Price | None:
        works = self._describer.works_of(func, args, kwargs, out)
        if works and func.namespace not in _OWN_RULES and all(work.flops == 0 for work in works):
            works = self._inside() or works
        if not works:
            return None
        label = label_of_call(func, args, kwargs)
        return self._add(Described(label, "operator", works, self._prices.launches(works)))

    def _add(self, described: Described) -> Price:
        device_ns = self._prices.total(described.works) * _NS
        host_ns = described.host_launches * self._prices.launch_s * _NS
        price = Price(len(self.described), host_ns, device_ns)
        self.described.append(described)
        return price

    def _inside(self) -> tuple[Work, ...]:
        """The works of an operator without rules, from its launches; empty if unknown."""
        products = [
            product_work(launch)
            for launch in self._new_launches(self._started_at)
            if launch.product
        ]
        return (*self._works_inside, *products)

    def _look_at_launches(self) -> None:
        """Price the launches outside operators."""
        first, self._shared.seen = self._shared.seen, self._launch_count()
        for launch in self._new_launches(first):
            key: Any = launch if launch.product else launch.name
            found = self._known.get(key)
            if found is None:
                work = product_work(launch) if launch.product else _unpriced(launch.name)
                source = "operator" if launch.product else "launch"
                sizes = "" if work.shape is None else f"({' x '.join(map(str, work.shape))})"
                described = Described(f"{work.name}{sizes}", source, (work,), 1)
                found = self._known[key] = self._add(described)
            self._count(found)

    def _new_launches(self, first: int) -> list[KernelLaunch]:
        count = self._launch_count()
        oldest = max(first, count - MOST_KEPT)
        return self._core.launches(oldest, count - oldest) if count > oldest else []


def product_work(launch: KernelLaunch) -> Work:
    """The work of a product that was launched directly through cuBLAS."""
    assert launch.product is not None
    dtype, (batch, m, n, k) = launch.product
    size = {"float64": 8, "float32": 4, "int8": 1}.get(dtype, 1 if "float8" in dtype else 2)
    sides = (batch * m * k * size, batch * k * n * size, batch * m * n * size)
    return Work(launch.name, "matmul", 2 * batch * m * n * k, sides, dtype, (batch, m, n, k), ())


def _unpriced(name: str) -> Work:
    return Work(readable(name), "unpriced", 0, (), "uint8", None, ())


def _no_work(host_ns: float, device_ns: float) -> None:
    """Replaces the device's clock while a graph is recorded."""


def _allows_tf32() -> bool:
    """True if float32 products may run as TF32, by either of PyTorch's two settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the program set it in the other way
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def _ranks() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return 1


def _machines() -> int:
    """The number of machines, from the ranks per machine that launchers set (torchrun, MPI)."""
    here = next(filter(str.isdigit, map(os.environ.get, _RANKS_OF_A_MACHINE, ("", "", ""))), "")
    ranks, own = _ranks(), int(here or 0)
    return ranks // own if own and ranks % own == 0 else 1
