"""Values that cross between host and device.

The stand-in runtime copies small tensors and drops large ones without reading them, so that weights
cost no time and no memory. This module also copies large tensors of integers that decide shapes,
and makes floats that reach the host finite.

A value that the program reads may decide a size or a branch. The read is found in the source, and
its result is followed through the function's variables and, if it is returned, to the callers. It
isn't followed into functions that it is passed to, nor through attributes to other functions.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import empty

from tuner.emulator.inside.branches import is_quiet
from tuner.emulator.inside.flows import Tree
from tuner.emulator.inside.lines import BRANCH, SIZE, package_of, parsed
from tuner.emulator.inside.lines import UNKNOWN as UNREAD
from tuner.emulator.inside.notes import (
    ASSUMED,
    FLOATS,
    LIMITS,
    MADE_UP,
    SMALL,
    STRIDED,
    alias,
    constant,
    covers_storage,
    forget_note,
    is_known,
    note_known,
    note_origin,
    note_unknown,
    noted,
    origin_of,
    parts_of,
)
from tuner.emulator.inside.operators import Operator
from tuner.emulator.inside.rounds import last_name
from tuner.emulator.inside.settling import Handler, Settling

NOTHING = ""
_GRAVITY = (NOTHING, BRANCH, SIZE)

_MOST_CALLERS = 8
_MODULE = "torch/nn/modules/module.py"

_IDENTITY = frozenset({ast.Is, ast.IsNot})
"""Comparisons that read no value: `x is None`."""

_LOOKED_AT = frozenset(
    {"accelerate", "deepspeed", "evaluate", "lightning", "lightning_fabric", "peft"}
    | {"pytorch_lightning", "safetensors", "sentence_transformers", "torchmetrics", "transformers"}
    | {"trl", "unsloth", "unsloth_zoo"}
)
"""Packages whose own reads of floats were looked at: they log, save, compare scores, and cut what
they generate at its end. No size without a bound follows."""

_UNNAMED = ("forward", "__call__")
"""Functions whose calls don't have their name. Others, as hooks, may return to compiled code."""

_READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "to", "int", "float", "bool", "list", "asarray", "array"}
    | {"sum", "min", "max", "any", "all", "sorted", "copy_", "nonzero", "round", "abs"}
)
"""Calls that read by themselves; others, such as `one_hot`, only check what they are given."""

_SIZED = frozenset(
    {"range", "arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm"}
    | {"view", "reshape", "expand", "repeat", "repeat_interleave", "narrow", "split", "chunk"}
    | {"new_zeros", "new_ones", "new_full", "new_empty", "topk", "linspace", "unflatten", "tile"}
    | {"interpolate", "pad", "islice", "sample", "choices", "flatnonzero", "nonzero", "argwhere"}
    | {"compress", "filter", "unique", "broadcast_to", "resize_", "pad_sequence"}
)
_TENSOR_FIRST = frozenset(
    {"narrow", "split", "chunk", "topk", "tile", "reshape", "repeat_interleave", "interpolate"}
    | {"pad", "unflatten", "broadcast_to", "pad_sequence"}
)
"""Functions of `_MODULES` whose first argument is the tensor."""
_MODULES = frozenset({"torch", "F", "functional", "np", "numpy"})
_FINITE = frozenset({"isnan", "isfinite", "isinf"})
_COPIES = _FINITE | {"clone", "copy", "deepcopy", "detach", "warn"}
"""Calls that allocate no more than what they are given, as of the best weights so far."""

