"""Watches the program's process: its imports, the end of its owner, and the signal to stop."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from tuner.emulator.here import TELL_SIGNAL, TIMEOUT
from tuner.emulator.inside.faults import guarded

Then = Callable[[ModuleType], None]


def when_imported(name: str, then: Then) -> None:
    """Call `then` with the module of this name: now if it is loaded, else once it has been."""
    then = guarded(f"{name}, as it is imported")(then)
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Watch(name, then))


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """A decorator of what runs in place of a function of `owner`, which it gets first."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, run)

    return replace


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as the finders after it do, with a loader that calls back.

    Programs may ask for the module (`importlib.util.find_spec`) before they import it, or never do.
    """

    def __init__(self, name: str, then: Then) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of the awaited module, with a loader that calls back."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingBack(spec.loader, self._then)
        return spec


class _CallingBack(importlib.abc.Loader):
    """Loads as the loader that it wraps, and calls back afterwards."""

    def __init__(self, loader: importlib.abc.Loader, then: Then) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with its own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with its own loader, which is also the one it shows, and call back."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def end_with_owner() -> None:
    """Have this process and its forks end when the process that owns the session ends."""
    _watch()
    os.register_at_fork(after_in_child=_watch)


def _watch() -> None:
    # A runner of trials ends them itself, and forks them from a process of one thread.
    if "TUNER_RUNNER" in os.environ:
        return
    owner = int(os.environ["TUNER_EMULATOR_OWNER"])
    if owner == os.getpid():
        return
    try:
        handle = os.pidfd_open(owner)
    except OSError:  # it has ended already
        os._exit(3)

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(3)

    threading.Thread(target=wait, name="tuner-emulator", daemon=True).start()


STOPPED = 124
"""The exit status of a stopped program, as in timeout(1)."""


def end_when_told(tell: Callable[[str], bool | None]) -> None:
    """On `TELL_SIGNAL`, call `tell` with `TIMEOUT`, and end this process if `tell` returns True.

    Any other process, such as a launcher, goes on and ignores the signal from then on.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if tell(TIMEOUT):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(STOPPED)
        finally:
            signal.signal(number, signal.SIG_IGN)

    if threading.current_thread() is threading.main_thread():
        signal.signal(TELL_SIGNAL, end)
