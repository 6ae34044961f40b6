"""Finds the memory of the program's models and optimizers, through the objects that own it.

Modules are followed from the registration of their parameters on, by weak references, so that no
object lives longer for it. So neither the garbage collector nor the program has to list them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tuner.core.kinds import MemoryCategory
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import is_generated, package_of
from tuner.emulator.inside.notes import STRIDED, parts_of
from tuner.emulator.inside.process import replaces

TRAINED, FROZEN, GRADIENT, STATE = "trained", "frozen", "gradients", "optimizer_state"

_DEPTH = 3
"""Quantised parameters have a state, whose statistics may be quantised in turn."""

_WITHOUT = (int, float, str, bytes, type(None), torch.dtype, torch.device, torch.nn.Module, type)
"""Types of values that are not searched for tensors of a parameter's state."""


class Trainers:
    """The threads that train: those that have started a backward pass."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def note(self) -> None:
        """Note that this thread starts a backward pass."""
        thread = threading.current_thread()
        if thread not in self._threads and not _is_in_backward():
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    @property
    def others(self) -> bool:
        """True if threads train that this one neither is nor works for.

        Their gradients may not be read: PyTorch frees a gradient with the lock of Python released,
        and a thread that reads `grad` meanwhile gets a tensor that is half gone.
        """
        threads = set(filter(threading.Thread.is_alive, self._threads))
        if _is_in_backward():  # a thread of autograd
            return len(threads) > 1
        return bool(threads - {threading.current_thread()})


def _is_in_backward() -> bool:
    return vars(torch._C)["_current_autograd_node"]() is not None


class Owners:
    """The modules and optimizers of this process, and their memory."""

    def __init__(self) -> None:
        self.trainers = Trainers()
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._ran: set[int] = set()
        self._handed: dict[int, int] = {}
        self._updated_by: dict[int, int] = {}
        self.trainable_params = 0
        """Trained parameters of all optimizers that require gradients; sharded ones count whole."""
        self._elements: dict[str, int] = {}

    def install(self, registered: Callable[[], None]) -> None:
        """Follow modules; call `registered` whenever a model is created or moved."""
        module = torch.nn.Module
        follow = guarded("a module's parameters")(self._follow)
        tell = guarded("a model that is made")(registered)

        def parameter_added(owner: torch.nn.Module, name: str, parameter: Any) -> None:
            follow(owner)
            tell()

        def buffer_added(owner: torch.nn.Module, name: str, buffer: Any) -> None:
            follow(owner)

        torch.nn.modules.module.register_module_parameter_registration_hook(parameter_added)
        torch.nn.modules.module.register_module_buffer_registration_hook(buffer_added)

        @replaces(module, "__setstate__")
        def copied_or_unpickled(set_state: Any, owner: torch.nn.Module, state: Any) -> None:
            set_state(owner, state)
            follow(owner)

        @replaces(module, "_apply")
        def moved(apply: Any, *args: Any, **kwargs: Any) -> Any:
            tell()
            return apply(*args, **kwargs)

    def _follow(self, module: torch.nn.Module) -> None:
        self._modules[id(module)] = weakref.ref(module)

    def note_ran(self, module: torch.nn.Module) -> None:
        """Note that a module ran with gradients: it and its submodules take part in training."""
        if id(module) not in self._ran:
            self._ran.update(map(id, module.modules()))

    def note_update(self, optimizer: Any) -> None:
        """Note that an optimizer is about to update its parameters."""
        key = id(optimizer)
        self._updated_by[key] = threading.get_ident()
        trained = sum(one.requires_grad for one in _handed_to(optimizer))
        if key in self._optimizers and self._handed[key] == trained:
            return
        self._handed[key] = trained
        self._optimizers[key] = optimizer
        self.trainable_params = max(self.trainable_params, self._count_trained())

    @property
    def trained(self) -> int:
        """Parameters that optimizers update, those of earlier trainings aside."""
        return sum(self._handed[key] for key in list(self._optimizers))

    def _count_trained(self) -> int:
        handed = [p for optimizer in self._optimizers.values() for p in _handed_to(optimizer)]
        own = [p for m in self.modules() for p in m._parameters.values() if p is not None]
        if own and not {id(one) for one in own} & {id(one) for one in handed}:
            # The optimizer has copies (flat or sharded), so the model's own parameters count.
            handed = own
        return sum({_identity(one): _numel(one) for one in handed if one.requires_grad}.values())

    @property
    def trains_adapters(self) -> bool:
        """True if the trained part is at most as large as the frozen part of the model that ran.

        Models that never run with gradients (a reference, a teacher) don't count.
        """
        trained = self._elements.get(TRAINED, 0)
        return 0 < trained <= self._elements.get(FROZEN, 0)

    def modules(self) -> Iterator[torch.nn.Module]:
        """All modules with parameters or buffers that are alive."""
        for one in list(self._modules.values()):
            module = one()
            if module is not None:
                yield module

    def memory(self) -> Iterator[tuple[int, str]]:
        """Addresses of blocks on the device, with their kinds."""
        elements = {TRAINED: 0, FROZEN: 0}
        optimizers = list(self._optimizers.values())
        handed = [one for optimizer in optimizers for one in _handed_to(optimizer)]
        own = self._own_parameters() if self.trainers.others else None
        seen: set[int] = set()
        for module in self.modules():
            for buffer in list(module._buffers.values()):
                yield from ((address, FROZEN) for address in addresses(buffer))
            yield from ((a, FROZEN) for a in _owned_by(vars(module).get("state"), _DEPTH))
            takes_part = id(module) in self._ran
            for parameter in list(module._parameters.values()):
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                kind = TRAINED if parameter.requires_grad else FROZEN
                if parameter.is_cuda and (takes_part or kind is TRAINED):
                    elements[kind] += parameter.numel()
                yield from _of_parameter(parameter, kind, own)
        for parameter in handed:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                kind = TRAINED if parameter.requires_grad else FROZEN
                yield from _of_parameter(parameter, kind, own)
        if elements[TRAINED]:
            self._elements = elements
        for optimizer in optimizers:
            for state in list(optimizer.state.values()):
                yield from ((address, STATE) for address in _owned_by(state, _DEPTH))

    def _own_parameters(self) -> set[int]:
        """The parameters that this thread updated last."""
        me = threading.get_ident()
        mine = (one for key, one in self._optimizers.items() if self._updated_by.get(key) == me)
        return {id(parameter) for optimizer in mine for parameter in _handed_to(optimizer)}


def addresses(tensor: Any) -> Iterator[int]:
    """Device addresses of the storage of a tensor, or of its parts if it consists of tensors."""
    tensor = unwrapped(tensor)
    if not isinstance(tensor, torch.Tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):  # sharded or quantised: a wrapper of tensors
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from addresses(getattr(tensor, name))
    elif tensor.is_cuda:
        parts = (tensor,) if tensor.layout is STRIDED else parts_of(tensor)
        for part in parts:
            address = int(part.untyped_storage().data_ptr())
            if address:
                yield address


def unwrapped(tensor: Any) -> Any:
    """The tensor itself in place of that of a function transform (`torch.func.grad`)."""
    transforms: Any = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and transforms.is_functorch_wrapped_tensor(tensor):
        tensor = transforms.get_unwrapped(tensor)
    return tensor


def _handed_to(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _identity(parameter: Any) -> Any:
    """A key that is equal for tied parameters."""
    found = tuple(addresses(parameter))
    return (*found, parameter.storage_offset(), parameter.numel()) if found else id(parameter)


def _numel(parameter: Any) -> int:
    """Elements of the whole parameter, shards on other ranks included (DeepSpeed, FSDP)."""
    whole = getattr(parameter, "_unpadded_unsharded_size", None)
    return int(
        getattr(parameter, "ds_numel", parameter.numel() if whole is None else whole.numel())
    )


def _of_parameter(parameter: Any, kind: str, own: set[int] | None) -> Iterator[tuple[int, str]]:
    """The memory of a parameter, of its gradient, and of its quantisation or sharding state.

    The gradient is left out of a parameter that is not among `own`; None if all are.
    """
    yield from ((address, kind) for address in addresses(parameter))
    may_read = own is None or id(parameter) in own
    if may_read and parameter.is_leaf:  # PyTorch warns of the gradient of any other tensor
        yield from ((address, GRADIENT) for address in addresses(parameter.grad))
    for name, value in list(vars(parameter).items()):
        owned = GRADIENT if "grad" in name else kind
        yield from ((address, owned) for address in _owned_by(value, _DEPTH))


def _owned_by(value: Any, depth: int) -> Iterator[int]:
    """The memory of the tensors in a value, in containers and in attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield from addresses(value)
        return
    if depth == 0 or isinstance(value, _WITHOUT) or callable(value):
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for one in inner:
        yield from _owned_by(one, depth - 1)


