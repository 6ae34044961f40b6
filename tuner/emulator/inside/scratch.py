"""Keeps what a program writes after its training away from the person's files.

Its weights are made up: checkpoints and results go to a folder of their own, from which the program
reads them back. Nothing is deleted or renamed but there. Folders that it makes are made, for
libraries that write files themselves, and taken away at the end.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tuner.core.sparse import TensorEntry, write_hollow
from tuner.emulator.inside.hollow import DTYPES
from tuner.emulator.inside.process import when_imported

LARGE_BYTES = 64 << 20
"""Files of tensors of more bytes are written without them."""


class Scratch:
    """The folder of this process; it takes the place of files from `begin` on."""

    def __init__(self) -> None:
        self._root = ""
        self._owner = os.getpid()
        self._kept: tuple[str, ...] = ()
        self._made: list[str] = []
        self._gone: set[str] = set()

    def begin(self) -> None:
        """Take over what is written from now on, once."""
        if self._root:
            return
        self._root = tempfile.mkdtemp(prefix="tuner-scratch-")
        caches = ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        named = [os.environ[name] for name in caches if os.environ.get(name)]
        folders = [*named, str(Path.home() / ".cache"), str(Path.home() / ".triton")]
        folders += [tempfile.gettempdir(), "/dev", "/proc", "/sys"]
        inside = [folder for folder in folders if not _is_within(os.getcwd(), folder)]
        self._kept = tuple(map(os.path.abspath, [*inside, self._root]))
        atexit.register(self._end)
        self._open_here()
        self._change_here()
        when_imported("torch.serialization", self._save_here)
        when_imported("safetensors.torch", self._save_tensors_here)
        when_imported("safetensors", self._read_tensors_here)
        when_imported("tokenizers", self._save_tokenizers_here)

    def _end(self) -> None:
        if os.getpid() != self._owner:
            return
        _rmtree(self._root, ignore_errors=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # it has something in it that is not ours
                _rmdir(folder)

    def _of(self, path: Any) -> str | None:
        """The place of a file in the folder; None for what stays where it is."""
        if not isinstance(path, str | os.PathLike):
            return None
        try:
            full = os.path.abspath(os.fspath(path))
        except (TypeError, ValueError):
            return None
        if not isinstance(full, str) or any(_is_within(full, folder) for folder in self._kept):
            return None
        return self._root + full

    def to_write(self, path: Any) -> Any:
        """The path to write to in place of `path`."""
        place = self._of(path)
        if place is None or not os.path.isdir(os.path.dirname(os.path.abspath(os.fspath(path)))):
            return path  # the real call says what is wrong
        self._gone.discard(place)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def to_read(self, path: Any) -> Any:
        """The path to read in place of `path`."""
        place = self._of(path)
        is_here = place is not None and (_exists(place) or place in self._gone)
        return place if is_here else path

    def _open_here(self) -> None:
        real = builtins.open

        @functools.wraps(real)
        def open_here(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa+"):
                place = self.to_write(file)
                if place is not file and set(mode) & set("a+") and not _exists(place):
                    with contextlib.suppress(OSError):
                        shutil.copyfile(file, place)  # what it goes on from
                return real(place, mode, *args, **kwargs)
            return real(self.to_read(file), mode, *args, **kwargs)

        builtins.open = io.open = open_here

    def _change_here(self) -> None:
        """Files are seen, listed, renamed and deleted as if they were where the program thinks."""
        for name in ("stat", "lstat", "access", "chmod", "utime"):
            setattr(os, name, self._reading(getattr(os, name)))
        make, names, scan = os.mkdir, os.listdir, os.scandir

        @functools.wraps(make)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            make(path, *args, **kwargs)
            if self._of(path) is not None:
                self._made.append(os.path.abspath(os.fspath(path)))

        @functools.wraps(names)
        def listdir(path: Any = ".") -> list[Any]:
            place = self._of(path)
            more = names(place) if place is not None and _exists(place) else []
            found = dict.fromkeys([*names(path), *more])
            return [name for name in found if self._of(os.path.join(path, name)) not in self._gone]

        @functools.wraps(scan)
        def scandir(path: Any = ".") -> Any:
            place = self._of(path)
            if place is None:  # also a descriptor of a folder
                return scan(path)
            found: dict[str, Any] = {}
            for folder in (path, place) if _exists(place) else (path,):
                with scan(folder) as there:
                    found.update((entry.name, entry) for entry in there)
            return _Entries(found[name] for name in listdir(path))

        os.mkdir, os.listdir, os.scandir = mkdir, listdir, scandir
        for name in ("remove", "unlink", "rmdir"):
            setattr(os, name, self._deleting(getattr(os, name)))
        shutil.rmtree = self._deleting(shutil.rmtree)  # type: ignore[assignment]
        for name in ("rename", "replace"):
            setattr(os, name, self._moving(getattr(os, name)))

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            return real(self.to_read(path), *args, **kwargs)

        return read

    def _deleting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def delete(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._of(path)
            if place is None or "dir_fd" in kwargs or _is_within(os.fspath(path), self._root):
                return real(path, *args, **kwargs)
            self._gone.add(place)  # what lies below is not to be seen any more
            return real(place, *args, **kwargs) if _exists(place) else None

        return delete

    def _moving(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._of(source)
            if place is not None and _exists(place):
                self._gone.add(place)
                return real(place, self.to_write(target), *args, **kwargs)
            to = self._of(target)
            if place is None and to is None:
                return real(source, target, *args, **kwargs)
            if os.path.isdir(source):
                shutil.copytree(source, self.to_write(target), dirs_exist_ok=True)
            else:
                shutil.copyfile(source, self.to_write(target))
            return None

        return move

    # -- libraries that open files themselves ---------------------------------------------------

    def _save_here(self, module: Any) -> None:
        import torch

        save = module.save

        @functools.wraps(save)
        def save_here(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.to_write(f)
            if place is f:
                return save(obj, f, *args, **kwargs)
            with _SparseFile(place) as file:
                return save(obj, file, *args, **kwargs)

        module.save = torch.save = save_here
        load = module.load

        @functools.wraps(load)
        def load_here(f: Any, *args: Any, **kwargs: Any) -> Any:
            return load(self.to_read(f), *args, **kwargs)

        module.load = torch.load = load_here

    def _save_tensors_here(self, module: Any) -> None:
        write = module.serialize_file

        @functools.wraps(write)
        def write_here(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.to_write(filename)
            entries = [_entry(name, one) for name, one in tensors.items()]
            large = sum(entry.size_bytes for entry in entries if entry) > LARGE_BYTES
            if place is not filename and large and all(entries):
                return write_hollow(Path(place), list(filter(None, entries)))
            return write(tensors, place, *args, **kwargs)

        module.serialize_file = write_here
        self._read_tensors_here(module)

    def _read_tensors_here(self, module: Any) -> None:
        read = module.safe_open

        @functools.wraps(read)
        def read_here(filename: Any, *args: Any, **kwargs: Any) -> Any:
            return read(self.to_read(filename), *args, **kwargs)

        # Others have it under their own name already.
        for other in list(sys.modules.values()):
            if vars(other).get("safe_open") is read:
                other.safe_open = read_here  # type: ignore[attr-defined]

    def _save_tokenizers_here(self, module: Any) -> None:
        tokenizer = module.Tokenizer
        save = tokenizer.save

        def save_here(self_: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return save(self_, self.to_write(path), *args, **kwargs)

        with contextlib.suppress(TypeError):  # a class that cannot be changed
            tokenizer.save = save_here


class _Entries(list[Any]):
    """The entries of a folder, as `os.scandir` gives them."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *exception: object) -> None:
        pass


