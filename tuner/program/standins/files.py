"""The files that a program sees: the user's, and over them those that it made, changed or removed.

What it writes goes to a scratch folder and is read back from there.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

_MOST_COPIED = 256 * 2**20
"""The largest file of the user that is copied when the program changes a part of it."""
DEVICES = frozenset({os.devnull, "/dev/stdout", "/dev/stderr"})
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NAMES = (
    "open stat lstat access listdir scandir readlink mkdir remove unlink rmdir rename replace link"
    " symlink chmod lchmod fchmod chown lchown fchown chflags lchflags utime truncate setxattr"
    " removexattr getxattr listxattr mkfifo mknod chdir fchdir getcwd getcwdb chroot statvfs"
).split()
real = SimpleNamespace(**{name: getattr(os, name) for name in _NAMES if hasattr(os, name)})
_open, _open_code = io.open, io.open_code

opened: dict[str, None] = {}
"""The files that were opened to be read, by their absolute paths."""
_opening = threading.local()


class Refused(BaseException):
    """Ends a program that does what can neither be kept inside nor left out."""


def _error(number: int, path: Any = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def is_opening(path: Any) -> bool:
    """True for the path of an `open` that is being redirected."""
    return path is getattr(_opening, "path", None)


class Layer:
    """`entries` has the real file of what was changed, by its path; None for what was removed.

    That is one in the scratch folder, or one of the user's that was moved. All that is below an
    entry is an entry.
    """

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.realpath(scratch)
        self.entries: dict[str, str | None] = {}
        self.names: dict[str, dict[str, str]] = {}
        self.folders: set[str] = set()
        self.descriptors: dict[int, tuple[str, str]] = {}
        self.cwd = real.getcwd()
        self.made = 0

    def is_scratch(self, path: Any) -> bool:
        if isinstance(path, int):
            path = self.descriptors.get(path, ("", ""))[1]
        text = os.fsdecode(path)
        return text.startswith(self.scratch + os.sep) and ".." not in text.split(os.sep)

    def find(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> tuple[str, Any]:
        """The path without links, and the real file; None where there is certainly none."""
        text = os.fsdecode(path)
        if not text:
            raise _error(errno.ENOENT, path)
        base = self.cwd if dir_fd is None else self.of(dir_fd)[0]
        drive, rest = os.path.splitdrive(os.path.join(base, text))
        at, is_below, links = drive + os.sep, False, 0
        back: str | None = at
        parts = _parts(rest)
        while parts:
            part = parts.pop()
            if part == "..":
                at = os.path.dirname(at)
                back, is_below = self.back(at)
                continue
            below = os.path.join(at, part)
            key = os.path.normcase(below)
            if key in self.entries:
                back, is_below = self.entries[key], True
            else:
                back = None if is_below else below
            if back is not None and back not in self.folders and (parts or follow):
                mode = mode_of(back)
                if stat.S_ISLNK(mode):
                    links += 1
                    if links > 40:
                        raise _error(errno.ELOOP, path)
                    drive, rest = os.path.splitdrive(real.readlink(back))
                    if os.path.isabs(drive + rest):
                        at = drive + os.sep
                    back, is_below = self.back(at)
                    parts += _parts(rest)
                    continue
                if stat.S_ISDIR(mode):
                    self.folders.add(back)
            at = below
        return at, back

    def of(self, descriptor: int) -> tuple[str, str]:
        if descriptor not in self.descriptors:
            raise _error(errno.EBADF)
        return self.descriptors[descriptor]

    def back(self, path: str) -> tuple[str | None, bool]:
        """The real file of a path without links, and whether an entry is at it or above."""
        key = above = os.path.normcase(path)
        if key in self.entries:
            return self.entries[key], True
        while (parent := os.path.dirname(above)) != above:
            above = parent
            if above in self.entries:
                return None, True
        return path, False

    def check_folder(self, at: str) -> None:
        """Raises as the system does where nothing can be made or removed at `at`."""
        parent, _ = self.back(os.path.dirname(at))
        mode = mode_of(parent) if parent else 0
        if not stat.S_ISDIR(mode):
            raise _error(errno.ENOTDIR if mode else errno.ENOENT, at)
        if not real.access(parent, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, at)

    def new(self) -> str:
        self.made += 1
        return os.path.join(self.scratch, str(self.made))

    def put(self, at: str, back: str | None) -> None:
        folder, name = os.path.split(at)
        self.entries[os.path.normcase(at)] = back
        self.names.setdefault(os.path.normcase(folder), {})[os.path.normcase(name)] = name
        if at.endswith(".py"):  # it can be imported now
            for finder in list(sys.path_importer_cache.values()):
                getattr(finder, "invalidate_caches", lambda: None)()

    def own(self, at: str, back: str, *, is_written: bool = True, is_empty: bool = False) -> str:
        """The file in the scratch folder that takes the place of `back`, which is copied once."""
        if self.is_scratch(back):
            return back
        was = real.stat(back)
        if not stat.S_ISREG(was.st_mode) or (is_written and not real.access(back, os.W_OK)):
            raise _error(errno.EACCES, at)
        if was.st_size > _MOST_COPIED and not is_empty:
            raise Refused(f"a change of {at}, which has {was.st_size} bytes,")
        copy = self.new()
        with _open(copy, "xb") as target:
            if not is_empty:
                with _open(back, "rb") as source:
                    while part := source.read(2**20):
                        target.write(part)
        real.chmod(copy, stat.S_IMODE(was.st_mode))
        real.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
        self.put(at, copy)
        return copy

    def listed(self, at: str, back: str) -> list[str]:
        at = os.path.normcase(at)
        names = (
            {} if self.is_scratch(back) else {os.path.normcase(n): n for n in real.listdir(back)}
        )
        names |= self.names.get(at, {})
        return [n for key, n in names.items() if self.entries.get(os.path.join(at, key), n)]

    def move(self, at: str, to: str, back: str) -> None:
        if stat.S_ISDIR(mode_of(back)):
            children = self.listed(at, back)
            new = back
            if not self.is_scratch(back):
                real.mkdir(new := self.new())
                real.chmod(new, stat.S_IMODE(real.stat(back).st_mode))
            self.put(to, new)
            for name in children:
                child = os.path.join(at, name)
                self.move(child, os.path.join(to, name), str(self.back(child)[0]))
        else:
            self.put(to, back)
        self.put(at, None)


def mode_of(path: str) -> int:
    """The type and permissions of a real file; 0 where there is none."""
    try:
        return int(real.lstat(path).st_mode)
    except OSError:
        return 0


def _parts(text: str) -> list[str]:
    text = text.replace(os.altsep, os.sep) if os.altsep else text
    return [part for part in reversed(text.split(os.sep)) if part not in ("", ".")]


class _Entry:
    """An entry of a folder, as `os.DirEntry`."""

    def __init__(self, name: Any, path: Any, at: str) -> None:
        self.name, self.path, self._at = name, path, at

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._at, follow_symlinks=follow_symlinks)

    def _is(self, test: Callable[[int], bool], follow: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def __fspath__(self) -> Any:
        return self.path


class _Entries:
    def __init__(self, entries: list[_Entry]) -> None:
        self._rest = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._rest

    def __next__(self) -> _Entry:
        return next(self._rest)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._rest = iter(())


_There = Callable[..., Any]


def functions(layer: Layer) -> dict[str, Callable[..., Any]]:
    """The functions of `os` that take paths, by their names there."""
    made: dict[str, Callable[..., Any]] = {}

    def of(*names: str, follow: bool = True, missing: bool = False) -> Callable[[_There], _There]:
        """Adds a function of the place (`at`, `back`) under the names that it has in `os`."""

        def add(function: _There) -> _There:
            def call(
                path: Any = ".",
                *args: Any,
                dir_fd: int | None = None,
                follow_symlinks: bool = follow,
                **given: Any,
            ) -> Any:
                try:
                    if isinstance(path, int):
                        at, back = layer.of(path)
                    else:
                        at, back = layer.find(path, dir_fd, follow_symlinks)
                    if not missing and (back is None or not mode_of(back)):
                        raise _error(errno.ENOENT, path)
                    return function(path, at, back, *args, **given)
                except OSError as error:
                    if error.filename is not None:
                        error.filename = path
                    raise

            for name in names:
                made[name] = call
            return function

        return add

    def exists(back: str | None) -> bool:
        return back is not None and mode_of(back) != 0

    def is_folder(back: str) -> bool:
        return stat.S_ISDIR(mode_of(back))

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if os.fsdecode(path) in DEVICES:
            return int(real.open(path, flags, mode))
        is_new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        at, back = layer.find(path, dir_fd, not is_new and not flags & _NOFOLLOW)
        if layer.is_scratch(at):
            return int(real.open(at, flags, mode))
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            return int(real.open(layer.scratch, flags, mode))
        there = exists(back)
        if not there and not flags & os.O_CREAT:
            raise _error(errno.ENOENT, path)
        if not flags & WRITES:
            opened[at] = None
        elif there and is_new:
            raise _error(errno.EEXIST, path)
        elif there and is_folder(back):
            raise _error(errno.EISDIR, path)
        elif there:
            back = layer.own(at, back, is_empty=bool(flags & os.O_TRUNC))
        else:
            layer.check_folder(at)
            back = layer.new()
        descriptor = int(real.open(back, flags, mode))
        if not there:
            layer.put(at, back)
        layer.descriptors[descriptor] = at, back
        return descriptor

    def open_for_people(path: Any, *args: Any, **given: Any) -> int:
        try:
            return open_(path, *args, **given)
        except OSError as error:
            error.filename = path
            raise

    made["open"] = open_for_people

    def stat_(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        if isinstance(path, int) or (dir_fd is None and not layer.entries):
            return real.stat(path, follow_symlinks=follow_symlinks)
        return placed(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    of("stat")(lambda path, at, back: real.lstat(back))
    placed, made["stat"] = made["stat"], stat_
    made["lstat"] = lambda path, *, dir_fd=None: stat_(path, dir_fd=dir_fd, follow_symlinks=False)
    of("statvfs")(lambda path, at, back: real.statvfs(back))
    of("getxattr")(lambda path, at, back, name: real.getxattr(back, name))
    of("listxattr")(lambda path, at, back: real.listxattr(back))
    of("listdir")(
        lambda path, at, back: [
            os.fsencode(name) if isinstance(path, bytes) else name
            for name in layer.listed(at, back)
        ]
    )

    @of("access", missing=True)
    def _(path: Any, at: str, back: Any, mode: int, *, effective_ids: bool = False) -> bool:
        return back is not None and bool(real.access(back, mode))

    @of("scandir")
    def _(path: Any, at: str, back: str) -> Any:
        if at == back and os.path.normcase(at) not in layer.names:
            return real.scandir(path)
        names = layer.listed(at, back)
        folder: Any = "" if isinstance(path, int) else os.fspath(path)
        code = os.fsencode if isinstance(folder, bytes) else str
        return _Entries(
            [_Entry(code(n), os.path.join(folder, code(n)), os.path.join(at, n)) for n in names]
        )

    @of("readlink", follow=False)
    def _(path: Any, at: str, back: str) -> Any:
        return real.readlink(os.fsencode(back) if isinstance(path, bytes) else back)

    def making(name: str) -> Callable[..., None]:
        @of(name, follow=False, missing=True)
        def make(path: Any, at: str, back: Any, *args: Any, **given: Any) -> None:
            if exists(back):
                raise _error(errno.EEXIST, path)
            if name == "mknod" and args and stat.S_IFMT(args[0]) in (stat.S_IFCHR, stat.S_IFBLK):
                raise _error(errno.EPERM, path)
            layer.check_folder(at)
            new = layer.new()
            if name == "symlink":
                real.symlink(*args, new, **given)
            else:
                getattr(real, name)(new, *args, **given)
            layer.put(at, new)

        return made[name]

    making("mkdir"), making("mkfifo"), making("mknod")
    link_to = making("symlink")

    def symlink(src: Any, dst: Any, target_is_directory: bool = False, **of_: Any) -> None:
        link_to(dst, src, target_is_directory=target_is_directory, **of_)

    made["symlink"] = symlink

    def gone(at: str) -> None:
        layer.check_folder(at)
        layer.put(at, None)

    @of("remove", "unlink", follow=False)
    def _(path: Any, at: str, back: str) -> None:
        if is_folder(back):
            raise _error(errno.EISDIR if sys.platform == "linux" else errno.EPERM, path)
        gone(at)

    @of("rmdir", follow=False)
    def _(path: Any, at: str, back: str) -> None:
        if not is_folder(back):
            raise _error(errno.ENOTDIR, path)
        if layer.listed(at, back):
            raise _error(errno.ENOTEMPTY, path)
        gone(at)

    def two(
        src: Any, dst: Any, src_dir_fd: Any, dst_dir_fd: Any, follow: bool = False
    ) -> tuple[str, str, str, Any]:
        at, back = layer.find(src, src_dir_fd, follow)
        to, there = layer.find(dst, dst_dir_fd, False)
        if not exists(back):
            raise _error(errno.ENOENT, src)
        layer.check_folder(at)
        layer.check_folder(to)
        return at, back, to, there if exists(there) else None

    def link(
        src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None, **of_: Any
    ) -> None:
        follow = of_.get("follow_symlinks", True)
        at, back, to, there = two(src, dst, src_dir_fd, dst_dir_fd, follow)
        if there:
            raise _error(errno.EEXIST, dst)
        layer.put(to, layer.own(at, back, is_written=False))

    def replace(src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
        at, back, to, there = two(src, dst, src_dir_fd, dst_dir_fd)
        if at == to:
            return
        if there and is_folder(back) != is_folder(there):
            raise _error(errno.ENOTDIR if is_folder(back) else errno.EISDIR, dst)
        if there and is_folder(back) and layer.listed(to, there):
            raise _error(errno.ENOTEMPTY, dst)
        if is_folder(back) and to.startswith(at + os.sep):
            raise _error(errno.EINVAL, dst)
        layer.move(at, to, back)

    def rename(src: Any, dst: Any, **of_: Any) -> None:
        if os.name == "nt" and exists(layer.find(dst, None, False)[1]):
            raise _error(errno.EEXIST, dst)
        replace(src, dst, **of_)

    made.update(link=link, replace=replace, rename=rename)

    def changing(name: str, *names: str, follow: bool = True) -> None:
        """Changes a copy; what is not copied, as a folder, stays as it is."""

        @of(name, *names, follow=follow)
        def _(path: Any, at: str, back: str, *args: Any, **given: Any) -> None:
            was = real.lstat(back)
            user = getattr(os, "geteuid", lambda: 0)()
            is_content = name in ("truncate", "setxattr", "removexattr")
            if not is_content and user and was.st_uid != user:
                raise _error(errno.EPERM, path)
            if not layer.is_scratch(back):
                is_small = stat.S_ISREG(was.st_mode) and was.st_size <= _MOST_COPIED
                if isinstance(path, int) or not is_small:
                    return
                back = layer.own(at, back, is_written=is_content)
            if not stat.S_ISLNK(was.st_mode):
                getattr(real, name)(back, *args, **given)

    for name in ("chmod", "chown", "utime", "truncate", "chflags", "setxattr", "removexattr"):
        changing(name, "f" + name)
    for name in ("chmod", "chown", "chflags"):
        changing(name, "l" + name, follow=False)

    @of("chdir", "fchdir")
    def _(path: Any, at: str, back: str) -> None:
        real.chdir(back)
        layer.cwd = at

    @of("chroot")
    def _(path: Any, at: str, back: str) -> None:
        raise _error(errno.EPERM, path)

    made["getcwd"] = lambda: layer.cwd
    made["getcwdb"] = lambda: os.fsencode(layer.cwd)
    return made


def install(layer: Layer, texts: dict[str, str], swap: Callable[[dict[Any, Any]], None]) -> None:
    """From now on files are those of `layer`; at their paths, `texts` replace what files hold."""
    for path, text in texts.items():
        at, _ = layer.find(path)
        with _open(back := layer.new(), "x", encoding="utf-8", newline="") as file:
            file.write(text)
        real.utime(back, (1, 1))  # no compiled file is of this time
        layer.put(at, back)
    new = {name: call for name, call in functions(layer).items() if hasattr(os, name)}

    def opener(path: Any, flags: int) -> int:
        return int(new["open"](path, flags, 0o666))

    def opening(make: Callable[..., Any], file: Any, args: Any, own: Any) -> Any:
        if isinstance(file, int):
            return make(file, *args, own)
        file = os.fspath(file)
        # Python tells of it by this very object before it calls the opener.
        before, _opening.path = getattr(_opening, "path", None), file
        try:
            return make(file, *args, own or opener)
        finally:
            _opening.path = before

    @functools.wraps(_open)
    def open_(
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
        return opening(_open, file, args, opener)

    class FileIO(io.FileIO):
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None):
            opening(super().__init__, file, (mode, closefd), opener)

    swapped: dict[Any, Any] = {getattr(os, name): new[name] for name in new}
    swapped |= {_open: open_, io.FileIO: FileIO, _open_code: lambda path: open_(path, "rb")}
    for kind in ("dir_fd", "fd", "follow_symlinks", "effective_ids"):
        able = getattr(os, f"supports_{kind}")
        able |= {swapped[each] for each in able if each in swapped}
    swap(swapped)
    # The import of Python has its own names for them.
    loading: Any = sys.modules["_frozen_importlib_external"]
    loading._os = SimpleNamespace(**{**vars(loading._os), **new})
    loading._io = SimpleNamespace(**{**vars(io), "FileIO": FileIO, "open_code": io.open_code})
    if os.name == "nt":  # which asks the system with functions of its own
        import genericpath

        for name in ("exists", "lexists", "isdir", "isfile", "islink"):
            if hasattr(genericpath, name):
                setattr(os.path, name, getattr(genericpath, name))
        os.path.realpath = lambda path, **_: layer.find(path)[0]  # type: ignore[assignment]