_KEEPS_SIZE = frozenset(
    {"linear_sum_assignment", "argsort", "argmax", "argmin", "sort", "shape", "size", "device"}
    | {"dtype", "ndim", "dim", "numel", "len", "isnan", "isfinite", "isinf"}
)
_ENDS = _KEEPS_SIZE | {"print", "log", "append", "format"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class Use(NamedTuple):
    """The use of a value that is read. `grows`: a size only grows with it. `loop`: in a `while`."""

    kind: str
    grows: bool = False
    loop: tuple[int, int] | None = None
    """The frame and the line of the innermost loop, if that is a `while`."""


def use_in(frame: FrameType | None) -> Use:
    """The use of the value that is read in `frame`."""
    own, kind, grows, callee = _outward(frame), NOTHING, True, ""
    loop: tuple[int, int] | None = None
    in_loop = goes_on = True
    for number, one in enumerate(itertools.islice(own, _MOST_CALLERS)):
        if package_of(one.f_code.co_filename) in _LOOKED_AT:
            break
        found = _site(one.f_code, one.f_lasti)
        if found is None:
            break
        if in_loop and found.loop:
            in_loop, loop = False, (id(one), found.loop) if found.loop > 0 else None
        goes_on = goes_on and (
            found.calls == callee or callee in _UNNAMED if number else found.reads
        )
        callee = one.f_code.co_name
        if goes_on:
            kind, grows = max(kind, found.kind, key=_GRAVITY.index), grows and found.grows
        goes_on = goes_on and found.returned
        if not (goes_on or in_loop):
            break
    return Use(kind, grows, loop)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames outside of PyTorch and the emulator, innermost first; none if PyTorch reads."""
    while frame is not None:
        package = package_of(frame.f_code.co_filename)
        if package == "torch" and frame.f_code.co_filename.endswith(_MODULE):
            return  # a module is moved
        if package not in ("", "python", "torch"):
            yield frame
        frame = frame.f_back


class _Site(NamedTuple):
    kind: str
    grows: bool
    returned: bool
    reads: bool
    calls: str
    """The name of the function that is called here."""
    loop: int
    """The line of the innermost loop if it is a `while`, minus that of a `for`, or 0."""


@functools.cache
def _site(code: CodeType, at: int) -> _Site | None:
    """The use of the result of an instruction; None if its source is not there."""
    source = _source(code.co_filename)
    place = next(itertools.islice(code.co_positions(), at // 2, None), None)
    if source is None or place is None or None in place:
        return None
    node = source.at(place)
    if node is None:
        return None
    found = _Following(source, source.around(node, _FUNCTIONS))
    kind = found.use(node)
    loop = source.around(node, (*_LOOPS, *_COMPREHENSIONS, *_FUNCTIONS))
    line = getattr(loop, "lineno", 0) if not isinstance(loop, _FUNCTIONS) else 0
    line = line if isinstance(loop, ast.While) else -line
    # A jump asks a tensor for its truth; a call may read for itself only.
    reads = "CALL" not in dis.opname[code.co_code[at]] or last_name(node.func) in _READS  # type: ignore[attr-defined]
    calls = last_name(node.func) if isinstance(node, ast.Call) else ""
    return _Site(kind, found.grows, found.returned, reads, calls, line)


class _Source(Tree):
    """A syntax tree whose nodes are found by their place."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._by_place = {p: _asked(node) for node in ast.walk(tree) if (p := _place(node))}
        # A call of a method on lines of its own begins with the method's name.
        self._by_end = {
            (place[1], place[3]): node
            for place, node in self._by_place.items()
            if isinstance(node, ast.Call)
        }

    def at(self, place: Any) -> ast.AST | None:
        """The innermost node that takes these lines and columns."""
        _, end_line, _, end_column = place
        return self._by_place.get(place) or self._by_end.get((end_line, end_column))


def _asked(node: ast.AST) -> ast.AST:
    """The condition of a statement: its jump has the place of the statement."""
    return node.test if isinstance(node, ast.If | ast.While | ast.Assert) else node


def _place(node: ast.AST) -> tuple[int, int, int, int] | None:
    if not isinstance(node, ast.expr | ast.If | ast.While | ast.Assert):
        return None
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0


@functools.cache
def _source(filename: str) -> _Source | None:
    tree = parsed(filename)
    return None if tree is None else _Source(tree)


class _Following:
    """Follows a value through one function."""

    def __init__(self, source: _Source, function: ast.AST) -> None:
        self._source, self._function = source, function
        self._names: dict[str, list[ast.AST]] = {}
        """By variable, and by attribute with a point before it: where it gets such a value."""
        self._masks: set[str] = set()
        """Names of the results of comparisons."""
        self.grows, self.returned = True, False

    def use(self, node: ast.AST) -> str:
        """The use of the value of `node`: the gravest."""
        found = [self._climb(node)]
        waiting = True
        while waiting and SIZE not in found:
            before = {name: len(places) for name, places in self._names.items()}
            for key, one in self._loads:
                if any(self._reaches(at, key, one) for at in self._names.get(key, ())):
                    found.append(self._climb(one))
            waiting = before != {name: len(places) for name, places in self._names.items()}
        return max(found, key=_GRAVITY.index)

    @functools.cached_property
    def _loads(self) -> list[tuple[str, ast.AST]]:
        """The variables and attributes that are read, without variables of functions inside."""
        found: list[tuple[str, ast.AST]] = []
        for one in ast.walk(self._function):
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load):
                key, inside = _key(one), self._source.around(one, _FUNCTIONS)
                if inside is self._function or key[0] == "." or key not in _locals(inside):
                    found.append((key, one))
        return found

    def _reaches(self, at: ast.AST, key: str, load: Any) -> bool:
        """True if what is set by a statement may be read here: below it, or around a loop."""
        if key[0] == "." or self._source.around(load, _FUNCTIONS) is not self._function:
            return True
        line = load.lineno
        if line >= at.lineno:  # type: ignore[attr-defined]
            return True
        around = itertools.takewhile(lambda one: one is not self._function, self._source.up(at))
        return any(isinstance(one, _LOOPS) and one.lineno <= line for one in around)

    def _set(self, names: set[str], at: ast.AST) -> None:
        for name in names:
            places = self._names.setdefault(name, [])
            if at not in places:
                places.append(at)

    def _climb(self, node: ast.AST) -> str:
        """The use of a value in its statement; names that it is given to are followed."""
        grows, child = True, node
        for parent in self._source.up(node):
            if isinstance(parent, ast.stmt):
                return self._in_statement(parent, child, grows=grows)
            found = self._in_expression(parent, child, grows=grows)
            if found is not None:
                return found
            grows = grows and _grows(parent, child)
            child = parent
        return NOTHING

    def _in_expression(self, parent: ast.AST, child: ast.AST, *, grows: bool) -> str | None:
        """The use of a value in `parent`; None if it is that of `parent` itself."""
        if isinstance(parent, ast.Call) and child is not parent.func:
            is_end = last_name(parent.func) in _ENDS
            return self._size(grows=grows) if _sizes(parent, child) else NOTHING if is_end else None
        if isinstance(parent, ast.Compare | ast.Attribute | ast.Tuple):
            is_set = isinstance(parent, ast.Tuple) and self._is_set(parent, child)
            return NOTHING if is_set or _asks(parent) else None
        if isinstance(parent, ast.Slice):
            return self._size(grows=grows and child is parent.upper)
        if isinstance(parent, ast.Subscript) and child is parent.slice:
            is_mask = isinstance(child, ast.Compare | ast.BoolOp | ast.UnaryOp)
            is_mask = is_mask or getattr(child, "id", "") in self._masks
            return self._size(grows=False) if is_mask else NOTHING
        if isinstance(parent, ast.comprehension):
            if child is not parent.iter:
                return self._size(grows=False)
            self._set(_targets(parent.target), child)
        return None

    def _is_set(self, parent: ast.Tuple, child: ast.AST) -> bool:
        """True if a part of several gets a name, which is followed: `b` of `a, b = 1, x`."""
        statement = next(self._source.up(parent))
        targets = getattr(getattr(statement, "targets", [None])[0], "elts", ())
        if len(targets) != len(parent.elts) or any(isinstance(t, ast.Starred) for t in targets):
            return False
        for target, one in zip(targets, parent.elts, strict=True):
            if one is child:
                self._set(_targets(target), statement)
        return True

    def _in_statement(self, statement: ast.stmt, child: ast.AST, *, grows: bool) -> str:
        if isinstance(statement, ast.Return):
            self.returned = True
        elif isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
            if child is getattr(statement, "value", None):
                self._set(set().union(*map(_targets, targets)), statement)
                if any(isinstance(one, ast.Compare) for one in ast.walk(child)):
                    self._masks.update(*map(_targets, targets))
                self.grows = self.grows and grows
        elif isinstance(statement, ast.For):
            self._set(_targets(statement.target), statement)
        elif isinstance(statement, ast.If | ast.While):
            return self._branch(statement)
        return NOTHING

    def _branch(self, statement: ast.If | ast.While) -> str:
        """The use of a condition: names that are set under it depend on it as well."""
        if any(
            isinstance(n, ast.Call) and last_name(n.func) in _FINITE
            for n in ast.walk(statement.test)
        ):
            return NOTHING  # floats are finite
        if isinstance(statement, ast.While):
            return BRANCH
        inside = [node for one in (*statement.body, *statement.orelse) for node in ast.walk(one)]
        for node in inside:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._set(set().union(*map(_targets, targets)), node)
            elif self._works(node):
                return self._size(grows=False)
        self.grows = False
        return BRANCH

    def _works(self, node: ast.AST) -> bool:
        """True for a call that may allocate memory."""
        if not isinstance(node, ast.Call) or last_name(node.func) in _COPIES or is_quiet(node):
            return False
        return not isinstance(next(self._source.up(node)), ast.Raise)

    def _size(self, *, grows: bool) -> str:
        self.grows = self.grows and grows
        return SIZE