class _SparseFile:
    """A file to write whose zeros take no disk: weights that were never written are zeros."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> _SparseFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.truncate(self._file.tell())
        self._file.close()

    def write(self, content: Any) -> int:
        """Write bytes, or leave a hole for zeros."""
        size = len(content)
        if size > _PAGE_BYTES and bytes(content[:_PAGE_BYTES]) == _PAGE and _is_zero(content):
            self._file.seek(size, os.SEEK_CUR)
            return size
        return self._file.write(content)

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()


_PAGE_BYTES = 4096
_PAGE = bytes(_PAGE_BYTES)


def _is_zero(content: Any) -> bool:
    """True if all bytes are zero: the same as a page further on, and the first page is."""
    view = memoryview(content).cast("B")
    return view[:-_PAGE_BYTES] == view[_PAGE_BYTES:]


def _entry(name: str, tensor: Any) -> TensorEntry | None:
    """A tensor as safetensors writes it; None for a type that hollow files have not."""
    given: Any = tensor.get if isinstance(tensor, dict) else functools.partial(getattr, tensor)
    dtype = {long: short for short, long in DTYPES.items()}.get(str(given("dtype")))
    return None if dtype is None else TensorEntry(name, dtype, tuple(given("shape")))


_lstat, _rmdir, _rmtree = os.lstat, os.rmdir, shutil.rmtree


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _is_within(path: str, folder: str) -> bool:
    path, folder = os.path.abspath(path), os.path.abspath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
