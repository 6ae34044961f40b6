"""The files that a program sees: the user's, and over them those that it made, changed or removed.

What it writes goes to a scratch folder and is read back from there.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import stat
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tuner.program.standins.unknown import Unknown

_MOST_COPIED = 256 * 2**20
"""The largest file of the user that is copied when the program changes a part of it."""
DEVICES = frozenset({os.devnull, "/dev/stdout", "/dev/stderr"})
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOFOLLOW = os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    "read": "stat lstat access readlink statvfs getxattr listxattr listdir scandir chdir",
    "change": "chmod fchmod lchmod chown fchown lchown chflags lchflags utime truncate setxattr"
    " removexattr",
    "make": "mkdir mkfifo symlink",
    "remove": "remove unlink rmdir",
    "move": "rename replace",
    "refuse": "fchdir link mknod chroot",
}
"""Functions of `os` that take a path, by what they do to it."""
_FOLLOW = {*_KINDS["read"].split(), *_KINDS["change"].split()} - {"lstat", "readlink"}

real, _io = SimpleNamespace(**vars(os)), SimpleNamespace(**vars(io))
opened: dict[str, None] = {}
"""The files that were opened to be read, by their absolute paths."""


class Refused(BaseException):
    """Ends a program that does what can neither be kept inside nor left out."""


class _Entry(SimpleNamespace):
    """An entry of a folder, as `os.DirEntry`."""

    def __init__(self, name: Any, folder: Any, at: str) -> None:
        super().__init__(name=name, path=os.path.join(folder, name))
        self.stat, self.inode = functools.partial(os.stat, at), lambda: os.lstat(at).st_ino
        self.is_symlink, self.is_junction = functools.partial(os.path.islink, at), bool
        seen: Any = lambda follow: follow or not os.path.islink(at)  # noqa: E731
        self.is_dir = lambda follow_symlinks=True: os.path.isdir(at) and seen(follow_symlinks)
        self.is_file = lambda follow_symlinks=True: os.path.isfile(at) and seen(follow_symlinks)

    def __fspath__(self) -> Any:
        return self.path


class _Entries(map):  # type: ignore[type-arg]
    __enter__ = map.__iter__
    __exit__ = close = lambda self, *_: None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "")


def _mode(back: str) -> int:
    """The type and permissions of a real file; 0 where there is none."""
    try:
        return int(real.lstat(back).st_mode)
    except OSError:
        return 0


class Layer:
    """`entries` has the real file or folder of what was changed, by its path without links.

    It is one in the scratch folder, or one of the user's that was moved, or `gone`, which is none.
    What is below an entry is below its real folder, if it has no entry itself.
    """

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.join(os.path.realpath(scratch), "")
        self.gone = os.path.join(self.scratch, "gone")
        self.entries: dict[str, str] = {}
        self.cwd, self.made = os.getcwd(), 0
        # Python's own way to follow links, which here sees what the program sees.
        paths: Any = types.ModuleType(os.path.__name__)
        paths.__spec__ = os.path.__spec__
        paths.__spec__.loader.exec_module(paths)
        paths.os, self.paths = SimpleNamespace(**vars(os)), paths
        paths.os.getcwd = lambda: self.cwd
        paths.os.lstat = functools.cache(lambda path: real.lstat(self.back(path)))
        paths.os.readlink = lambda path: real.readlink(self.back(path))

    def install(self, texts: dict[str, str]) -> dict[Any, Callable[..., Any]]:
        """The replacements of Python's functions; `texts` replace what files hold, by path."""
        opener = functools.partial(self.open, mode=0o666)

        class FileIO(io.FileIO):
            def __init__(self, *args: Any, **given: Any) -> None:
                super().__init__(*args, **{**given, "opener": given.get("opener") or opener})

        def open_(*args: Any, **given: Any) -> Any:
            path, mode = args[0] if args else given.get("file"), [*args[1:2], given.get("mode")][0]
            if isinstance(path, Unknown) and not set(str(mode)) & set("wax+"):
                return Unknown(f"open({path._what})")
            return _io.open(*args, **{**given, "opener": given.get("opener") or opener})

        def symlink(src: Any, dst: Any, is_folder: bool = False, **given: Any) -> None:
            self.call("symlink", "make", dst, src, **given)

        for path, text in texts.items():
            with _io.open(new := self.new(), "x", encoding="utf-8", newline="") as file:
                file.write(text)
            real.utime(new, (1, 1))  # no compiled file is of this time
            self.put(self.find(path)[0], new)
        found: dict[Any, Callable[..., Any]] = {
            getattr(os, name): functools.partial(self.call, name, kind)
            for kind, names in _KINDS.items()
            for name in names.split()
            if hasattr(os, name)
        }
        found |= {os.symlink: symlink, os.open: self.open, io.open: functools.partial(open_)}
        found |= {io.FileIO: FileIO, io.open_code: functools.partial(open_, mode="rb")}
        found |= {os.getcwd: lambda: self.cwd, os.getcwdb: lambda: os.fsencode(self.cwd)}
        # The import of Python has its own names for them.
        loading: Any = sys.modules["_frozen_importlib_external"]
        known = {n: found[f] for n, f in vars(loading._os).items() if callable(f) and f in found}
        loading._os = SimpleNamespace(**{**vars(loading._os), **known})
        loading._io = SimpleNamespace(**{**vars(io), "FileIO": FileIO})
        loading._io.open_code = found[io.open_code]
        return found

    def back(self, at: str) -> str:
        above = at
        while above not in self.entries:
            if (parent := os.path.dirname(above)) == above:
                return at
            above = parent
        return self.entries[above] + at[len(above) :]

    def find(self, path: Any, follow: bool = True) -> tuple[str, str]:
        """The path without links, and the real file that is there, if there is one."""
        if not (text := os.fsdecode(path)):
            raise _error(errno.ENOENT)
        folder, name = os.path.split(os.path.join(self.cwd, text.rstrip("/") or text))
        if follow or name in ("", ".", ".."):
            at = self.paths.realpath(os.path.join(folder, name))
        else:
            at = os.path.join(self.paths.realpath(folder), name)
        return at, self.back(at)

    def check_folder(self, at: str) -> None:
        """Raises as the system does where nothing can be made or removed at `at`."""
        parent = self.back(os.path.dirname(at))
        if not stat.S_ISDIR(mode := _mode(parent)):
            raise _error(errno.ENOTDIR if mode else errno.ENOENT)
        if not real.access(parent, os.W_OK | os.X_OK):
            raise _error(errno.EACCES)

    def new(self) -> str:
        self.made += 1
        return os.path.join(self.scratch, str(self.made))

    def put(self, at: str, back: str) -> None:
        self.entries[at] = back
        self.paths.os.lstat.cache_clear()
        if at.endswith(".py"):  # it can be imported now
            importlib.invalidate_caches()

    def own(self, at: str, back: str, is_empty: bool = False) -> str:
        """The file in the scratch folder that takes the place of `back`, which is copied once."""
        if back.startswith(self.scratch):
            return back
        was = real.stat(back)
        if was.st_size > _MOST_COPIED and not is_empty:
            raise Refused(f"a change of {at}, which has {was.st_size} bytes,")
        with _io.open(copy := self.new(), "xb") as target, _io.open(back, "rb") as source:
            target.write(b"" if is_empty else source.read())
        real.chmod(copy, stat.S_IMODE(was.st_mode))
        real.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
        self.put(at, copy)
        return copy

    def listed(self, at: str, back: str) -> list[str]:
        names = dict.fromkeys(real.listdir(back), "")
        below = {os.path.split(path): back for path, back in self.entries.items()}
        names |= {name: back for (folder, name), back in below.items() if folder == at}
        return [name for name, back in names.items() if back != self.gone]

    # -- what takes the place of functions --------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        if dir_fd is not None:
            raise Refused(f"open({path!r}, dir_fd={dir_fd})")
        if os.fsdecode(path) in DEVICES:
            return int(real.open(path, flags, mode))
        try:
            at, back = self.find(path, not flags & _NOFOLLOW)
            if not flags & WRITES:
                opened[at] = None
            elif (there := _mode(back)) or not flags & os.O_CREAT:
                if there and flags & os.O_EXCL:
                    raise _error(errno.EEXIST)
                if not stat.S_ISREG(there) or not real.access(back, os.W_OK):
                    of = {0: errno.ENOENT, stat.S_IFDIR: errno.EISDIR, stat.S_IFLNK: errno.ELOOP}
                    raise _error(of.get(stat.S_IFMT(there), errno.EACCES))
                back = self.own(at, back, bool(flags & os.O_TRUNC))
            else:
                self.check_folder(at)
                self.put(at, back := self.new())
            return int(real.open(back, flags, mode))
        except OSError as error:
            error.filename = path
            raise

    def call(self, name: str, kind: str, path: Any = ".", *args: Any, **given: Any) -> Any:
        """`os.name`(path, ...) where the program sees it."""
        is_open = isinstance(path, int)
        if is_open and kind == "change" and name != "truncate":
            return None
        is_unseen = name == "chdir" or (self.entries and name in ("listdir", "scandir"))
        if kind == "refuse" or (is_open and is_unseen):
            raise Refused(f"os.{name}({path!r})")
        if is_open or (kind == "read" and not self.entries and name != "chdir"):
            return getattr(real, name)(path, *args, **given)
        if any(given.pop(each, None) is not None for each in ("dir_fd", "src_dir_fd")):
            raise Refused(f"os.{name}({path!r}, dir_fd=...)")
        follow = given.pop("follow_symlinks", True) and name in _FOLLOW
        try:
            at, back = self.find(path, follow)
            return getattr(self, kind)(name, path, at, back, *args, **given)
        except OSError as error:
            error.filename = path
            raise

    def read(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> Any:
        code: Callable[[Any], Any] = os.fsencode if isinstance(path, bytes) else str
        if name == "chdir":
            real.chdir(back)
            self.cwd = at
            return None
        if name == "listdir":
            return [code(each) for each in self.listed(at, back)]
        if name == "scandir":
            names = self.listed(at, back)
            return _Entries(lambda n: _Entry(code(n), path, os.path.join(at, n)), names)
        return getattr(real, "lstat" if name == "stat" else name)(code(back), *args, **given)

    def change(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> None:
        """Changes a copy; what is not copied, as a folder, stays as it is."""
        was = real.lstat(back)
        is_small = stat.S_ISREG(was.st_mode) and was.st_size <= _MOST_COPIED
        is_own = back.startswith(self.scratch) and not stat.S_ISLNK(was.st_mode)
        if is_own or is_small or name == "truncate":
            getattr(real, name)(self.own(at, back), *args, **given)

    def make(self, name: str, path: Any, at: str, back: str, *args: Any, **given: Any) -> None:
        if _mode(back):
            raise _error(errno.EEXIST)
        self.check_folder(at)
        new = self.new()
        getattr(real, name)(*((args[0], new) if name == "symlink" else (new, *args)), **given)
        self.put(at, new)

    def remove(self, name: str, path: Any, at: str, back: str) -> None:
        is_folder = stat.S_ISDIR(real.lstat(back).st_mode)
        if is_folder != (name == "rmdir"):
            raise _error(errno.EISDIR if is_folder else errno.ENOTDIR)
        if is_folder and self.listed(at, back):
            raise _error(errno.ENOTEMPTY)
        self.check_folder(at)
        self.put(at, self.gone)

    def move(self, name: str, path: Any, at: str, back: str, dst: Any) -> None:
        to, over = self.find(dst, follow=False)
        is_folder = stat.S_ISDIR(real.lstat(back).st_mode)
        self.check_folder(at)
        self.check_folder(to)
        if _mode(over) and at != to:
            self.remove("rmdir" if is_folder else "remove", dst, to, over)
        ends = at + os.sep, to + os.sep
        kept = {one: its for one, its in self.entries.items() if not one.startswith(ends)}
        moved = {one: its for one, its in self.entries.items() if one.startswith(ends[0])}
        self.entries = kept | {to + one[len(at) :]: its for one, its in moved.items()}
        self.put(at, self.gone)
        self.put(to, back)
