"""The dispatch mode of an emulated process: every operator passes through it, below autograd."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.emulator.inside.core import Repeats, Rule
from tuner.emulator.inside.faults import note
from tuner.emulator.inside.operators import OPENED, inner_of, is_composite
from tuner.emulator.inside.process import replaces
from tuner.emulator.inside.values import Handler, Values

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, float, float] | None]


_mode_of = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_traced() -> bool:
    """True while a compiler traces: only shapes are computed, of tensors without storage."""
    return _mode_of(_FAKE) is not None


THREADS_END_S = 0.1
"""The program waits this long at its end: an autograd thread that still holds Python objects after
the interpreter is gone aborts the process. With the mode, these threads run Python."""


class _Known(NamedTuple):
    """The handling of one operator; keeps the operator alive."""

    func: Any
    handler: Handler | None
    is_nothing: bool
    """A view: it has no values of its own, and launches nothing."""
    rule: Rule | None
    """Judges whether a call of large floats settles no values, if that is possible."""


class EmulatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators on CUDA tensors their values, and passes each call to an observer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = Values(seed)
        self.observer: Observer | None = None
        """Called with (func, args, kwargs, out) after each operator; for pricing."""
        self.before: Callable[[], None] | None = None
        """Called before each operator."""
        self.results: Callable[[Any], bool | None] | None = None
        """Called with the results of each operator; for memory. True if it noted any."""
        self.repeats: Repeats | None = None
        self.bounds: Callable[[], None] | None = None
        """Called before each operator once the program has taken its first steps; see follow.py."""
        self._reads = 0
        self._updates: Any = None
        self._known: dict[int, _Known] = {}
        """By the address of an operator: its hash is a Python function, and slow."""

    def note_read(self) -> None:
        """Note that the running operator reads from the device; only this mode can explain it."""
        self._reads += 1

    @property
    def updates(self) -> Any:
        """Told of each operator that ran (`ran`), while nothing is known of an optimizer."""
        return self._updates

    @updates.setter
    def updates(self, value: Any) -> None:
        self._updates = value
        if self.repeats is not None:  # repeated operators would not be told
            self.repeats.shared.watched = value is not None

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that torch.compile compiles under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would import dynamo to keep it out; `install` marks the code instead."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`, and gives its outputs values."""
        if kwargs is None:
            kwargs = {}
        if is_traced():
            return func(*args, **kwargs)
        if types and not all(map(_is_plain, types)):
            return (
                NotImplemented  # tensors with a dispatch of their own: their inner ones come back
            )
        known = self._known.get(id(func)) or self._learn(func)
        if known.is_nothing:
            return func(*args, **kwargs)
        handler = known.handler
        if handler is _decomposed:
            with self:
                return handler(func, args, kwargs)
        if self.before is not None:
            self.before()
        if self.bounds is not None:
            self.bounds()
        reads = self._reads
        out = func(*args, **kwargs) if handler is None else _settled(handler, func, args, kwargs)
        price = None if self.observer is None else self.observer(func, args, kwargs, out)
        settles = self.results is not None and self.results(out)
        if known.rule is not None and self.repeats is not None and self.repeats.asks():
            settles = bool(settles) or reads != self._reads or not known.rule(args, kwargs, out)
            self.repeats.judge(settles=settles, price=price)
        if self._updates is not None:
            self._updates.ran(func, args, kwargs)
        return out

    def _learn(self, func: Any) -> _Known:
        handler: Handler | None = None
        try:
            handler = _decomposed if is_composite(func) else self.values.handler(func)
            is_own = isinstance(func, torch._ops.OpOverload)
            if handler is not None and is_own and func.name() in OPENED:
                handler = self._opened(handler)
        except Exception as error:  # noqa: BLE001 - the operator still runs, without values
            note(error, f"the schema of {func}")
        is_nothing = handler is None and getattr(func, "is_view", False)
        rule = None
        if self.repeats is not None and handler is not _decomposed:
            rule = self.repeats.learn(func, is_nothing=is_nothing)
        known = self._known[id(func)] = _Known(func, handler, is_nothing, rule)
        return known

    def _opened(self, handler: Handler) -> Handler:
        """The handler of an operator whose kernel calls others; these also come to the mode."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args[0].is_cuda:
                return func(*args, **kwargs)

            def on_device(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return func.func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)

            return handler(on_device, args, kwargs)

        return call

    def install(self) -> None:
        """Puts the mode at the bottom of the stack, in this thread and in those started later."""
        from torch._C._dynamo import eval_frame

        # Dynamo compiles neither this function nor what it calls.
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(
            EmulatorMode.__torch_dispatch__.__code__, eval_frame._FrameExecStrategy(skip, skip)
        )
        _spare_lookups()
        self.__enter__()  # type: ignore[no-untyped-call]
        _enter_in_new_threads(self)
        _enter_when_printing(self)
        self.repeats = Repeats.begin(self)
        self.values.install()
        atexit.register(time.sleep, THREADS_END_S)


class _RealCall:
    """An operator whose result is kept in case its handler fails after the call."""

    __slots__ = ("failed", "func", "out", "ran")

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.out: Any = None
        self.ran = self.failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, and keep its result or the fact that it raised."""
        try:
            out = self.out = self.func(*args, **kwargs)
        except BaseException:
            self.failed = True
            raise
        self.ran = True
        return out