WEIGHTS, ADAPTERS, BUCKETS = "weights", "adapters", "gradient_buckets"
UNSHARDED = str(MemoryCategory.UNSHARDED_GRADIENTS)
LOGITS, ACTIVATIONS, TEMPORARY, OTHER = "logits_and_loss", "activations", "temporary", "other"

_CERTAIN = (TRAINED, FROZEN, UNSHARDED, GRADIENT, STATE)
"""Kinds of blocks that owners know, in order of precedence if a block had several."""

_INNERMOST = 6
"""This many innermost frames of an allocation are searched for `_ALLOCATED_BY`."""

_ALLOCATED_BY = (
    ("torch/nn/parallel/distributed.py", ("_ddp_init_helper", "_pre_forward"), BUCKETS),
    ("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_reduce",), GRADIENT),
    ("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_all_gather",), WEIGHTS),
    ("fsdp/_fully_shard/_fsdp_param.py", ("init_all_gather_outputs", "alloc_storage"), WEIGHTS),
    ("fsdp/_fully_shard/_fsdp_param.py", ("to_accumulated_grad_if_needed",), UNSHARDED),
    ("fsdp/_flat_param.py", ("_alloc_padded_unsharded_flat_param",), WEIGHTS),
    ("fsdp/_runtime_utils.py", ("_reduce_grad", "_get_reduce_scatter_tensors"), GRADIENT),
    # Tiles of the vocabulary in TRL 1.16's losses (SFT's chunked one, GRPO's fused head).
    ("trl/kernels/chunked_logprob.py", ("forward", "backward", "_forward_tile"), LOGITS),
)
"""Ends of file names, functions, and the kind they allocate, in PyTorch 2.8 to 2.13."""


