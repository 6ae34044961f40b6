"""Predictions in an environment with other releases: built, cached, and asked in a child process.

The child is tuner itself, started with the same command line by the environment's Python: its
answer is the answer, and its exit code the exit code. PyTorch and what tuner itself imports are
linked from the environment that runs tuner; the other libraries are installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tuner.core.environment import STACK_VARIABLE
from tuner.core.errors import InputError, Note, UnavailableError
from tuner.core.files import user_cache
from tuner.predict.releases import STACK, is_before, other_releases, predicted_stack
from tuner.program.pins import pins_of

CHILD = "tuner.app.cli.in_stack_child"

_TRACED = ("transformers", "peft", "accelerate", "bitsandbytes")
"""Libraries that a stack always has; those without a pin are the newest that go with the others."""

OLDEST = {"torch": "2.11", "bitsandbytes": "0.48", "transformers": "4.45", "trl": "0.12"}
"""The oldest releases that can be traced.

torch and bitsandbytes: the operators that a trace and its kernels need (pyproject.toml has the same
bounds). An older pin of these two is replaced, and the answer says so: they change the kernels, not
what the other libraries allocate.
"""

REPLACED = {"torch": "", "bitsandbytes": f"~={OLDEST['bitsandbytes']}.0"}
"""Specifiers that stand for older pins; for PyTorch it is the installed release."""

_OWN = (
    "click", "jinja2", "msgspec", "numpy", "nvidia-ml-py", "packaging", "platformdirs", "psutil",
    "pyelftools", "pyyaml", "rich", "scipy", "simpleeval", "threadpoolctl",
)  # fmt: skip
"""Packages that tuner's own predictions import."""

_ENDS_WITHIN_S = 2.0
_FORMAT = "1"
"""Part of the name of a built environment; a change of how it is built changes it."""


def wanted_releases(stack: Path) -> dict[str, str]:
    """The specifiers to install for `stack`, by library.

    Raises `InputError` for a file that pins none of `STACK`, and `UnavailableError` for releases
    that are too old to be traced.
    """
    pinned = dict(pins_of(stack, STACK).releases)
    if not pinned:
        raise InputError(
            f"{str(stack)!r} pins no release of {', '.join(STACK)}",
            hint="name the file that pins them, or the environment in which they are installed",
        )
    for library, oldest in OLDEST.items():
        if not is_before(pinned.get(library, ""), Version(oldest)):
            continue
        text = f"{library}{pinned[library]} cannot be traced"
        if library not in REPLACED:
            raise UnavailableError(
                f"{text}: {oldest} is the oldest release that can be",
                hint="predict without --stack, or with a newer release",
            )
        pinned[library] = REPLACED[library]
        warnings.warn(Note(f"--stack: {text}, and a newer release stands for it"), stacklevel=2)
    return pinned


def run_in_stack(stack: Path, arguments: Sequence[str]) -> int | None:
    """Run the command line `arguments` of tuner in an environment with the releases of `stack`.

    Returns its exit code, and None if this process has these releases. Raises `InputError` for a
    file without pins, and `UnavailableError` where the environment cannot be built.
    """
    wanted = wanted_releases(stack)
    installed = predicted_stack()
    if wanted.keys() <= installed.keys() and not list(other_releases(wanted, installed)):
        return None
    python = environment_of(wanted)
    with tempfile.TemporaryDirectory(prefix="tuner-stack-") as folder:
        # Only tuner's own folder: whatever is installed beside it must not be found.
        Path(folder, "tuner").symlink_to(Path(__file__).parents[1], target_is_directory=True)
        variables = {**os.environ, "PYTHONPATH": folder, STACK_VARIABLE: str(stack)}
        child = subprocess.Popen([python, "-m", CHILD, *arguments], env=variables)  # noqa: S603
        try:
            return child.wait()
        except KeyboardInterrupt:
            # A terminal sends it to the child as well, which needs a moment to end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_ENDS_WITHIN_S)
            child.terminate()
            child.wait()
            raise


def cannot(stack: str, error: BaseException) -> UnavailableError:
    """The error for what a release of the stack lacks."""
    found = ", ".join(f"{name} {version}" for name, version in predicted_stack().items())
    text = " ".join(str(error).split())[:300]
    return UnavailableError(
        f"--stack {stack} cannot be predicted ({found}): {type(error).__name__}: {text}",
        hint="predict without --stack, or run the program on the emulator in its own environment",
    )


def environment_of(wanted: Mapping[str, str]) -> Path:
    """The Python of an environment with these releases, built if the cache has none.

    Raises `UnavailableError` where there is no cache folder, and where installing fails.
    """
    cache = user_cache()
    if cache is None:
        raise UnavailableError(
            "there is no cache folder to build an environment in", hint="set HOME"
        )
    linked = _linked(wanted)
    name = json.dumps([_FORMAT, sys.version, sorted(wanted.items()), sorted(linked.items())])
    folder = cache / "stacks" / hashlib.sha256(name.encode()).hexdigest()[:16]
    if folder.is_dir():
        return _python(folder)
    warnings.warn(Note("--stack: installing these releases, once"), stacklevel=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder.parent) as draft:
        _build(Path(draft, "env"), wanted, linked)
        with contextlib.suppress(OSError):  # another process was faster
            Path(draft, "env").rename(folder)
    return _python(folder)


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _linked(wanted: Mapping[str, str]) -> dict[str, str]:
    """The installed packages to link, with their versions: tuner's own, and torch where it may."""
    names = [*_OWN]
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = {"torch": metadata.version("torch")}
        if not list(other_releases({"torch": wanted.get("torch", "")}, installed)):
            names.append("torch")
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution(name)
            found[name] = package.version
            needed = map(Requirement, package.requires or ())
            waiting += [
                canonicalize_name(one.name)
                for one in needed
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


def _build(folder: Path, wanted: Mapping[str, str], linked: Mapping[str, str]) -> None:
    uv = shutil.which("uv")
    _run([uv, "venv", "-q", "--python", sys.executable, str(folder)] if uv
         else [sys.executable, "-m", "venv", str(folder)])  # fmt: skip
    python = _python(folder)
    packages = next((folder / "lib").glob("python*/site-packages"), folder / "Lib/site-packages")
    for name in linked:
        _link(name, packages)
    torch = f"=={linked['torch']}" if "torch" in linked else wanted.get("torch", "")
    lines = [f"{name}{wanted.get(name, '')}" for name in _TRACED]
    pip = [uv, "pip", "install", "-q", "--python", str(python)] if uv else [
        str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"
    ]  # fmt: skip
    _run([*pip, *lines, f"torch{torch}"])
    if "trl" in wanted:  # read for its release: what it needs beside the others is not traced
        _run([*pip, "--no-deps", f"trl{wanted['trl']}"])


def _link(name: str, packages: Path) -> None:
    """Link the files of an installed package; copied where the cache is on another disk."""
    package = metadata.distribution(name)
    for file in package.files or ():
        if file.parts[0] == ".." or file.suffix == ".pyc":
            continue
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        source = Path(str(package.locate_file(file)))
        try:
            os.link(source, target)
        except FileExistsError:
            continue
        except OSError:
            shutil.copy2(source, target)


def _run(command: Sequence[str | None]) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise UnavailableError(
            f"the environment of --stack cannot be built: {' '.join(said[-3:])[:600]}",
            hint=f"`{' '.join(words)}` failed",
        )
