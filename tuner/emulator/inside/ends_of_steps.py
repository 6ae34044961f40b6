"""Decides what ends a step of the training, whoever makes it.

A step ends where gradients are consumed. Optimizers of PyTorch announce it, and those of libraries
that inherit from them. If several share a training step (one per layer, in the backward pass), the
step is over when one of them updates again. Without an optimizer, a step is over when parameters
have been written in place after a gradient was read, or when a backward pass begins that has other
parameters. If neither is seen, as with a library's own kernels, backward passes count.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.mode import is_traced
from tuner.emulator.inside.owners import Trainers, addresses, unwrapped
from tuner.emulator.inside.process import replaces

OPTIMIZER = ""
UPDATES = "writes to parameters"
REPLACED = "replaced parameters"
BACKWARD = "backward passes"

PATIENCE = 64
"""Backward passes without a visible update after which each counts as a step: a program may add up
the gradients of many micro-batches first."""

_NOT_UPDATES = ("renorm", "gather", "split_with_sizes_copy")
"""Words in names of operators that write parameters and train nothing: FSDP collects them so."""


class Steps:
    """The steps of this process; `over` is called when one ends, and `updating` when one is seen.

    `made` is called with the frame in which an optimizer is made. `mode` passes on operators while
    nothing is known of an optimizer. If several of the `trainers` run, no gradients are read, so
    that steps without an optimizer are counted by backward passes.
    """

    def __init__(
        self,
        mode: Any,
        trainers: Trainers,
        *,
        made: Callable[[FrameType], None],
        updating: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self._mode, self._trainers, self._made = mode, trainers, made
        self._updating, self._over = updating, over
        self.counted_by = OPTIMIZER
        self._made_optimizer = False
        self._updated: set[int] = set()
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._passes = self._replaced = 0
        self._leaves: dict[int, weakref.ref[Any]] = {}
        self._due: set[int] = set()
        self._before: set[tuple[int, int]] = set()
        self._gradients: set[int] = set()
        self._has_read = False
        self._written: set[int] = set()
        self._depth = 0

    def install(self) -> None:
        """Note whether the program makes an optimizer."""

        @replaces(torch.optim.Optimizer, "__init__")
        def made(make: Any, *args: Any, **kwargs: Any) -> None:
            self._made_optimizer = True
            self._made(sys._getframe(2))
            make(*args, **kwargs)

    # -- optimizers -----------------------------------------------------------------------------

    def begin_update(self, optimizer: Any) -> None:
        """Note that an optimizer is about to update its parameters."""
        if self._mode is not None:
            self._mode.updates = None
        self._leaves.clear()
        self.counted_by, self._made_optimizer = OPTIMIZER, True
        if id(optimizer) in self._updated:
            self._end()
        self._optimizers[id(optimizer)] = optimizer

    def end_update(self, optimizer: Any, *, in_backward: bool) -> None:
        """Note that an optimizer has updated its parameters."""
        self._updated.add(id(optimizer))
        if not in_backward and len(self._updated) == len(self._optimizers):
            self._end()

    def _end(self) -> None:
        self._updated.clear()
        self._written.clear()
        self._has_read = False
        self._gradients.clear()
        self._over()

    # -- backward passes ------------------------------------------------------------------------

    @guarded("the parameters of a backward pass")
    def begin_backward(self, args: tuple[Any, ...]) -> None:
        """Note a backward pass, before it runs; `args` are those of the autograd engine."""
        self._depth += 1
        self._trainers.note()
        if self._optimizers or is_traced():
            return
        roots, _, _, is_differentiated, inputs = args[:5]
        leaves = [unwrapped(one) for one in inputs or _leaves_of(roots)]
        if self._trainers.others:
            self._leaves.clear()
            self._before.clear()
            leaves = []
        found = {
            address: weakref.ref(leaf)
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
            for address in addresses(leaf)
        }
        if self._depth == 1 and not (is_differentiated and _is_inner(roots)):
            self._begin_pass(found)
        self._leaves |= found
        if self._mode is not None:
            self._mode.updates = self

    def _begin_pass(self, found: dict[int, weakref.ref[Any]]) -> None:
        if self._written:  # not all of them: some got no gradient
            self._count(UPDATES)
        now = {(id(leaf()), address) for address, leaf in found.items()}
        if self._before and self._before.isdisjoint(now):
            self._replaced += 1
        self._before = now
        self._passes += 1
        self._leaves.clear()
        if self._passes > PATIENCE and not self._made_optimizer and self.counted_by != UPDATES:
            self._count(self._unseen)

    @guarded("the gradients of a backward pass")
    def end_backward(self, found: Any) -> None:
        """Note that a backward pass has ended; `found` are the gradients that it returned."""
        self._depth -= 1
        if self._optimizers or self._depth or is_traced() or self._trainers.others:
            return
        returned = [unwrapped(one) for one in found or ()]
        self._due = {
            one
            for one, leaf in self._leaves.items()
            if returned or _gradient_of(leaf()) is not None
        }
        held = [_gradient_of(leaf()) for leaf in self._leaves.values()]
        self._gradients = set(_all_addresses((held, returned)))
        if self._written and self._written >= self._due:  # in the pass
            self._count(UPDATES)

    # -- updates by the program -----------------------------------------------------------------

    @guarded("an update of parameters")
    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operator that ran."""
        schema = getattr(func, "_schema", None)
        if schema is None or not self._leaves:
            return
        if not self._depth and not self._has_read:
            read = (*args, *kwargs.values())
            self._has_read = not self._gradients.isdisjoint(_all_addresses(read))
        if not schema.is_mutable or any(word in schema.name for word in _NOT_UPDATES):
            return
        written = [
            args[at] if at < len(args) else kwargs.get(one.name)
            for at, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        self._note_written(_all_addresses(written))

    @guarded("an update of parameters by a kernel")
    def launched(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note a kernel outside PyTorch's operators: an update has parameters and gradients."""
        found = set(_all_addresses(tensors))
        if not self._depth and not self._gradients.isdisjoint(found):
            self._has_read = True
            self._note_written(found)

    def _note_written(self, written: Iterable[int]) -> None:
        found = {one for one in written if one in self._leaves and self._is_due(one)}
        if not found:
            return
        if not self._written and not self._depth:
            self._updating()
        self._written |= found
        if not self._depth and self._written >= self._due:
            self._count(UPDATES)

    def _is_due(self, address: int) -> bool:
        """True if an update may follow: a gradient was read, or is there in the backward pass.

        An input that was made to require gradients is a leaf as well, whose memory is reused.
        """
        if self._leaves[address]() is None:
            return False
        if not self._depth:
            return self._has_read
        return _gradient_of(self._leaves[address]()) is not None

    def _count(self, by: str) -> None:
        self.counted_by = by
        self._updating()
        self._end()

    # -- the end --------------------------------------------------------------------------------

    @property
    def _unseen(self) -> str:
        return REPLACED if self._replaced else BACKWARD

    def uncounted(self) -> int:
        """Steps of a program that ends without a visible one: 0 if it made an optimizer.

        A process that trains nothing, such as a compiler's, has none.
        """
        if self._made_optimizer or self.counted_by or not self._passes:
            return 0
        self.counted_by = self._unseen
        return self._replaced + 1 if self._replaced else self._passes

    @property
    def trained(self) -> _Trained:
        """The parameters that were last trained, in the form of an optimizer."""
        return _Trained(self._leaves.values())


class _Trained:
    """Parameters that the program updates by itself."""

    def __init__(self, leaves: Iterable[weakref.ref[Any]]) -> None:
        self._leaves = list(leaves)
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, as of an optimizer."""
        return [{"params": [leaf for one in self._leaves if (leaf := one()) is not None]}]


def _is_inner(roots: Iterable[Any]) -> bool:
    """True for a differentiated pass that is part of a forward pass, as of a gradient penalty.

    Those of `torch.func.grad` always are differentiated.
    """
    transforms: Any = torch._C._functorch
    if not all(map(transforms.is_functorch_wrapped_tensor, roots)):
        return True
    running = importlib.import_module("torch._functorch.pyfunctorch")
    found = running.retrieve_all_functorch_interpreters()
    return len([one for one in found if one.key() == transforms.TransformType.Grad]) > 1


def _leaves_of(roots: Iterable[Any]) -> list[Any]:
    """The tensors whose gradients a backward pass from `roots` adds up."""
    waiting = [one.grad_fn if isinstance(one, torch.Tensor) else one.node for one in roots]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


def _gradient_of(tensor: Any) -> Any:
    return tensor.grad if tensor is not None and tensor.is_leaf else None


def _all_addresses(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        for one in value if isinstance(value, list | tuple) else (value,):
            yield from addresses(one)