class Sightings:
    """The times at which addresses had a kind; the times tell reused addresses apart."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, list[int]]] = {}

    def add(self, time_us: int, address: int, kind: str) -> None:
        """Note that the block at this address has this kind. Times must not decrease."""
        times = self._seen.setdefault(address, {}).setdefault(kind, [])
        if not times or times[-1] != time_us:
            times.append(time_us)

    def of(self, block: dict[str, Any]) -> set[str]:
        """All kinds that a block had in its lifetime."""
        kinds = self._seen.get(block["addr"], {})
        return {
            kind
            for kind, times in list(kinds.items())
            if (at := bisect_left(times, block["time_us"])) < len(times)
            and times[at] <= block["died_us"]
        }


class Parts:
    """Names the parts of the peak.

    `phase_of` returns the phase at a time, and `ends` the end of the phase at a time.
    """

    def __init__(
        self,
        sightings: Sightings,
        phase_of: Callable[[int], str],
        ends: Callable[[int], int],
        *,
        trains_adapters: bool,
    ) -> None:
        self._sightings = sightings
        self._phase_of, self._ends = phase_of, ends
        trained = ADAPTERS if trains_adapters else WEIGHTS
        self._names = {TRAINED: trained, FROZEN: WEIGHTS}
        self._logits: set[int] = set()

    def learn(self, blocks: Iterable[dict[str, Any]]) -> None:
        """Note the sizes of logits: compiled code allocates them without a visible operator."""
        self._logits = {one["size"] for one in blocks if LOGITS in self._sightings.of(one)}

    def of(self, block: dict[str, Any], peak_us: int) -> str:
        """The part of the peak that a block belongs to."""
        seen = self._sightings.of(block)
        for kind in _CERTAIN:
            if kind in seen:
                return self._names.get(kind, kind)
        frames = [one for one in block["frames"] if package_of(one["filename"]) != ""]
        allocated = _by_library(frames[:_INNERMOST])
        if allocated is not None:
            return allocated
        generated = bool(frames) and is_generated(frames[0]["filename"])
        if LOGITS in seen or (generated and block["size"] in self._logits):
            return LOGITS
        return self._by_phase(block, peak_us)

    def _by_phase(self, block: dict[str, Any], peak_us: int) -> str:
        phase, at_peak = self._phase_of(block["time_us"]), self._phase_of(peak_us)
        if phase == "load":
            if block["died_us"] == sys.maxsize:
                return OTHER
            return TEMPORARY if at_peak == "load" else ACTIVATIONS  # the first batch
        recomputed = any(f["filename"].endswith("utils/checkpoint.py") for f in block["frames"])
        kept = phase == "forward" and at_peak != "forward"
        outlives = phase == "forward" and block["died_us"] >= self._ends(peak_us)
        return ACTIVATIONS if kept or recomputed or outlives else TEMPORARY


def _by_library(frames: list[dict[str, Any]]) -> str | None:
    for frame in frames:
        for file, functions, kind in _ALLOCATED_BY:
            if frame["filename"].endswith(file) and frame["name"] in functions:
                return kind
    return None
