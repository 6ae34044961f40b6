"""Runs at the start of every Python process of an emulated program, before the program itself.

It stands first on PYTHONPATH, so Python imports it by this name (see the `site` module). It loads
the stand-in libraries before anything can load NVIDIA's, and waits for PyTorch to be imported.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


class _TunerFinder(importlib.abc.MetaPathFinder):
    """Finds the package `tuner`, and nothing else, where the emulator's own copy lies."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "tuner":
            return None
        folder = os.environ["TUNER_EMULATOR_PACKAGE"]
        return importlib.machinery.PathFinder.find_spec(fullname, [folder])


class _TorchWatch(importlib.abc.MetaPathFinder):
    """Calls `activate` when `torch` has been imported whole.

    Many programs first ask whether there is a `torch`, and import it later.
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
        except Exception as error:  # noqa: BLE001 - it is ours, and is told as such
            _give_up(error)


def _load_libraries() -> None:
    folder = Path(os.environ["TUNER_EMULATOR_LIBRARIES"])
    for name in (folder / "order").read_text(encoding="utf-8").split():
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def _give_up(error: Exception) -> None:
    """Without the emulator the program would compute with what lies in memory: it ends."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    fault = {"type": kind, "message": str(error), "line": None, "reading": "PyTorch, as it starts"}
    line = json.dumps({"pid": os.getpid(), "event": "fault", **fault}) + "\n"
    with Path(os.environ["TUNER_EMULATOR_EVENTS"]).open("a", encoding="utf-8") as events:
        events.write(line)
    sys.stderr.write(f"tuner's emulator: {kind}: {error}\n")
    os._exit(3)


def _is_stood_for() -> bool:
    """Whether this is a rank that another process stands for (one_rank.py)."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdigit() or int(rank) == 0 or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    settings = json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}")
    return bool(settings.get("one_rank"))


def _next_sitecustomize() -> None:
    """The one that this file hides, of a distribution or of an environment, runs as well."""
    hidden = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", hidden)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "TUNER_EMULATOR" in os.environ:
    if _is_stood_for():
        os._exit(0)
    try:
        _load_libraries()
    except OSError as error:  # Python would go on without this file
        sys.stderr.write(f"tuner's emulator: {error}\n")
        os._exit(3)
    sys.meta_path.append(_TunerFinder())  # after the program's own packages
    sys.meta_path.insert(0, _TorchWatch())
_next_sitecustomize()
