"""Gives outputs computed values, made-up values, or a note that they are unknown.

A value that is the same everywhere is a constant, noted on its storage at no cost of memory. A
comparison of unknown floats is true everywhere, so that it selects as much as possible:
`x[x > 0]` keeps all of x, noted as "at most". Equalities of unknown floats are false, and all
unknown floats are finite. Few booleans are written with one fill; more of them are noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.lines import Unknowns, calling_package
from tuner.emulator.inside.made_up import MadeUp, spreads
from tuner.emulator.inside.notes import (
    ASSUMED,
    AT_MOST,
    FLOATS,
    LIMITS,
    MADE_UP,
    MEDIUM,
    SMALL,
    STRIDED,
    UNIFORM,
    alias,
    constant,
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
from tuner.emulator.inside.operators import (
    CHOOSING,
    COPYING,
    FINITE,
    GROWING,
    LARGEST,
    MEETING,
    POINTWISE,
    SMALLER,
    Operator,
)
from tuner.emulator.inside.readbacks import Reading, compute, mend

# This many made-up floats stand for all unknown floats in a comparison.
SAMPLE = 4096
# LLM.int8() treats columns with values from 6 on apart: none is assumed to have any.
_NO_OUTLIERS = "bitsandbytes"


def compare(operator: Operator, args: tuple[Any, ...], out: torch.Tensor, made_up: MadeUp) -> bool:
    """Writes the result of a comparison of unknown floats; False if the floats are known."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not any(_is_undecided(tensor, alone=len(tensors) == 1) for tensor in tensors):
        return False
    sample = _on_sample(operator, args, made_up)
    value, origin = bool(sample.all()), ASSUMED
    if operator.name not in FINITE and _may_differ(tensors, args):
        if operator.orders:
            value = bool(sample.any()) or calling_package() != _NO_OUTLIERS
        origin = AT_MOST if value else ASSUMED if operator.orders else MADE_UP
    fill(out, value, origin)
    return True


def _is_undecided(tensor: torch.Tensor, *, alone: bool) -> bool:
    """True if a comparison with these floats has no computed result.

    Few floats, which may be made up, are compared as they are, except several made-up ones with a
    number.
    """
    if not tensor.is_cuda or tensor.dtype not in FLOATS:
        return False
    note = noted(tensor)
    if note is not None and note.state == UNIFORM:
        return False
    made_up = note is not None and note.origin is not None and alone and tensor.numel() > 1
    return made_up or not is_known(tensor)


