"""Values where they decide shapes: what each operator leaves in device memory that launches do not.

The real CUDA operator always runs: its outputs and temporaries come from PyTorch's allocator, as on a
device. Then its values are computed on the CPU, on aliases of device memory, and written where it would
have written them: integers and booleans for real, few floats for real where their inputs are known. The
rest is made up (see made_up.py) or left alone: many floats are never computed and never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tuner.emulator.inside.aliases import (
    FLOATS,
    LIMITS,
    MEDIUM,
    SMALL,
    alias,
    covers_storage,
    forget_note,
    is_known,
    note_known,
    note_unknown,
    noted,
)
from tuner.emulator.inside.made_up import MadeUp, spreads
from tuner.emulator.inside.operators import EMPTY, ZEROS, Operator
from tuner.emulator.inside.reading import Reading, compute, mend
from tuner.emulator.inside.readbacks import Readbacks, Unreadable
from tuner.emulator.inside.transfers import Transfers

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Tensor = torch.Tensor
_EMPTY_ZEROED = 65_536


class Values:
    """Decides once per operator what its values need, and does it at each call."""

    def __init__(self, seed: int = 0) -> None:
        self.unknown: Counter[str] = Counter()
        """What mattered for shapes and could not be computed, by name."""
        self.failures: dict[str, str] = {}
        """By operator: why the CPU could not compute it, for those who debug the emulator."""
        self._made_up = MadeUp(seed)
        self._spreads = spreads(self._made_up)
        self._readbacks = Readbacks(self._made_up)
        self._counts = self._readbacks.counts()
        self._transfers = Transfers(self._made_up, self.unknown)
        self._special: dict[str, Callable[[Operator], Handler]] = {
            "aten::_to_copy": self._to_copy,
            "aten::copy_": self._copy,
            "aten::_local_scalar_dense": self._item,
            "aten::equal": self._equal,
            "aten::histc": self._histogram,
        }

    def handler(self, func: Any) -> Handler | None:
        """What to call instead of `func`, with (func, args, kwargs); None: `func` itself does."""
        if not isinstance(func, torch._ops.OpOverload):
            return None  # operators that take functions: what is in them comes back one by one
        operator = Operator(func)
        if operator.passes:
            return None
        if operator.full_name in self._special:
            return self._special[operator.full_name](operator)
        if operator.is_foreach:
            return self._foreach(operator)
        if operator.name in EMPTY:
            return self._empty
        if operator.full_name in self._counts:
            return self._counted(operator)
        if operator.mutates:
            return self._written(operator)
        return self._returned(operator)

    # -- operators that return new tensors ---------------------------------------------------------

    def _returned(self, operator: Operator) -> Handler:
        settle = self._settle

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if isinstance(out, _Tensor):
                if _is_wanted(out):
                    settle(operator, args, kwargs, out)
            elif isinstance(out, tuple | list):
                for one in out:
                    if isinstance(one, _Tensor) and _is_wanted(one):
                        settle(operator, args, kwargs, out)
                        break
            return out

        return call

    def _settle(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Gives the tensors of `out` their values; returns them, those of a wrong size anew."""
        single = isinstance(out, _Tensor)
        outs = (out,) if single else out
        integers = any(isinstance(one, _Tensor) and one.dtype in LIMITS for one in outs)
        reading = Reading(self._made_up if integers else None)
        if not operator.computes or _is_too_many(operator, outs):
            reading.unknown = True
        cpu_args = reading.positional(operator, args)
        cpu_kwargs = reading.named(kwargs)
        if reading.guessed and operator.full_name in self._spreads:
            self._spreads[operator.full_name](args, kwargs, out)
            return out
        computed = None
        if not reading.unknown:
            computed = self._computed(operator, cpu_args, cpu_kwargs, outs)
        if computed is None:
            self._leave(outs)
            return out
        results = (computed,) if isinstance(computed, _Tensor) else computed
        inputs = [cpu_args, list(cpu_kwargs.values())]
        settled = [
            self._put(one, result, inputs, guessed=reading.guessed)
            for one, result in zip(outs, results, strict=True)
        ]
        return settled[0] if single else type(out)(settled) if type(out) in {tuple, list} else out

    def _computed(
        self, operator: Operator, args: list[Any], kwargs: dict[str, Any], outs: Any
    ) -> Any:
        """What the CPU computes; None, with a note of why, where it cannot."""
        device = next(
            (one.device for one in outs if isinstance(one, _Tensor)), torch.device("cuda")
        )
        try:
            return compute(operator, args, kwargs, device)
        except Exception as error:  # noqa: BLE001 - whatever an operator raises: it is noted and reported
            self.failures[operator.full_name] = f"{type(error).__name__}: {error}"
            if any(isinstance(one, _Tensor) and one.dtype in LIMITS for one in outs):
                self.unknown[f"{operator.full_name} (the CPU cannot compute it)"] += 1
            return None

    def _put(self, out: Any, result: Any, inputs: list[Any], *, guessed: bool) -> Any:
        """Writes what was computed where it is wanted; a new tensor if the kernel's has another size."""
        if not isinstance(out, _Tensor) or not out.is_cuda:
            return out
        count = out.numel()
        if out.dtype in FLOATS:
            if guessed:
                self._made_up.write_finite(out)
            elif count <= MEDIUM:
                if count <= SMALL:
                    mend(result, inputs)
                alias(out).copy_(result)
                if count > SMALL:
                    note_known(out)
        elif out.shape != result.shape:
            self.unknown["size that the device's code got wrong"] += 1
            out = torch.empty(result.shape, dtype=out.dtype, device=out.device)
            alias(out).copy_(result)
        elif count <= LIMITS.get(out.dtype, 0):
            alias(out).copy_(result)
        return out

    def _leave(self, outs: Any) -> None:
        """For what was not computed: few floats are made up, integers noted as unknown."""
        for one in outs:
            if not isinstance(one, _Tensor) or not one.is_cuda:
                continue
            if one.dtype in FLOATS:
                self._made_up.write_finite(one)
            elif one.dtype in LIMITS:
                note_unknown(one)

    # -- operators that write into their arguments -------------------------------------------------

    def _written(self, operator: Operator) -> Handler:
        settle = self._settle_written

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if not isinstance(out, _Tensor) or _is_wanted(out):
                settle(operator, args, kwargs)
            return out

        return call

    def _settle_written(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Writes values into the arguments that the operator writes."""
        targets = [
            one
            for value in (
                *(args[i] for i in operator.written_positions if i < len(args)),
                *(kwargs[name] for name in operator.written_names if name in kwargs),
            )
            for one in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(one, _Tensor) and one.is_cuda
        ]
        if not targets or (operator.fills and _is_plain(targets[0])):
            return
        reading = Reading(self._made_up if any(one.dtype in LIMITS for one in targets) else None)
        reading.unknown = not operator.computes or any(
            one.numel() > (SMALL if operator.is_random else MEDIUM)
            if one.dtype in FLOATS
            else one.numel() > LIMITS.get(one.dtype, 0)
            or not (operator.overwrites or is_known(one))
            for one in targets
        )
        cpu_args: list[Any] = []
        for position, value in enumerate(args):
            if reading.unknown:
                break
            if (
                position in operator.written_positions
                and isinstance(value, _Tensor)
                and value.is_cuda
            ):
                if not operator.overwrites and not is_known(value):
                    reading.unknown = True
                    break
                cpu_args.append(alias(value))
            else:
                cpu_args.append(reading.value(value))
        cpu_kwargs = {
            name: _aliases(value) if name in operator.written_names else reading.value(value)
            for name, value in kwargs.items()
        }
        done = (
            not reading.unknown
            and self._computed(operator, cpu_args, cpu_kwargs, targets) is not None
        )
        for target in targets:
            self._note_written(operator, target, done=done)

    def _note_written(self, operator: Operator, target: torch.Tensor, *, done: bool) -> None:
        if target.dtype not in FLOATS:
            if not done:
                note_unknown(target)
            elif operator.overwrites and noted(target) and covers_storage(target):
                forget_note(target)
        elif not done:
            forget_note(target)
            self._made_up.write_finite(target)
        elif target.numel() > SMALL and covers_storage(target):
            note_known(target)

    def _foreach(self, operator: Operator) -> Handler:
        """Operators on lists: numbers are computed, other floats stay as they are, few are made up."""
        returned, written = self._returned(operator), self._settle_written

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            numbers = all(one.numel() == 1 for one in args[0])
            if not operator.mutates and numbers:
                return returned(func, args, kwargs)
            out = func(*args, **kwargs)
            if operator.mutates:
                if numbers and args[0] and args[0][0].is_cuda:
                    written(operator, args, kwargs)
            elif isinstance(out, list | tuple):
                self._leave(out)
            return out

        return call

    def _empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Memory that was in use before would give a kernel's output values that no kernel wrote."""
        out = func(*args, **kwargs)
        if out.is_cuda:
            if out.dtype in FLOATS:
                self._made_up.write_finite(out)
            elif out.dtype in LIMITS and out.nbytes <= _EMPTY_ZEROED:
                alias(out).zero_()
        return out

    # -- operators that ask the device for a count ---------------------------------------------------

    def _counted(self, operator: Operator) -> Handler:
        count = self._counts[operator.full_name]

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args[0].is_cuda:
                return func(*args, **kwargs)
            try:
                counts = count(*args, **kwargs)
            except Unreadable:
                self.unknown[operator.full_name] += 1
                counts = [(0, 4), (0, 8), (1, 1)]
            out = self._readbacks.call(func, args, kwargs, counts)
            if operator.mutates:
                if _is_wanted(out):
                    self._settle_written(operator, args, kwargs)
                return out
            return self._settle(operator, args, kwargs, out)

        return call

    def _equal(self, operator: Operator) -> Handler:
        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            one, other = args[:2]
            if not one.is_cuda or one.shape != other.shape:
                return func(*args, **kwargs)
            same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
            if is_known(one) and is_known(other):
                same = func(alias(one), alias(other))
            self._readbacks.call(func, args, kwargs, [(int(same), 1)])
            return same

        return call

    def _histogram(self, operator: Operator) -> Handler:
        """The CPU has no histogram of integers: it counts them as floats."""
        returned = self._returned(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if not source.is_cuda or source.dtype in FLOATS or not is_known(source):
                return returned(func, args, kwargs)
            out = func(*args, **kwargs)
            alias(out).copy_(func(alias(source).double(), *args[1:], **kwargs))
            return out

        return call

    # -- between host and device ---------------------------------------------------------------------

    def _to_copy(self, operator: Operator) -> Handler:
        returned, transfers = self._returned(operator), self._transfers

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if source.is_cuda:
                out = returned(func, args, kwargs)
                if out.is_cpu:
                    transfers.to_host(out, source, fresh=True)
                return out
            target = kwargs.get("device")
            if target is None or target.type != "cuda":
                return func(*args, **kwargs)
            args = (transfers.stand_in(source, kwargs), *args[1:])
            out = func(*args, **kwargs)
            transfers.to_device(out, source)
            return out

        return call

    def _copy(self, operator: Operator) -> Handler:
        written, transfers = self._written(operator), self._transfers

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, source = args[:2]
            if target.is_cuda:
                if source.is_cuda:
                    return written(func, args, kwargs)
                out = func(*args, **kwargs)
                if source.is_cpu:
                    transfers.to_device(target, source.expand(target.shape))
                return out
            out = func(*args, **kwargs)
            if source.is_cuda and target.is_cpu:
                transfers.to_host(target, source.expand(target.shape), fresh=False)
            return out

        return call

    def _item(self, operator: Operator) -> Handler:
        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = func(*args, **kwargs)
            return self._transfers.item(args[0], value) if args[0].is_cuda else value

        return call


def _is_wanted(tensor: torch.Tensor) -> bool:
    """Whether values may be written into this tensor: of CUDA, integers or not too many floats."""
    if tensor.dtype in FLOATS:
        return tensor.numel() <= MEDIUM and tensor.is_cuda
    return tensor.is_cuda and tensor.dtype in LIMITS


def _is_too_many(operator: Operator, outs: Any) -> bool:
    """Whether nothing of `outs` is worth to be computed."""
    for one in outs:
        if not isinstance(one, _Tensor):
            continue
        if one.dtype in FLOATS:
            few = operator.is_random or operator.name in ZEROS
            if one.numel() <= (SMALL if few else MEDIUM):
                return False
        elif one.numel() <= LIMITS.get(one.dtype, 0):
            return False
    return True


def _is_plain(target: torch.Tensor) -> bool:
    """Whether a fill can be left out: of floats that nobody knows."""
    return target.dtype in FLOATS and target.numel() > SMALL and noted(target) is None


def _aliases(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, list | tuple):
        return type(value)([_aliases(one) for one in value])
    return value