def _sizes(call: ast.Call, argument: ast.AST) -> bool:
    """True if a size of the result of a call follows from this argument."""
    name, owner = last_name(call.func), last_name(getattr(call.func, "value", call.func))
    if name in _TENSOR_FIRST and owner in _MODULES and argument in call.args[:1]:
        return False
    return name in _SIZED


def _asks(parent: ast.Compare | ast.Attribute | ast.Tuple) -> bool:
    """True if an operand's value is not read: for `x is None`, or `x.shape`."""
    if isinstance(parent, ast.Compare):
        return _IDENTITY.issuperset(map(type, parent.ops))
    return getattr(parent, "attr", "") in _KEEPS_SIZE


def _grows(parent: ast.AST, child: ast.AST) -> bool:
    """False if the value of `parent` may shrink when that of `child` grows."""
    if isinstance(parent, ast.BinOp):
        keeps = isinstance(parent.op, ast.Add | ast.Mult) or child is parent.left
        return keeps and not isinstance(parent.op, ast.Mod)
    return not isinstance(parent, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.IfExp)


def _targets(target: ast.expr) -> set[str]:
    """The variables and attributes that an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        return set().union(*map(_targets, target.elts))
    if isinstance(target, ast.Starred | ast.Subscript):
        return _targets(target.value)
    return {_key(target)} - {""}


def _key(node: ast.AST) -> str:
    """A variable by its name, an attribute by its own with a point before it."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@functools.cache
