"""Finds a CUDA build of PyTorch and a C compiler, and builds the stand-in libraries for them.

A stand-in is built into the cache. It has the soname, the symbol version and every function of the
library it replaces.
Some functions are written in `device/*.c`. All others are read from the symbol table of the real
library and only count their calls, so that no unknown call goes unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from tuner.core.environment import isolated, this_python
from tuner.core.errors import UnavailableError
from tuner.core.files import user_cache

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


SOURCES = Path(__file__).with_name("device")
CORE = "libtuner_device.so"
REPEATS = "libtuner_repeats.so"
"""The library of inside/core.py, which is loaded after PyTorch."""
START = "libtuner_start.so"
"""It is preloaded into every process of a program, and is no stand-in."""


@dataclass(frozen=True, slots=True)
class _StandIn:
    """One library, `libSTEM.so.N`.

    `source` is the file with the handwritten functions. Every other function that begins with
    `prefix` counts its calls and returns `status`: the library's "success" or "not supported".
    """

    stem: str
    source: str | None
    prefix: str
    status: int = 0


# The statuses are those of each library's header: *_STATUS_NOT_SUPPORTED.
STAND_INS = (
    _StandIn("cudart", "cudart.c", r"(__)?cuda[A-Z]"),
    _StandIn("cublas", "cublas.c", "cublas", status=15),
    _StandIn("cublasLt", "cublaslt.c", "cublasLt", status=15),
    _StandIn("cudnn", "cudnn.c", "cudnn", status=3000),
    _StandIn("nccl", "nccl.c", "p?nccl", status=5),
    _StandIn("cusparse", None, "cusparse", status=10),
    _StandIn("cusolver", "cusolver.c", "cusolver", status=9),
    _StandIn("cufft", "cufft.c", "cufft", status=16),
    _StandIn("curand", None, "curand", status=203),
)
_HARMLESS = re.compile(r"Create|Destroy|Set|Get(Version|Property|Stream)")
"""Functions that succeed even in libraries that are not emulated, such as handle creation."""


@dataclass(frozen=True, slots=True)
class _Real:
    """An NVIDIA library that a stand-in is built for."""

    stand_in: _StandIn
    path: Path

    @property
    def soname(self) -> str:
        return self.path.name


def build(torch: TorchBuild) -> Path:
    """The folder of stand-in libraries for this build of PyTorch; builds them once.

    Raises `UnavailableError` without a compiler, or if PyTorch came without CUDA's libraries.
    """
    reals = _real_libraries(torch)
    folder = _folder(torch, reals)
    if _is_whole(folder):
        return folder
    compiler = find_compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UnavailableError(f"{str(folder.parent)!r} cannot be written: {error}") from error
    try:
        _compile_all(compiler, torch, reals, draft / "new")
        _put_in_place(draft, folder)
    except OSError as error:
        raise UnavailableError(f"{str(folder)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _put_in_place(draft: Path, folder: Path) -> None:
    """Move the libraries built in `draft` to `folder`, replacing a damaged one."""
    new = draft / "new"
    (new / _SUMS).write_text(_sums(new), encoding="utf-8")
    if _is_whole(folder):
        return  # another process has built the same meanwhile
    with contextlib.suppress(FileNotFoundError):
        folder.rename(draft / "damaged")
    with contextlib.suppress(FileExistsError):
        new.rename(folder)


_SUMS = "complete"
"""The file with the checksum of every other file, written last."""


def _is_whole(folder: Path) -> bool:
    """True if every file in a folder of libraries has the checksum that it was built with."""
    try:
        return (folder / _SUMS).read_text(encoding="utf-8") == _sums(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _sums(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != _SUMS)
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files)


def _folder(torch: TorchBuild, reals: Iterable[_Real]) -> Path:
    digest = hashlib.sha256(f"{torch.version} {torch.cuda}".encode())
    for source in sorted((*SOURCES.glob("*.[ch]*"), Path(__file__))):
        digest.update(source.name.encode() + source.read_bytes())
    for real in reals:
        stat = real.path.stat()
        digest.update(f"{real.path} {stat.st_size} {stat.st_mtime_ns}".encode())
    return _cache_folder() / digest.hexdigest()[:20]


def _cache_folder() -> Path:
    """The folder beside the timeline cache: in $TUNER_CACHE or in the user's cache folder."""
    named = os.environ.get("TUNER_CACHE")
    if named and named != "off":
        return Path(named) / "emulator"
    folder = user_cache()
    if folder is None:
        return Path(tempfile.gettempdir()) / f"tuner-emulator-{os.getuid()}"
    return folder / "emulator"