def _may_differ(tensors: list[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """False if the result cannot depend on the values: with infinity, or with themselves."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in args):
        return False
    return len(tensors) < 2 or tensors[0].data_ptr() != tensors[1].data_ptr()


def _on_sample(operator: Operator, args: tuple[Any, ...], made_up: MadeUp) -> torch.Tensor:
    """The operator's result on noise; equal tensors get equal noise."""
    values: list[Any] = []
    seen: list[int] = []
    for value in args:
        if not isinstance(value, torch.Tensor):
            values.append(value)
        elif value.numel() == 1 and (not value.is_cuda or is_known(value)):
            values.append(alias(value) if value.is_cuda else value)
        else:
            address = value.data_ptr()
            if address not in seen:
                seen.append(address)
            values.append(made_up.noise(empty(SAMPLE), seen.index(address)))
    result: torch.Tensor = operator.func(*values)
    return result


def combine(operator: Operator, args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """Writes the booleans that follow from constants; False if a tensor is not a constant."""
    values: list[Any] = []
    origin: str | None = None
    for value in args:
        if isinstance(value, torch.Tensor):
            note = noted(value) if value.is_cuda else None
            one = None if note is None else constant(value, note)
            if note is None or one is None:
                return False
            values.append(one)
            origin = worst(origin, note.origin)
        else:
            values.append(value)
    if not values or not isinstance(values[0], torch.Tensor):
        return False
    result = bool(values[0] if operator.reduces else operator.func(*values))
    fill(out, result, after(operator, origin, out))
    return True


def carry(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor
) -> None:
    """Notes that `out`, computed from a constant, is a constant."""
    source = args[0]
    if not isinstance(source, torch.Tensor) or not source.is_cuda or not out.is_cuda:
        return
    note = noted(source)
    one = None if note is None else constant(source, note)
    if one is None or any(isinstance(value, torch.Tensor) for value in args[1:]):
        return
    if operator.name not in COPYING:
        one = operator.func(one, *args[1:], **kwargs)
    note_uniform(out, one.to(out.dtype).item())


def after(
    operator: Operator, origin: str | None, out: torch.Tensor, *, is_bounded: bool = False
) -> str | None:
    """The origin of a result whose inputs have the origin `origin` at worst.

    `is_bounded` if some are at most as large as they seem.
    """
    if origin is None:
        return None
    name = operator.functional_name
    if origin == ASSUMED and name in LARGEST and out.dtype not in FLOATS:
        return MADE_UP  # even choices say nothing of the largest load
    if name in FINITE or (name in CHOOSING and out.dtype not in FLOATS):
        return ASSUMED
    is_bounded = is_bounded or origin == AT_MOST
    return MADE_UP if is_bounded and name not in GROWING else origin


def of_choices(operator: Operator, args: list[Any], result: torch.Tensor) -> str:
    """The origin of booleans that are computed from even choices.

    Where choices meet labels or another mask, no bound is known. Counts that are compared with a
    number tell how many candidates were chosen: even choices choose the most, and a rank is below a
    number as often as there are ranks.
    """
    first = args[0]
    tensors = [one for one in args if isinstance(one, torch.Tensor) and one.dim()]
    if operator.name in MEETING and len(tensors) > 1 and tensors[0].shape == tensors[1].shape:
        return MADE_UP
    if not operator.orders or not isinstance(first, torch.Tensor):
        return ASSUMED
    if operator.name in SMALLER and result.all():
        return AT_MOST
    ranks = torch.arange(first.shape[-1] if first.dim() else 0)
    if first.dim() and torch.equal(
        first.sort(-1).values, ranks.to(first.dtype).expand(first.shape)
    ):
        return ASSUMED
    most = min(first.numel(), int(first.sum()))
    is_most = operator.name not in SMALLER and int(result.sum()) == most
    return ASSUMED if is_most else MADE_UP


def fill(out: torch.Tensor, value: Any, origin: str | None = None) -> None:
    """Gives a new tensor one value everywhere: few elements are written, more are noted."""
    if not out.numel():
        return
    if out.numel() <= (SMALL if out.dtype in FLOATS else LIMITS.get(out.dtype, 0)):
        alias(out).fill_(value)
        note_origin(out, origin)
    else:
        note_uniform(out, value, origin)


def write_out(tensor: torch.Tensor) -> bool:
    """Writes a constant into memory, so that parts of it can change; False if it is large."""
    note = noted(tensor)
    one = None if note is None else constant(tensor, note)
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if note is None or one is None or count > (MEDIUM if tensor.dtype in FLOATS else 0):
        return False
    alias(tensor.as_strided((count,), (1,), 0)).copy_(one.expand(count))
    forget_note(tensor)
    note_known(tensor)
    note_origin(tensor, note.origin)
    return True


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
        self.spreads = spreads(made_up)

    # -- operators that return new tensors ---------------------------------------------------------

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
            name = func.func._schema.name  # `zeros`, `ones`, `full` and the like
            value: Any = int("ones" in name)
            if "full" in name:
                value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
            fill(out, value)
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
        integers = any(  # in a sparse tensor they are its elements' places
            isinstance(one, _Tensor) and (one.dtype in LIMITS or one.layout is not STRIDED)
            for one in outs
        )
        reading = Reading(self.made_up if integers else None)
        if not operator.computes or _is_too_many(operator, outs):
            reading.unknown = True
        cpu_args = reading.positional(operator, args)
        cpu_kwargs = reading.named(kwargs)
        if reading.guessed and operator.full_name in self.spreads:
            self.spreads[operator.full_name](args, kwargs, out)
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
            is_noted = getattr(out, "is_cuda", False) and (operator.fills or noted(out) is not None)
            if not isinstance(out, _Tensor) or is_wanted(out) or is_noted:
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