def _locals(function: ast.AST) -> set[str]:
    """The variables of a function of its own: its parameters, and those that it sets."""
    outer = {
        name
        for one in ast.walk(function)
        for name in getattr(one, "names", ())
        if type(name) is str
    }
    set_here = {
        one.arg if isinstance(one, ast.arg) else one.id
        for one in ast.walk(function)
        if isinstance(one, ast.arg)
        or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    }
    return set_here - outer


class Loops:
    """Ends loops that made-up values keep going: they get other values, and then no more."""

    ESCAPE = 256
    """Reads in one loop without a backward pass after which values change."""
    END = 20_000
    """Reads after which the emulation ends: the loop waits for a value that does not come."""
    OTHERS = (0.0, 1e9, -1e9)

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int], int] = {}

    def progress(self) -> None:
        """Note that the training goes on."""
        self._reads.clear()

    def count(self, use: Use) -> int:
        """The number of reads in the running loop; 0 outside of one."""
        if use.loop is None:
            return 0
        if len(self._reads) > self.ESCAPE:  # frames that have ended
            self._reads.clear()
        self._reads[use.loop] = found = self._reads.get(use.loop, 0) + 1
        return found

    def other(self, value: bool | float, reads: int) -> bool | float:
        """The value in place of `value`, after this number of `reads` in a loop."""
        if reads < self.ESCAPE:
            return value
        if isinstance(value, bool):
            return bool(reads // self.ESCAPE % 2) is not value
        return type(value)(self.OTHERS[reads // self.ESCAPE % len(self.OTHERS)])


# The stand-in runtime copies up to this size from host to device (KEPT in device/cudart.c).
KEPT_BYTES = 1 << 20
# Floats from the host are known up to this many; larger tensors are weights, often without values.
MOST_FLOATS = 65_536
# Large tensors of these types are token ids and masks, not weights.
_CARRIED = frozenset({torch.int64, torch.bool})
# Unknown integers of these types are counted when the host reads them; others are weights.
_COUNTED = frozenset({torch.int64, torch.int32, torch.bool})
# New host memory above this size comes from the system as zeros.
FRESH_BYTES = 32 << 20


class Transfers:
    """Copies between host and device, and single values read by the host."""

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self._made_up = settling.made_up
        self._unknowns = settling.unknowns
        self.loops = Loops()
        self.refuse: Callable[[str, FrameType | None], Any] = lambda name, frame: None
        """Ends the emulation, with the name of what cannot be emulated."""

    def to_copy(self, operator: Operator) -> Handler:
        """The handler of `_to_copy`, which implements `to`, `cuda` and `cpu`."""
        returned = self._settling.returned(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if source.is_cuda:
                out = returned(func, args, kwargs)
                if out.is_cpu:
                    self._to_host(out, source, fresh=True)
                return out
            target = kwargs.get("device")
            if target is None or target.type != "cuda":
                return func(*args, **kwargs)
            args = (_stand_in(source, kwargs), *args[1:])
            out = func(*args, **kwargs)
            self._to_device(out, source)
            return out

        return call

    def copy(self, operator: Operator) -> Handler:
        """The handler of `copy_`."""
        written = self._settling.written(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, source = args[:2]
            if target.layout is not STRIDED or source.layout is not STRIDED:
                return written(func, args, kwargs)
            if target.is_cuda:
                if source.is_cuda:
                    return written(func, args, kwargs)
                out = func(*args, **kwargs)
                if source.is_cpu:
                    self._to_device(target, source.expand(target.shape))
                return out
            out = func(*args, **kwargs)
            if source.is_cuda and target.is_cpu:
                self._to_host(target, source.expand(target.shape), fresh=False)
            return out

        return call

    def number(self, operator: Operator) -> Handler:
        """The handler of `_local_scalar_dense`, which implements `item`."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = func(*args, **kwargs)
            return self._item(args[0], value) if args[0].is_cuda else value

        return call

    def _to_device(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Settle a copy of the CPU tensor `source` to the CUDA tensor `out`."""
        if out.layout is not STRIDED:
            for part, other in zip(parts_of(out), parts_of(source), strict=True):
                self._to_device(part, other)
            return
        if out.dtype in FLOATS:
            if covers_storage(out):
                forget_note(out)
            if out.numel() <= SMALL:
                alias(out).copy_(source)
            elif out.numel() <= MOST_FLOATS and covers_storage(out):
                alias(out).copy_(source)
                note_known(out)
            else:
                forget_note(out)
            return
        limit = LIMITS.get(out.dtype, 0)
        if out.numel() <= limit and (out.dtype in _CARRIED or out.nbytes <= KEPT_BYTES):
            alias(out).copy_(source)
            if noted(out) is not None and covers_storage(out):
                forget_note(out)
            note_origin(out, origin_of(source))
        elif out.dtype in LIMITS:
            note_unknown(out)

    def _to_host(self, out: torch.Tensor, source: torch.Tensor, *, fresh: bool) -> None:
        """Settle a copy of the CUDA tensor `source` to the CPU tensor `out`; `fresh`: a new one."""
        if out.layout is not STRIDED:
            for part, other in zip(parts_of(out), parts_of(source), strict=True):
                self._to_host(part, other, fresh=fresh)
            return
        note = noted(source)
        one = None if note is None else constant(source, note)
        origin = None if note is None else note.origin
        if out.dtype in FLOATS:
            if one is None and not is_known(source):
                origin = MADE_UP
        else:
            forget_note(out)
            note_origin(out, origin)
        self._read("copy to the host", origin, is_float=out.dtype in FLOATS)
        if one is not None:
            if out.nbytes <= FRESH_BYTES or one.item():
                out.fill_(one.item())
        elif is_known(source):
            out.copy_(alias(source))
            has_floats = out.dtype in FLOATS and out.numel() > 0
            if has_floats and not math.isfinite(float(out.sum(dtype=torch.float32))):
                torch.nan_to_num_(out, nan=1.0, posinf=1.0, neginf=-1.0)
        else:
            self._unknown_to_host(out, source, fresh=fresh)

    def _unknown_to_host(self, out: torch.Tensor, source: torch.Tensor, *, fresh: bool) -> None:
        if out.dtype in FLOATS:
            if out.nbytes <= (FRESH_BYTES if fresh else KEPT_BYTES):
                self._made_up.fill_host(out)
            return
        if source.dtype in _COUNTED:
            self._read("copy of unknown integers to the host", UNREAD, is_float=False)
        if out.nbytes <= FRESH_BYTES:
            out.zero_()

    def _item(self, source: torch.Tensor, value: Any) -> Any:
        """The result of `source.item()`, where `value` is the number read from memory."""
        note = noted(source)
        one = None if note is None else constant(source, note)
        if one is not None:
            value = one.item()
        origin = None if note is None else note.origin
        if isinstance(value, float):
            if (one is None and not is_known(source)) or not math.isfinite(value):
                value, origin = self._made_up.number(), MADE_UP
        elif one is None and source.dtype in LIMITS and not is_known(source):
            value, origin = False if isinstance(value, bool) else 0, UNREAD
        reads = self._read("item", origin, is_float=isinstance(value, float))
        return self.loops.other(value, reads) if reads >= Loops.ESCAPE else value

    def _read(self, operator: str, origin: str | None, *, is_float: bool) -> int:
        """Note a value that the host reads; return the reads of the running loop, or 0."""
        self._unknowns.floats_read += is_float and origin is not None
        if origin is None or (origin == ASSUMED and is_float):
            return 0
        frame = sys._getframe(1)
        use = use_in(frame)
        if use.kind or not is_float:
            self._unknowns.used(operator, origin, use.kind, grows=use.grows)
        reads = self.loops.count(use) if use.kind == BRANCH else 0
        if reads > Loops.END:
            self.refuse("a loop that waits for a made-up value", frame)
        return reads


def _stand_in(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The tensor to copy to the device for a CPU tensor, so that weights are not converted.

    A blocking copy converts on the CPU. Untouched memory of the new type costs nothing.
    """
    dtype = kwargs.get("dtype") or source.dtype
    if (
        dtype == source.dtype
        or kwargs.get("non_blocking")
        or dtype not in FLOATS
        or source.numel() * dtype.itemsize <= KEPT_BYTES
        or not source.is_cpu
        or source.layout is not STRIDED
        or not source.is_contiguous()
    ):
        return source
    return empty(source.shape, dtype=dtype)
