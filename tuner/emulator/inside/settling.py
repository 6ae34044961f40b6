"""Gives outputs computed values, made-up values, or a note that they are unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.lines import Unknowns
from tuner.emulator.inside.made_up import MadeUp, Spread, spreads
from tuner.emulator.inside.notes import (
    ASSUMED,
    AT_MOST,
    FLOATS,
    LIMITS,
    MEDIUM,
    SMALL,
    STRIDED,
    UNIFORM,
    alias,
    covers_storage,
    forget_note,
    is_known,
    note_known,
    note_origin,
    note_uniform,
    note_unknown,
    noted,
    origin_of,
    parts_of,
    worst,
)
from tuner.emulator.inside.operators import POINTWISE, Operator
from tuner.emulator.inside.readbacks import Reading, compute, mend
from tuner.emulator.inside.uniform import (
    after,
    carry,
    combine,
    compare,
    fill,
    of_choices,
    write_out,
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Tensor = torch.Tensor
_EMPTY_ZEROED = 65_536


class Settling:
    """Calls the real operator, and settles the values that its kernels did not write."""

    def __init__(self, made_up: MadeUp) -> None:
        self.made_up = made_up
        self.unknowns = Unknowns()
        self.failures: dict[str, str] = {}
        """The reason why the CPU could not compute an operator, by operator."""
        self._spreads = spreads(made_up)

    # -- operators that return new tensors ---------------------------------------------------------

    def spread_of(self, full_name: str) -> Spread | None:
        """The function that writes the indices this operator chooses by unknown floats, if any."""
        return self._spreads.get(full_name)

    def returned(self, operator: Operator) -> Handler:
        """The handler of an operator that returns new tensors."""
        settle = self.settle
        carries = operator.name in POINTWISE

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if isinstance(out, _Tensor):
                if is_wanted(out):
                    return settle(operator, args, kwargs, out)
                if carries:
                    carry(operator, args, kwargs, out)
            elif isinstance(out, tuple | list):
                for one in out:
                    if isinstance(one, _Tensor) and is_wanted(one):
                        return settle(operator, args, kwargs, out)
            return out

        return call

    def constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that returns a tensor with one value everywhere."""
        out = func(*args, **kwargs)
        if out.is_cuda and (out.dtype in FLOATS or out.dtype in LIMITS):
            fill(out, _constant_of(func.func._schema.name, args, kwargs))
        return out

    def settle(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Gives the tensors of `out` their values; returns them, new ones if a size was wrong."""
        if out is None:
            return None
        single = isinstance(out, _Tensor)
        if single and out.dtype is torch.bool and self._is_uniform(operator, args, out):
            return out
        outs = (out,) if single else out
        integers = any(isinstance(one, _Tensor) and _has_integers(one) for one in outs)
        reading = Reading(self.made_up if integers else None)
        if not operator.computes or _is_too_many(operator, outs):
            reading.unknown = True
        cpu_args = reading.positional(operator, args)
        cpu_kwargs = reading.named(kwargs)
        if reading.guessed and operator.full_name in self._spreads:
            self._spreads[operator.full_name](args, kwargs, out)
            for one in outs:
                if one.dtype in LIMITS:
                    note_origin(one, ASSUMED)
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
            self._put(operator, one, result, inputs, reading)
            for one, result in zip(outs, results, strict=False)
        ]
        return settled[0] if single else type(out)(settled) if type(out) in {tuple, list} else out

    def _is_uniform(self, operator: Operator, args: tuple[Any, ...], out: torch.Tensor) -> bool:
        """True if these booleans are the same everywhere, and have been settled."""
        if operator.compares and compare(operator, args, out, self.made_up):
            return True
        return (operator.compares or operator.is_logical) and combine(operator, args, out)

    def _computed(
        self, operator: Operator, args: list[Any], kwargs: dict[str, Any], outs: Any
    ) -> Any:
        """The CPU's result; None if it cannot compute it, with the reason in `failures`."""
        device = next(
            (one.device for one in outs if isinstance(one, _Tensor)), torch.device("cuda")
        )
        try:
            return compute(operator, args, kwargs, device)
        except Exception as error:  # noqa: BLE001 - any exception of an operator is noted and reported
            self.failures[operator.full_name] = f"{type(error).__name__}: {error}"
            if not any(isinstance(one, _Tensor) and one.dtype in LIMITS for one in outs):
                operator.computes = False  # it would fail again
            else:
                self.unknowns.read(f"{operator.full_name} (the CPU cannot compute it)")
            return None

    def _put(
        self, operator: Operator, out: Any, result: Any, inputs: list[Any], reading: Reading
    ) -> Any:
        """Writes a computed result to its output, or to a new tensor if the size differs."""
        if not isinstance(out, _Tensor) or not out.is_cuda:
            return out
        if out.layout is not STRIDED:
            self._put_sparse(operator, out, result, inputs, reading)
            return out
        if out.shape != result.shape:
            if "unique" in operator.name and 0 in (out.numel(), result.numel()):
                return out  # unrequested inverse and counts: CUDA and CPU differ
            if operator.name == "aten::log_sigmoid_forward" and out.numel() == 0:
                return out  # a buffer that only the CPU keeps for the backward pass
            self.unknowns.read(f"{operator.full_name} (size put right afterwards)")
            out = empty(result.shape, dtype=out.dtype, device=out.device)
        count = out.numel()
        origin = after(operator, reading.origin, out, is_bounded=reading.is_bounded)
        if origin == ASSUMED and out.dtype is torch.bool:
            origin = of_choices(operator, inputs[0], result)
        if out.dtype not in FLOATS:
            if count <= LIMITS.get(out.dtype, 0):
                alias(out).copy_(result)
                note_origin(out, origin)
        elif reading.guessed:
            self.made_up.write_finite(out)
        elif count <= MEDIUM:
            if count <= SMALL:
                mend(result, inputs)
            else:
                note_known(out)
            alias(out).copy_(result)
            note_origin(out, origin)
        return out

    def _put_sparse(
        self,
        operator: Operator,
        out: torch.Tensor,
        result: torch.Tensor,
        inputs: list[Any],
        reading: Reading,
    ) -> None:
        pairs = list(zip(parts_of(out), parts_of(result), strict=True))
        if any(one.shape != other.shape for one, other in pairs):
            self.unknowns.read(f"{operator.full_name} (elements of a sparse tensor)")
            self._leave((out,))
            return
        for one, other in pairs:
            self._put(operator, one, other, inputs, reading)

    def _leave(self, outs: Any) -> None:
        """For outputs that were not computed: make up few floats, note integers as unknown."""
        for one in outs:
            if not isinstance(one, _Tensor) or not one.is_cuda:
                continue
            if one.layout is not STRIDED:
                self._leave(parts_of(one))
                continue
            if one.dtype in FLOATS:
                self.made_up.write_finite(one)
            elif one.dtype in LIMITS:
                note_unknown(one)

    # -- operators that write into their arguments -------------------------------------------------

    def written(self, operator: Operator) -> Handler:
        """The handler of an operator that writes into its arguments."""
        settle = self.settle_written

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if not isinstance(out, _Tensor) or is_wanted(out) or _is_noted(out, operator):
                settle(operator, args, kwargs)
            return out

        return call

    def left(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that writes into lists of floats, and only remove their notes."""
        out = func(*args, **kwargs)
        for value in args:
            for one in value if isinstance(value, list | tuple) else (value,):
                _forget_floats(one)
        return out

    def settle_written(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Writes the values of the arguments that the operator writes into."""
        targets = [
            one
            for value in (
                *(args[i] for i in operator.written_positions if i < len(args)),
                *(kwargs[name] for name in operator.written_names if name in kwargs),
            )
            for one in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(one, _Tensor) and one.is_cuda
        ]
        if any(one.layout is not STRIDED for one in targets):
            self._leave(targets)
            return
        if not targets or (operator.fills and _is_filled(targets[0], args)):
            return
        reading = Reading(self.made_up if any(one.dtype in LIMITS for one in targets) else None)
        reading.unknown = not operator.computes or any(
            one.numel() > (SMALL if operator.is_random else MEDIUM)
            if one.dtype in FLOATS
            else one.numel() > LIMITS.get(one.dtype, 0)
            for one in targets
        )
        read = [
            None if i in operator.written_positions else reading.value(value)
            for i, value in enumerate(args)
            if not reading.unknown
        ]
        if not reading.unknown and not all(_is_open(operator, one) for one in targets):
            reading.unknown = True
        done = False
        if not reading.unknown:
            cpu_args = [
                _aliases(value) if i in operator.written_positions else read[i]
                for i, value in enumerate(args)
            ]
            cpu_kwargs = {
                name: _aliases(value) if name in operator.written_names else reading.value(value)
                for name, value in kwargs.items()
            }
            done = (
                not reading.unknown
                and self._computed(operator, cpu_args, cpu_kwargs, targets) is not None
            )
        for target in targets:
            self._note_written(operator, target, reading, done=done)

    def _note_written(
        self, operator: Operator, target: torch.Tensor, reading: Reading, *, done: bool
    ) -> None:
        if done and operator.overwrites and covers_storage(target):
            forget_note(target)
        if target.dtype not in FLOATS:
            if not done:
                note_unknown(target)
        elif not done:
            forget_note(target)
            self.made_up.write_finite(target)
        elif target.numel() > SMALL and covers_storage(target):
            note_known(target)
        if done:
            before = origin_of(target)
            is_bounded = reading.is_bounded or before == AT_MOST
            origin = worst(reading.origin, before)
            note_origin(target, after(operator, origin, target, is_bounded=is_bounded))

    def foreach(self, operator: Operator) -> Handler:
        """The handler of an operator on lists: single numbers are computed, other floats left."""
        returned, written = self.returned(operator), self.settle_written

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            numbers = all(one.numel() == 1 for one in args[0])
            if not operator.mutates and numbers:
                return returned(func, args, kwargs)
            out = func(*args, **kwargs)
            if operator.mutates:
                if numbers and args[0] and args[0][0].is_cuda:
                    written(operator, args, kwargs)
                else:
                    for one in args[0]:
                        _forget_floats(one)
            elif isinstance(out, list | tuple):
                self._leave(out)
            return out

        return call

    def empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that returns new memory: give few floats and integers valid values."""
        out = func(*args, **kwargs)
        if out.is_cuda and out.layout is STRIDED:
            if out.dtype in FLOATS:
                self.made_up.write_finite(out)
            elif out.dtype in LIMITS and out.nbytes <= _EMPTY_ZEROED:
                alias(out).zero_()
        return out


def is_wanted(tensor: torch.Tensor) -> bool:
    """True if a CUDA tensor may be given values: integers, or at most `MEDIUM` floats."""
    if not tensor.is_cuda:
        return False
    if tensor.dtype in FLOATS and tensor.layout is STRIDED:
        return tensor.numel() <= MEDIUM
    return tensor.dtype in LIMITS or tensor.layout is not STRIDED


def _has_integers(tensor: torch.Tensor) -> bool:
    """True if a tensor has integers; in a sparse tensor they are its elements' places."""
    return tensor.dtype in LIMITS or tensor.layout is not STRIDED


def _is_too_many(operator: Operator, outs: Any) -> bool:
    """True if all tensors of `outs` are too large to compute."""
    for one in outs:
        if not isinstance(one, _Tensor):
            continue
        if one.layout is not STRIDED:
            return False
        if one.dtype in FLOATS:
            if one.numel() <= (SMALL if operator.is_random else MEDIUM):
                return False
        elif one.numel() <= LIMITS.get(one.dtype, 0):
            return False
    return True


def _constant_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of the elements that `zeros`, `ones`, `full` and the like return."""
    if "full" not in name:
        return int("ones" in name)
    return kwargs["fill_value"] if "fill_value" in kwargs else args[-1]


def _is_noted(target: torch.Tensor, operator: Operator) -> bool:
    """True if a CUDA tensor with many floats has a note or gets one."""
    return target.is_cuda and (operator.fills or noted(target) is not None)


def _is_filled(target: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """True if a fill of more than `SMALL` floats needs no writing, after updating the note."""
    if target.dtype not in FLOATS or target.numel() <= SMALL:
        return False
    value = args[1] if len(args) > 1 else 0
    if covers_storage(target):
        if isinstance(value, _Tensor):
            forget_note(target)
        else:
            note_uniform(target, value)
        return True
    return noted(target) is None


def _is_open(operator: Operator, target: torch.Tensor) -> bool:
    """True if a tensor will be known after the operator: it is known now, or overwritten."""
    note = noted(target)
    if note is not None and note.state == UNIFORM:
        return (operator.overwrites and covers_storage(target)) or write_out(target)
    return operator.overwrites or is_known(target)


def _forget_floats(value: Any) -> None:
    if isinstance(value, _Tensor) and value.is_cuda and value.dtype in FLOATS:
        forget_note(value)


def _aliases(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, list | tuple):
        return type(value)([_aliases(one) for one in value])
    return value
