"""Finds the tools that the emulator needs: a CUDA build of PyTorch and a C compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

from tuner.core.environment import isolated, this_python
from tuner.core.errors import UnavailableError

OLDEST_TORCH = (2, 8)
CUDA_MAJORS = (12, 13)

_FIND = """
import importlib.util, json, sys
spec = importlib.util.find_spec("torch")
print(json.dumps([spec and spec.origin, list(sys.version_info[:2])]))
"""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A CUDA build of PyTorch: its folder, its version, and the CUDA version it is built for."""

    folder: Path
    version: str
    cuda: tuple[int, int]

    @property
    def site(self) -> Path:
        """The site-packages folder that it is installed in."""
        return self.folder.parent


def find_torch(python: str | None = None) -> TorchBuild:
    """The CUDA build of PyTorch that `python`, by default this one, would import, unimported.

    Raises `UnavailableError`, with the command that installs it, if there is none.
    """
    python = python or this_python()
    folder = _torch_folder(python)
    if folder is None:
        raise UnavailableError(
            f"the emulator needs PyTorch, and {python} has none",
            hint="install the CUDA build: pip install 'torch===2.13.0'",
        )
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = _value(text, "__version__") or "0"
    cuda = _value(text, "cuda")
    if cuda is None:
        plain = version.partition("+")[0]
        raise UnavailableError(
            f"the emulator needs a CUDA build of PyTorch, and torch {version} is not one",
            hint=f"install it over this one: pip install --force-reinstall --no-deps"
            f" 'torch==={plain}' && pip install 'torch==={plain}'",
        )
    if Version(version).release < OLDEST_TORCH:
        raise UnavailableError(
            f"the emulator needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and this is"
            f" torch {version}",
            hint="pip install --upgrade torch",
        )
    major, minor = (int(n) for n in cuda.split(".")[:2])
    if major not in CUDA_MAJORS:
        raise UnavailableError(
            f"the emulator knows CUDA {' and '.join(map(str, CUDA_MAJORS))}, and torch {version}"
            f" is built for CUDA {cuda}",
            hint="docs/notebook/emulator.md says how to add a CUDA version",
        )
    return TorchBuild(folder, version, (major, minor))


def find_compiler() -> str:
    """A C compiler: $CC, else cc, gcc or clang. Raises `UnavailableError` without one."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise UnavailableError(
        "the emulator builds its stand-in libraries with a C compiler, and there is none",
        hint="install one (Debian, Ubuntu: apt install gcc libc6-dev), or name it: CC=/path/to/cc",
    )


def find_cxx_compiler() -> str | None:
    """A C++ compiler: $CXX, else c++, g++ or clang++; None without one."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next(filter(None, map(shutil.which, names)), None)


@cache
def unavailable() -> str | None:
    """The reason why this interpreter cannot emulate, in one line; None if it can."""
    try:
        find_torch()
        find_compiler()
    except UnavailableError as error:
        return f"{error.message}: {error.hint}"
    return None


def _torch_folder(python: str) -> Path | None:
    import json

    # An empty folder: a file called torch.py beside the program must not be taken for PyTorch.
    ran = subprocess.run(  # noqa: S603 - the user program's interpreter
        isolated(_FIND, python=python), capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise UnavailableError(
            f"{python} does not run as Python", hint=ran.stderr.strip()[-500:] or None
        )
    origin, _ = json.loads(ran.stdout.splitlines()[-1])
    return Path(origin).parent if origin else None


def _value(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