def _settled(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result with values, or without them if the handler fails."""
    real = _RealCall(func)
    try:
        return handler(real, args, kwargs)
    except torch.OutOfMemoryError:  # results of another size are allocated here
        raise
    except Exception as error:
        if real.failed:
            raise
        fault = error
    try:
        out = real.out if real.ran else func(*args, **kwargs)
        note(fault, f"the values of {func}")  # not reached if the arguments are wrong
        return out
    finally:
        del fault  # it holds this frame, which holds tensors


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a composite operator as its parts, which come to the mode one by one.

    Autograd takes such operators apart, but inference mode skips it. Operators that take functions
    always come whole.
    """
    inner = inner_of(func)
    return func.decompose(*args, **kwargs) if inner is None else inner(*args, **kwargs)


@cache
def _is_plain(kind: type) -> bool:
    """True if tensors of this class, such as parameters, have no dispatch of their own."""
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def _enter_in_new_threads(mode: EmulatorMode) -> None:
    """Enter the mode in new Python threads: unlike autograd's, they don't inherit the modes."""

    @replaces(threading.Thread, "_bootstrap_inner")
    def begin_with_mode(begin: Any, thread: threading.Thread) -> None:
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            begin(thread)
        finally:
            torch._C._pop_torch_dispatch_stack(None)


def _enter_when_printing(mode: EmulatorMode) -> None:
    """Enter the mode to print tensors: PyTorch leaves all modes and would read no real values."""
    from torch import _tensor_str

    @replaces(_tensor_str, "_str_intern")
    def describe_under_mode(describe: Any, inp: torch.Tensor, **kwargs: Any) -> str:
        if type(inp) in {torch.Tensor, torch.nn.Parameter} and inp.is_cuda:
            with mode:
                return str(describe(inp, **kwargs))
        return str(describe(inp, **kwargs))


def _spare_lookups() -> None:
    """Skip PyTorch's search for rules of this mode's class, which finds none in any operator.

    From 2.6 on the search is in Python, and costs as much as the mode itself.
    """
    from torch._library import simple_registry

    @replaces(simple_registry, "find_torch_dispatch_rule")
    def find_of_others(find: Any, op: Any, torch_dispatch_class: type) -> Any:
        return None if torch_dispatch_class is EmulatorMode else find(op, torch_dispatch_class)


_DEVICE_KEYS = ("CUDA", "CompositeExplicitAutograd")


def follow_python_kernels(mode: EmulatorMode) -> None:
    """Have kernels that are registered for CUDA from now on run with `mode`."""

    @replaces(torch.library.Library, "impl")
    def register_followed(
        register: Any, library: Any, name: Any, kernel: Any, dispatch_key: str = "", **options: Any
    ) -> Any:
        if callable(kernel) and dispatch_key in _DEVICE_KEYS and not options.get("with_keyset"):
            kernel = _followed(kernel, mode)
        return register(library, name, kernel, dispatch_key, **options)


def _followed(kernel: Callable[..., Any], mode: EmulatorMode) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def with_mode(*args: Any, **kwargs: Any) -> Any:
        if mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            return kernel(*args, **kwargs)
        # The operator is priced as a whole, so its parts are not counted.
        observer, before, repeats = mode.observer, mode.before, mode.repeats
        mode.observer = mode.before = None
        on = repeats is not None and repeats.shared.on
        if repeats is not None:
            repeats.shared.on = False
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            return kernel(*args, **kwargs)
        finally:
            torch._C._pop_torch_dispatch_stack(None)
            mode.observer, mode.before = observer, before
            if repeats is not None:
                repeats.shared.on = on

    return with_mode
