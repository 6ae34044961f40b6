"""Records what a training step allocates, frees and computes, on tensors without data.

`Recorder` is a dispatch mode. It sees every operator that reaches the backend, notes each
new storage and the moment it dies (the order is the one in which a caching allocator on a
GPU would be asked), and the work of the operator: FLOPs, bytes, matmul shape.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.core.meanwhile import import_bitsandbytes
from tuner.core.records import MemoryCategory, Phase
from tuner.cost.operators.kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES, Kernels, bnb_kernels
from tuner.cost.operators.operators import (
    WRAPPING,
    following_sizes,
    from_layouts,
    launches_nothing,
    layouts_of,
    makes_new_tensors,
    returns_first_argument,
    signature_of,
    tensors_in,
    touches_gpu,
    work_of,
)
from tuner.cost.operators.timeline import Block, Mark, Op, Timeline

import_bitsandbytes()  # which registers its operators, and touches no device
_OF_BITSANDBYTES = bnb_kernels()
CUDA_KERNELS = Kernels(
    {**_OF_BITSANDBYTES.decompositions, **ATEN_DECOMPOSITIONS},
    {**_OF_BITSANDBYTES.leaves, **ATEN_LEAVES},
)
"""The kernels behind operators on CUDA, which tensors without data don't show.

Decompositions spell out operators that allocate buffers on the way, as the sequence of
allocations of their implementation. Leaves describe single kernels: FLOPs, class, and the workspace
beside inputs and outputs.
"""

_aten = torch.ops.aten

_OF_ATTENTION = ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
"""Prefixes of operators whose results are scores, or are kept for them."""

_SOLE_USE = 2
"""Uses of a storage that one tensor alone has: by it, and by the object of Python that is asked."""

_CUBLAS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"})
"""Operators that run on PyTorch's own cuBLAS handle."""


