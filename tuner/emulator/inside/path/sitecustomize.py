"""Runs at the start of every Python process of an emulated program, before the program itself.

Its folder is first on PYTHONPATH, so Python imports it by this name (see the `site` module). It
loads the stand-in libraries before NVIDIA's can be loaded, watches how the process ends, and waits
for PyTorch to be imported.
"""

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


class _TunerFinder(importlib.abc.MetaPathFinder):
    """Finds only the package `tuner`, in the folder of the emulator's own copy."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "tuner":
            return None
        folder = os.environ["TUNER_EMULATOR_PACKAGE"]
        return importlib.machinery.PathFinder.find_spec(fullname, [folder])


class _TorchWatch(importlib.abc.MetaPathFinder):
    """Calls `activate` when the import of `torch` is complete.

    Many programs first look for `torch` and import it later.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActivatingLoader(spec.loader)
        return spec


class _ActivatingLoader(importlib.abc.Loader):
    """Loads as the loader that it wraps, and activates the emulator afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            from tuner.emulator.inside.activate import activate

            activate()
        except Exception as error:  # noqa: BLE001 - reported as tuner's own fault
            _give_up(error)


def _load_libraries() -> None:
    folder = Path(os.environ["TUNER_EMULATOR_LIBRARIES"])
    for name in (folder / "order").read_text(encoding="utf-8").split():
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def _give_up(error: Exception) -> None:
    """End the program: without the emulator it would compute with arbitrary values."""
    failing = _failing()
    kind, text = failing.name_of(error), failing.text_of(error)
    fault = {"type": kind, "message": text, "line": None, "reading": "PyTorch, as it starts"}
    failing.send({"event": "fault", **fault})
    sys.stderr.write(f"tuner's emulator: {kind}: {error}\n")
    os._exit(3)


def _is_stood_for() -> bool:
    """True if another process stands for this rank (one_rank.py)."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdigit() or int(rank) == 0 or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    return _is_asked("one_rank")


def _is_asked(name: str) -> bool:
    """True if the emulation has this setting."""
    return bool(json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}").get(name))


@functools.cache
def _failing() -> Any:
    """The module `failing`, loaded by file: the program may have its own module `tuner`."""
    path = _HERE.parent / "failing.py"
    return _executed(importlib.util.spec_from_file_location("_tuner_emulator_failing", path))


def _executed(spec: importlib.machinery.ModuleSpec | None) -> Any:
    """The module of `spec`, after running it; None if there is no loader."""
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Nothing(io.FileIO):
    """The empty standard input of an emulated program; reports reads."""

    def readinto(self, buffer: Any) -> int | None:
        _tell_asked()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        _tell_asked()
        return super().readall()


def _tell_asked() -> None:
    with contextlib.suppress(Exception):  # a fault here must not become an error of the program
        line = _failing().sibling("lines").program_line(sys._getframe(2))
        _failing().send({"event": "asked", "line": line})


def _follow_questions() -> None:
    if sys.stdin is None or not Path("/dev/null").samefile("/proc/self/fd/0"):
        return  # input that the program gives to its own child process
    raw = io.BufferedReader(_Nothing(0, closefd=False))
    sys.stdin = io.TextIOWrapper(raw, sys.stdin.encoding, sys.stdin.errors)


def _next_sitecustomize() -> None:
    """Run the `sitecustomize` of the distribution or environment that this file hides."""
    hidden = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    _executed(importlib.machinery.PathFinder.find_spec("sitecustomize", hidden))


if "TUNER_EMULATOR" in os.environ:
    if _is_stood_for():
        os._exit(0)
    try:
        _load_libraries()
    except OSError as error:  # Python would go on without this file
        sys.stderr.write(f"tuner's emulator: {error}\n")
        os._exit(3)
    _failing().follow_failures()
    _follow_questions()
    if _is_asked("whole"):
        _failing().sibling("rounds").follow_loops(_failing().sibling("lines").package_of)
    sys.meta_path.append(_TunerFinder())  # after the program's own packages
    sys.meta_path.insert(0, _TorchWatch())
_next_sitecustomize()