def _real_libraries(torch: TorchBuild) -> list[_Real]:
    """The NVIDIA libraries of this PyTorch, from its own folder and from NVIDIA's packages."""
    folders = [torch.folder / "lib", *sorted((torch.site / "nvidia").glob("*/lib"))]
    found = []
    for stand_in in STAND_INS:
        pattern = re.compile(rf"lib{stand_in.stem}\.so\.\d+")
        paths = [
            path
            for folder in folders
            for path in sorted(folder.glob(f"lib{stand_in.stem}.so.*"))
            if pattern.fullmatch(path.name)
        ]
        if stand_in.stem == "cudart":
            paths = [p for p in paths if p.name.endswith(f".{torch.cuda[0]}")]
            if not paths:
                raise UnavailableError(
                    f"torch {torch.version} is built for CUDA {torch.cuda[0]}, but its runtime"
                    f" library is not in {torch.site / 'nvidia'}",
                    hint="install PyTorch with pip, which brings NVIDIA's packages:"
                    f" pip install 'torch==={torch.version.partition('+')[0]}'",
                )
        found += [_Real(stand_in, path) for path in paths[:1]]
    return found


def _compile_all(compiler: str, torch: TorchBuild, reals: Iterable[_Real], folder: Path) -> None:
    flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-w", f"-I{SOURCES}"]
    flags += [f"-DCUDA_MAJOR={torch.cuda[0]}", *_version_flags(torch)]
    order = [CORE, "libcuda.so.1", "libnvidia-ml.so.1"]
    folder.mkdir()
    make = _Compiler(compiler, flags, folder)
    make.library(CORE, *map(make.object, ("device.c", "answers.c", "host.c", "modes.c")))
    make.library(START, make.object("start.c"), make.object("files.c"))
    make.library("libnvidia-ml.so.1", make.object("nvml.c"), core=True)
    driver = make.object("driver.c")
    asked = _asked_of_driver(torch) - _defined(driver)
    make.library("libcuda.so.1", driver, make.counted("cuda", asked, 0), core=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    for real in reals:
        stand_in = real.stand_in
        objects = (
            [make.object(stand_in.source)]
            if stand_in.source and (SOURCES / stand_in.source).exists()
            else []
        )
        names, version = _exported(real.path)
        rest = set(filter(re.compile(stand_in.prefix).match, names))
        for one in objects:
            rest -= _defined(one)
        objects.append(make.counted(stand_in.stem, rest, stand_in.status))
        make.library(real.soname, *objects, core=True, version=version)
        order.append(real.soname)
    _compile_repeats(torch, folder)
    (folder / "order").write_text("\n".join(order), encoding="utf-8")


def _compile_repeats(torch: TorchBuild, folder: Path) -> None:
    """Compile the library that repeats operators, which only saves time (inside/core.py).

    Without a compiler of C++, or if PyTorch's headers are others, all operators run in Python.
    """
    compiler = find_cxx_compiler()
    source = SOURCES / "repeats.cpp"
    if compiler is None:
        return
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-shared"]
    command += [f"-I{torch.folder / 'include'}", str(source), "-o", str(folder / REPEATS)]
    command += [str(folder / CORE), f"-L{torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    ran = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - the user's
    if ran.returncode != 0:
        (folder / REPEATS).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Compiler:
    """A C compiler that writes into one folder."""

    command: str
    flags: list[str]
    folder: Path

    def object(self, source: str | Path) -> Path:
        """The object file of a source: a name in `SOURCES`, or any path."""
        path = SOURCES / source
        result = self.folder / f"{path.stem}.o"
        self._run([*self.flags, "-c", str(path), "-o", str(result)], path.name)
        return result

    def counted(self, stem: str, names: Iterable[str], status: int) -> Path:
        """The object file of functions that count their calls and return a status."""
        source = self.folder / f"{stem}_counted.c"
        lines = ['#include "device.h"']
        for name in sorted(names):
            value = 0 if _HARMLESS.search(name) else status
            lines.append(
                f'EMU_EXPORT int {name}(void) {{ emu_unknown("{name}"); return {value}; }}'
            )
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self.object(source)

    def library(
        self, soname: str, *objects: Path, core: bool = False, version: str | None = None
    ) -> None:
        """Link a library whose symbols have `version`, if given."""
        arguments = ["-shared", *map(str, objects), "-o", str(self.folder / soname)]
        arguments += [f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN"]
        arguments += [str(self.folder / CORE)] if core else []
        if version is not None:
            script = self.folder / f"{soname}.map"
            script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
            arguments.append(f"-Wl,--version-script={script}")
        self._run([*arguments, "-lpthread", "-ldl", "-lm"], soname)

    def _run(self, arguments: list[str], name: str) -> None:
        ran = subprocess.run(  # noqa: S603 - the user's compiler
            [self.command, *arguments], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            raise UnavailableError(
                f"{self.command} cannot build {name}: {ran.stderr.strip()[-1500:]}",
                hint="install a C compiler and the C library's headers (Debian, Ubuntu: apt "
                "install gcc libc6-dev)",
            )


def _exported(library: Path) -> tuple[set[str], str | None]:
    """The functions that a library exports, and the version of its symbols, if any."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        names = set(_functions(elf.get_section_by_name(".dynsym")))
        definitions: Any = elf.get_section_by_name(".gnu.version_d")
        if definitions is None:
            return names, None
        for definition, auxiliaries in definitions.iter_versions():
            if not definition["vd_flags"] & 1:  # the first names the file itself
                return names, next(iter(auxiliaries)).name
    return names, None


def _defined(file: Path) -> set[str]:
    """The functions that an object file defines."""
    from elftools.elf.elffile import ELFFile

    with file.open("rb") as opened:
        return set(_functions(ELFFile(opened).get_section_by_name(".symtab")))


def _functions(symbols: Any) -> Iterator[str]:
    for symbol in symbols.iter_symbols():
        info = symbol["st_info"]
        if (
            symbol["st_shndx"] != "SHN_UNDEF"
            and info["type"] == "STT_FUNC"
            and info["bind"] != "STB_LOCAL"
        ):
            yield symbol.name


def _asked_of_driver(torch: TorchBuild) -> set[str]:
    """Functions of the driver that PyTorch links to, since there is no real driver to read.

    Functions that are looked up at run time are counted at run time.
    """
    from elftools.elf.elffile import ELFFile

    asked: set[str] = set()
    for path in (torch.folder / "lib").glob("libcaffe2_nvrtc.so"):
        with path.open("rb") as file:
            symbols: Any = ELFFile(file).get_section_by_name(".dynsym")
            for symbol in symbols.iter_symbols():
                if symbol["st_shndx"] == "SHN_UNDEF" and re.match(r"cu[A-Z]", symbol.name):
                    asked.add(symbol.name)
    return asked


def _version_flags(torch: TorchBuild) -> list[str]:
    """The library versions that the stand-ins report: those of the installed NVIDIA packages."""
    major, minor = torch.cuda
    flags = [f"-DEMU_CUDA_VERSION={major * 1000 + minor * 10}"]
    for library, (package, scale) in {
        "CUBLAS": ("nvidia-cublas", 10000),
        "CUDNN": ("nvidia-cudnn", 10000),
        "NCCL": ("nvidia-nccl", 10000),
    }.items():
        for name in (f"{package}-cu{major}", package):
            found = next(iter(metadata.distributions(name=name, path=[str(torch.site)])), None)
            if found is not None:
                there = Version(found.version)
                value = there.major * scale + there.minor * 100 + there.micro
                flags.append(f"-DEMU_{library}_VERSION={value}")
                break
    return flags