class _Seen(NamedTuple):
    """An operator with given argument layouts: its results and its work."""

    layouts: tuple[Any, ...] | None
    is_tuple: bool
    work: int | None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills a `Timeline`. Use it as a context manager.

    `vocab_size` tells logits from other activations; see `_may_be_logits`. `workspace_bytes` is
    what each cuBLAS handle takes from the allocator at its first product and keeps. PyTorch has one
    handle a thread: forward runs in the main thread, backward (recomputed forwards included) in
    autograd's. `padded` says whether masks hide padding.

    Operators that make new tensors are executed once for each layout of their arguments;
    after that their results are made from the remembered layout. The Python meta functions
    cost 100 us each, and a step of a large model repeats the same few hundred of them.
    """

    def __init__(
        self, *, workspace_bytes: int, vocab_size: int | None = None, padded: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self._padded = padded
        self._vocab_size = vocab_size
        self._workspace_bytes = workspace_bytes
        self._threads_with_workspace: set[bool] = set()
        self._live: dict[int, int] = {}  # storage address -> block index
        self._finalizers: dict[int, Any] = {}
        self._seen: dict[Any, _Seen] = {}
        self._recomputing = False
        self._stream = 0
        self._recording = False
        self._depth = 0
        self._resizing: Any = None
        self._first_block_of_phase = 0

    # -- what the trace tells the recorder --------------------------------------------------

    def start(self) -> None:
        """Record from here on. Before, a model skeleton is built, which allocates nothing."""
        self._recording = True

    def enter(self, phase: Phase, step: int, micro_step: int) -> None:
        """A phase begins; later allocations and operators belong to it."""
        timeline = self.timeline
        if timeline.marks[-1].phase is Phase.FORWARD:
            self._survivors_are_activations(self._first_block_of_phase)
        self._first_block_of_phase = len(timeline.blocks)
        timeline.marks.append(Mark(len(timeline.events), phase, step, micro_step))

    def enter_stream(self, number: int) -> None:
        """Allocate from here on another stream."""
        self._stream = number

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """Inside, operators repeat a checkpointed forward; what survives is activations."""
        before, self._recomputing = self._recomputing, True
        first_block = len(self.timeline.blocks)
        try:
            yield
        finally:
            self._recomputing = before
            self._survivors_are_activations(first_block)

    def label(self, tensor: torch.Tensor, category: MemoryCategory) -> None:
        """Say what a tensor's storage is; storages created before the recorder are added."""
        block = self._block_of(tensor)
        block.category = category
        if block.dtype is None:
            block.shape, block.dtype = tuple(tensor.shape), tensor.dtype

    def mark_paged(self, tensor: torch.Tensor) -> None:
        """Say that a storage is managed memory, outside of torch's allocator."""
        self._block_of(tensor).paged = True

    # -- the dispatch mode ------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under this mode: the guard against it would cost each operator
        # two calls.
        return False

    def __enter__(self) -> Recorder:
        if self._depth == 0:
            self._resizing = following_sizes(self._resized)
            self._resizing.start()
        self._depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._resizing.stop()
            # The story ends here: what is still alive stays so, whenever Python drops it.
            self._recording = False
            self._finalizers.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            # A sharded tensor first turns into operators on its shard, which come here again.
            return NotImplemented
        if not self._recording:
            return func(*args, **kwargs)
        decomposition = CUDA_KERNELS.decompositions.get(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            # The value of a tensor without data. The models that are traced ask only whether a
            # mask is all ones and whether sequences are not packed: both hold for full batches.
            return not self._padded
        if func is _aten.add.Tensor and not kwargs and self._is_accumulation(*args):
            func = _aten.add_.Tensor
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _is_accumulation(self, sum_so_far: Any, gradient: Any) -> bool:
        """True if autograd would add a gradient in place, which it never does under a mode.

        As its `can_accumulate_inplace`: nobody else holds the sum so far.
        """
        return (
            self.timeline.marks[-1].phase is Phase.BACKWARD
            and not torch.is_grad_enabled()
            and isinstance(gradient, torch.Tensor)
            and (sum_so_far.shape, sum_so_far.dtype) == (gradient.shape, gradient.dtype)
            and _aten.is_non_overlapping_and_dense.default(sum_so_far)
            and torch._C._storage_Use_Count(sum_so_far.untyped_storage()._cdata) == _SOLE_USE
        )

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective: its time is no kernel's.

        Its buffers exist already; that of a functional one is a new tensor, which others wrap.
        """
        if func._opname in WRAPPING:
            return _aten.alias.default(args[0])
        out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            self._note_outputs(out, func)
        size = max((t.nbytes for t in tensors_in((args, kwargs, out))), default=0)
        mark = len(self.timeline.marks) - 1
        self.timeline.collectives.append((func._schema.name, size, mark))
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = signature_of(func, args, kwargs)
        seen = None if signature is None else self._seen.get(signature)
        if seen is not None and seen.layouts is not None:
            out = from_layouts(seen.layouts, is_tuple=seen.is_tuple)
        elif seen is not None and returns_first_argument(func) and args[0].is_meta:
            out = args[0]
        elif func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            # Rank 0 hears its own broadcast of the order of DDP's buckets: what it had said.
            return args[0]
        else:
            out = func(*args, **kwargs)
        fresh = self._note_outputs(out, func)
        if seen is None:
            seen = self._learn(func, args, kwargs, out, fresh)
            if signature is not None:
                self._seen[signature] = seen
        if seen.work is not None:
            self._note_work(seen.work)
        return out

    def _note_work(self, index: int) -> None:
        timeline = self.timeline
        work, phase = timeline.works[index], timeline.marks[-1].phase
        for size_bytes in work.workspace_bytes:
            block = self._append_block(size_bytes)
            block.category = MemoryCategory.TEMPORARY
            block.died_event = block.born_event + 1
            timeline.events.append((len(timeline.blocks) - 1, -1))
        in_backward = phase is Phase.BACKWARD
        needs_workspace = self._workspace_bytes > 0 and work.name in _CUBLAS
        if needs_workspace and in_backward not in self._threads_with_workspace:
            self._threads_with_workspace.add(in_backward)
            block = self._append_block(self._workspace_bytes)
            block.category = MemoryCategory.CONTEXT_AND_WORKSPACE
        timeline.ops.append(Op(index, len(timeline.marks) - 1, self._recomputing))

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, fresh: bool
    ) -> _Seen:
        # `_unsafe_view` and its like share storage without saying so in their schema.
        layouts = layouts_of(out) if fresh and makes_new_tensors(func) else None
        if launches_nothing(func) or not touches_gpu(args, out):
            return _Seen(layouts, isinstance(out, tuple), None)
        self.timeline.works.append(work_of(CUDA_KERNELS, func, args, kwargs, out))
        return _Seen(layouts, isinstance(out, tuple), len(self.timeline.works) - 1)

    def _note_outputs(self, out: Any, func: Any) -> bool:
        fresh = False
        for tensor in (out,) if isinstance(out, torch.Tensor) else tensors_in(out):
            storage = tensor.untyped_storage()
            # Optimizers keep step counters on the host: not GPU memory.
            if storage._cdata in self._live or not tensor.is_meta:
                continue
            fresh = True
            block = self._add(storage)
            block.is_logits = self._may_be_logits(tensor, func)
            block.shape, block.dtype = tuple(tensor.shape), tensor.dtype
        return fresh

    def _may_be_logits(self, tensor: torch.Tensor, func: Any) -> bool:
        """True of values of tokens: [batch, length, vocabulary], or without batches.

        Attention's scores may be as wide, where sequences are as long; they have heads too, or
        come from attention. Masks and tokens of that length are no floats.
        """
        return (
            tensor.is_floating_point()
            and tensor.dim() in (2, 3)
            and tensor.shape[-1] == self._vocab_size
            and not func._schema.name.startswith(_OF_ATTENTION)
        )

    def _add(self, storage: torch.UntypedStorage) -> Block:
        address = storage._cdata
        self._live[address] = len(self.timeline.blocks)
        self._finalizers[address] = weakref.ref(storage, self._make_release(address))
        return self._append_block(storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """The block of a storage ends; one of its new size takes its place, unless it is empty.

        What comes and goes so are weights that ranks gather.
        """
        index = self._live.get(storage._cdata)
        if index is None or not self._recording:
            return
        before = self.timeline.blocks[index]
        if before.category in (None, MemoryCategory.ACTIVATIONS):
            before.category = MemoryCategory.WEIGHTS
        self._end(index)
        if storage.nbytes():
            self._live[storage._cdata] = len(self.timeline.blocks)
            block = self._append_block(storage.nbytes())
            for name in ("category", "shape", "dtype"):
                setattr(block, name, getattr(before, name))

    def _end(self, index: int) -> None:
        block = self.timeline.blocks[index]
        if block.died_event < 0:  # an emptied storage has ended before its tensor
            block.died_event = len(self.timeline.events)
            self.timeline.events.append((index, -1))

    def _append_block(self, size_bytes: int) -> Block:
        timeline = self.timeline
        block = Block(size_bytes, timeline.marks[-1].phase, len(timeline.events))
        block.stream = self._stream
        timeline.events.append((len(timeline.blocks), +1))
        timeline.blocks.append(block)
        return block

    def _make_release(self, address: int) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            del self._finalizers[address]
            self._end(self._live.pop(address))

        return release

    def _block_of(self, tensor: torch.Tensor) -> Block:
        # A sharded tensor is a wrapper: what is in memory is its shard.
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        index = self._live.get(storage._cdata)
        return self._add(storage) if index is None else self.timeline.blocks[index]

    def _survivors_are_activations(self, first_block: int) -> None:
        for block in self.timeline.blocks[first_block:]:
            if block.died_event < 0 and block.category is None:
                block.category = MemoryCategory.ACTIVATIONS
