"""The files that a program sees: the user's, and over them those that it made, changed or removed.

What it writes goes to a scratch folder and is read back from there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import stat
import sys
import types
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

_MOST_COPIED = 256 * 2**20
"""The largest file of the user that is copied when the program changes a part of it."""
DEVICES = frozenset({os.devnull, "/dev/stdout", "/dev/stderr"})
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOFOLLOW = os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    "read": "stat lstat access readlink statvfs getxattr listxattr listdir scandir chdir fchdir",
    "change": "chmod lchmod fchmod chown lchown fchown chflags lchflags utime truncate setxattr"
    " removexattr",
    "make": "mkdir mkfifo symlink",
    "remove": "remove unlink rmdir",
    "move": "rename replace link",
    "refuse": "mknod chroot",
}
"""Functions of `os` that take a path, by what they do to it."""
_OF_LINKS = {"lstat", "readlink", "lchmod", "lchown", "lchflags", "rename", "replace"}
_OF_FOLDERS = {"listdir", "scandir", "chdir", "fchdir"}

opened: dict[str, None] = {}
"""The files that were opened to be read, by their absolute paths."""


class Refused(BaseException):
    """Ends a program that does what can neither be kept inside nor left out."""


def _error(number: int, path: Any = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def refuse(name: str, *_: Any, **__: Any) -> None:
    raise Refused(name)


class _Entry(SimpleNamespace):
    """An entry of a folder, as `os.DirEntry`."""

    def __init__(self, name: Any, path: Any, at: str) -> None:
        def test(function: Callable[[str], bool]) -> Callable[..., bool]:
            return lambda *, follow_symlinks=True: (
                function(at) and (follow_symlinks or not os.path.islink(at))
            )

        super().__init__(name=name, path=path, stat=functools.partial(os.stat, at))
        self.is_dir, self.is_file = test(os.path.isdir), test(os.path.isfile)
        self.is_symlink, self.is_junction = test(os.path.islink), lambda: False
        self.inode = lambda: os.lstat(at).st_ino

    def __fspath__(self) -> Any:
        return self.path


class _Entries(contextlib.ExitStack):
    def __init__(self, entries: Iterable[_Entry]) -> None:
        super().__init__()
        self._rest = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._rest)


class Layer:
    """`entries` has the real file or folder of what was changed, by its path without links.

    It is one in the scratch folder, or one of the user's that was moved, or `gone`, which is none.
    What is below an entry is below its real folder, if it has no entry itself.
    """

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.realpath(scratch)
        self.gone = os.path.join(self.scratch, "gone")
        self.entries: dict[str, str] = {}
        self.descriptors: dict[int, str] = {}
        self.cwd, self.made = os.getcwd(), 0
        names = " ".join(_KINDS.values()).split()
        self.real = SimpleNamespace(**{n: getattr(os, n) for n in ["open", *names] if n in dir(os)})
        self.open_file, self.open_code, self.file_type = io.open, io.open_code, io.FileIO
        # Python's own way to follow links, which here sees what the program sees.
        lstat = functools.cache(os.lstat)
        self.paths: Any = types.ModuleType(os.path.__name__)
        self.paths.__spec__ = os.path.__spec__
        self.paths.__spec__.loader.exec_module(self.paths)
        self.paths.os = SimpleNamespace(
            fspath=os.fspath,
            getcwd=lambda: self.cwd,
            lstat=lambda path: lstat(self.back(path)),
            readlink=lambda path: self.real.readlink(self.back(path)),
        )

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """What takes the place of Python's functions that take paths."""
        layer = self

        class FileIO(io.FileIO):
            def __init__(
                self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None
            ) -> None:
                super().__init__(file, mode, closefd, opener or layer.opener)

        found: dict[Any, Callable[..., Any]] = {
            getattr(self.real, name): functools.partial(self.call, name, kind)
            for kind, names in _KINDS.items()
            for name in names.split()
            if hasattr(os, name)
        }
        return found | {
            self.real.symlink: lambda src, dst, *args, **given: self.call(
                "symlink", "make", dst, src, *args, **given
            ),
            self.real.open: self.open,
            self.open_file: self.open_for_people,
            self.open_code: lambda path: self.open_for_people(path, "rb"),
            self.file_type: FileIO,
            os.getcwd: lambda: self.cwd,
            os.getcwdb: lambda: os.fsencode(self.cwd),
        }

    def back(self, at: str) -> str:
        above = at
        while above not in self.entries:
            if (parent := os.path.dirname(above)) == above:
                return at
            above = parent
        return self.entries[above] + at[len(above) :]

    def find(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> tuple[str, str]:
        """The path without links, and the real file that is there, if there is one."""
        if isinstance(path, int) or dir_fd is not None:
            base = self.descriptors.get(path if isinstance(path, int) else dir_fd or 0)
            if base is None:
                raise _error(errno.EBADF)
        else:
            base = self.cwd
        text = "." if isinstance(path, int) else os.fsdecode(path)
        if not text:
            raise _error(errno.ENOENT, path)
        folder, name = os.path.split(os.path.join(base, text.rstrip("/") or text))
        if follow or name in ("", ".", ".."):
            at = self.paths.realpath(os.path.join(folder, name))
        else:
            at = os.path.join(self.paths.realpath(folder), name)
        return at, self.back(at)

    def mode(self, back: str) -> int:
        """The type and permissions of a real file; 0 where there is none."""
        try:
            return int(self.real.lstat(back).st_mode)
        except OSError:
            return 0

    def check_folder(self, at: str) -> None:
        """Raises as the system does where nothing can be made or removed at `at`."""
        parent = self.back(os.path.dirname(at))
        if not stat.S_ISDIR(mode := self.mode(parent)):
            raise _error(errno.ENOTDIR if mode else errno.ENOENT, at)
        if not self.real.access(parent, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, at)

    def new(self) -> str:
        self.made += 1
        return os.path.join(self.scratch, str(self.made))

    def put(self, at: str, back: str) -> None:
        self.entries[at] = back
        if at.endswith(".py"):  # it can be imported now
            importlib.invalidate_caches()

    def own(self, at: str, back: str, is_empty: bool = False) -> str:
        """The file in the scratch folder that takes the place of `back`, which is copied once."""
        if back.startswith(self.scratch):
            return back
        was = self.real.stat(back)
        if was.st_size > _MOST_COPIED and not is_empty:
            raise Refused(f"a change of {at}, which has {was.st_size} bytes,")
        copy = self.new()
        with self.open_file(copy, "xb") as target:
            if not is_empty:
                with self.open_file(back, "rb") as source:
                    target.write(source.read())
        self.real.chmod(copy, stat.S_IMODE(was.st_mode))
        self.real.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
        self.put(at, copy)
        return copy

    def listed(self, at: str, back: str) -> list[str]:
        names = dict.fromkeys(self.real.listdir(back), "")
        names |= {
            os.path.basename(k): v for k, v in self.entries.items() if os.path.dirname(k) == at
        }
        return [name for name, back in names.items() if back != self.gone]

    # -- what takes the place of functions ----------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if os.fsdecode(path) in DEVICES:
            return int(self.real.open(path, flags, mode))
        try:
            at, back = self.find(path, dir_fd, not flags & _NOFOLLOW)
            there = self.mode(back)
            if not flags & WRITES:
                descriptor = int(self.real.open(back, flags))
                opened[at] = None
            elif there or not flags & os.O_CREAT:
                if there and flags & os.O_EXCL and flags & os.O_CREAT:
                    raise _error(errno.EEXIST)
                if not stat.S_ISREG(there) or not self.real.access(back, os.W_OK):
                    of = {0: errno.ENOENT, stat.S_IFDIR: errno.EISDIR, stat.S_IFLNK: errno.ELOOP}
                    raise _error(of.get(stat.S_IFMT(there), errno.EACCES))
                back = self.own(at, back, bool(flags & os.O_TRUNC))
                descriptor = int(self.real.open(back, flags))
            else:
                self.check_folder(at)
                descriptor = int(self.real.open(new := self.new(), flags, mode))
                self.put(at, new)
        except OSError as error:
            error.filename = path
            raise
        self.descriptors[descriptor] = at
        return descriptor

    def opener(self, path: Any, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def open_for_people(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        args = mode, buffering, encoding, errors, newline, closefd
        return self.open_file(file, *args, opener or self.opener)

    def call(self, name: str, kind: str, path: Any = ".", *args: Any, **given: Any) -> Any:
        """`os.name`(path, ...) where the program sees it."""
        call = getattr(self.real, name)
        if isinstance(path, int) and name not in _OF_FOLDERS:
            return call(path, *args, **given) if kind == "read" or name == "truncate" else None
        if kind == "read" and not self.entries and not name.endswith("chdir"):
            return call(path, *args, **given)
        dir_fd = given.pop("dir_fd", given.pop("src_dir_fd", None))
        follow = given.pop("follow_symlinks", True)
        follow = follow and name not in _OF_LINKS and kind not in ("make", "remove")
        try:
            at, back = self.find(path, dir_fd, follow)
            return getattr(self, kind)(name, path, at, back, *args, **given)
        except OSError as error:
            error.filename = path
            raise

    def refuse(self, name: str, path: Any, *_: Any) -> None:
        raise Refused(f"os.{name}({path!r})")

    def read(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> Any:
        code: Callable[[Any], Any] = os.fsencode if isinstance(path, bytes) else str
        if name.endswith("chdir"):
            self.real.chdir(back)
            self.cwd = at
            return None
        if name == "listdir":
            return [code(each) for each in self.listed(at, back)]
        if name == "scandir":
            if at == back and at not in map(os.path.dirname, self.entries):
                return self.real.scandir(path)
            names, folder = self.listed(at, back), "" if isinstance(path, int) else path
            return _Entries(
                _Entry(code(n), os.path.join(folder, code(n)), os.path.join(at, n)) for n in names
            )
        name = "lstat" if name == "stat" else name
        return getattr(self.real, name)(code(back), *args, **given)

    def change(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> None:
        """Changes a copy; what is not copied, as a folder, stays as it is."""
        was = self.real.lstat(back)
        if not back.startswith(self.scratch):
            is_small = stat.S_ISREG(was.st_mode) and was.st_size <= _MOST_COPIED
            if not is_small and name != "truncate":
                return
            back = self.own(at, back)
        if not stat.S_ISLNK(was.st_mode):
            getattr(self.real, name)(back, *args, **given)

    def make(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> None:
        if self.mode(back):
            raise _error(errno.EEXIST)
        self.check_folder(at)
        new = self.new()
        args = (args[0], new, *args[1:]) if name == "symlink" else (new, *args)
        getattr(self.real, name)(*args, **given)
        self.put(at, new)

    def remove(self, name: str, path: Any, at: str, back: str) -> None:
        is_folder = stat.S_ISDIR(self.real.lstat(back).st_mode)
        if is_folder != (name == "rmdir"):
            of_folder = errno.EISDIR if sys.platform == "linux" else errno.EPERM
            raise _error(of_folder if is_folder else errno.ENOTDIR)
        if is_folder and self.listed(at, back):
            raise _error(errno.ENOTEMPTY)
        self.check_folder(at)
        self.put(at, self.gone)

    def move(
        self, name: str, path: Any, at: str, back: str, dst: Any, *, dst_dir_fd: Any = None
    ) -> None:
        to, over = self.find(dst, dst_dir_fd, False)
        is_folder, there = stat.S_ISDIR(self.real.lstat(back).st_mode), self.mode(over)
        self.check_folder(at)
        self.check_folder(to)
        if name == "link":
            if there:
                raise _error(errno.EEXIST)
            return self.put(to, self.own(at, back))
        if at == to:
            return None
        if there and is_folder != stat.S_ISDIR(there):
            raise _error(errno.ENOTDIR if is_folder else errno.EISDIR)
        if there and is_folder and self.listed(to, over):
            raise _error(errno.ENOTEMPTY)
        if to.startswith(at + os.sep):
            raise _error(errno.EINVAL)
        below = {k: v for k, v in self.entries.items() if k.startswith(at + os.sep)}
        kept = {k: v for k, v in self.entries.items() if not k.startswith((at + "/", to + "/"))}
        self.entries = kept | {to + key[len(at) :]: back for key, back in below.items()}
        self.put(to, back)
        self.put(at, self.gone)
        return None

    def install(self, texts: dict[str, str]) -> dict[Any, Callable[..., Any]]:
        """The functions of these files, in which `texts` replace what files hold, by its path."""
        for path, text in texts.items():
            with self.open_file(new := self.new(), "x", encoding="utf-8", newline="") as file:
                file.write(text)
            self.real.utime(new, (1, 1))  # no compiled file is of this time
            self.put(self.find(path)[0], new)
        found = self.functions()
        # The import of Python has its own names for them.
        loading: Any = sys.modules["_frozen_importlib_external"]
        own = vars(loading._os).items()
        loading._os = SimpleNamespace(
            **{n: found.get(f, f) if callable(f) and f.__hash__ else f for n, f in own}
        )
        kind, code = found[self.file_type], found[self.open_code]
        loading._io = SimpleNamespace(**{**vars(io), "FileIO": kind, "open_code": code})
        return found
