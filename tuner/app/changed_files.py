"""The files that a branch changes, and those of its base, read with git.

Nothing of the checkout is written: the files of the base go to a temporary folder.
"""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import owned_folder
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.reads import SETTINGS_FILES, modules_of

READ = (*PYTHON, *SETTINGS_FILES)
"""Suffixes of files that a program has settings in."""

_PINS = (".txt", ".lock")
"""Suffixes of files that pin releases, beside those of settings."""

_MOST_BYTES = 64 << 20
"""The largest file of the base that is read: a notebook keeps its pictures."""

_REGULAR = ("100644", "100755")
"""Modes of git for files; links and submodules have others."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths below the root of a repository that differ from the commit `base`.

    `before` has the path in the base of each file that was renamed. `untracked` files are in none.
    """

    root: Path
    base: str
    files: frozenset[str]
    before: Mapping[str, str]
    untracked: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def base_folder(self) -> Iterator[Path]:
        """A temporary folder with the files of the base that settings are read from."""
        with owned_folder(for_ray=False) as (folder, _):
            tree = folder / "base"
            (tree / ".git").mkdir(parents=True)  # where the search for its lock files ends
            for path, data in _files_of(self.root, self.base):
                target = tree / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            yield tree


def find_changes(folder: Path, base: str, files: Sequence[Path] = ()) -> Changes:
    """The tracked files around `folder` that differ from `base`; `files` in their place, if any.

    Compares with the commit at which the branch left `base`, or with `base` itself where that is
    not in a shallow clone. Raises `InputError` for an unknown commit and outside of a repository.
    """
    root = _root(folder)
    commit = next(filter(None, (_commit(root, name) for name in (base, f"origin/{base}"))), None)
    if commit is None and base == "HEAD":  # the first commit is being made
        commit = _git(root, "hash-object", "-t", "tree", "--stdin").decode().strip()
    if commit is None:
        raise InputError(
            f"there is no commit {base!r} in this repository",
            hint="name a branch or commit with --base; in a shallow clone, fetch it first: "
            f"git fetch --depth=1 origin {base}",
        )
    commit = _asked(root, "merge-base", commit, "HEAD") or commit
    words = iter(_git(root, "diff", "--name-status", "-M", "-z", commit).decode().split("\0"))
    changed: set[str] = set()
    before: dict[str, str] = {}
    for status in filter(None, words):
        path = next(words)
        if status.startswith("R"):
            before[path := next(words)] = path
        changed.add(path)
    if files:
        named = (Path(folder, file).resolve() for file in files)
        changed = {_below(root, path) for path in named}
        return Changes(root, commit, frozenset(changed), before)
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")
    return Changes(root, commit, frozenset(changed), before, frozenset(filter(None, listed)))


def _root(folder: Path) -> Path:
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
    except InputError as error:
        if "not a git repository" not in error.message:
            raise
        raise InputError(
            f"{folder.resolve()} is not in a git repository",
            hint="without one: tuner check --predict --gpu rtx4090 train.py",
        ) from error


def _below(root: Path, path: Path) -> str:
    if not path.is_file() or not path.is_relative_to(root.resolve()):
        raise InputError(f"no file of this repository: {path}", hint=f"its root is {root}")
    return path.relative_to(root.resolve()).as_posix()


class Imports:
    """The files of a repository that import each other; each is parsed once.

    A module is looked for in all folders above its importer, of which one is the program's.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._of: dict[str, frozenset[str]] = {}

    def of(self, path: str) -> frozenset[str]:
        """The files that the Python file `path` imports; none of a file that is no Python."""
        if path not in self._of:
            self._of[path] = frozenset(self._read(self.root / path))
        return self._of[path]

    def _read(self, file: Path) -> Iterator[str]:
        try:
            tree = ast.parse(SourceFile(file, file.read_bytes(), []).python.text)
        except (OSError, ValueError, SyntaxError, InputError):
            return
        folders = [folder for folder in file.parents if folder.is_relative_to(self.root)]
        for found in modules_of(tree, file, folders):
            if found.is_relative_to(self.root):
                yield found.relative_to(self.root).as_posix()

    def reached_from(self, path: str) -> set[str]:
        """`path` and the files that it imports, over any number of steps."""
        found, new = {path}, {path}
        while new:
            new = {other for one in new for other in self.of(one)} - found
            found |= new
        return found

    def importers(self, files: Iterable[str]) -> set[str]:
        """`files` and those that import one of them, over any number of steps, or name it."""
        found, new = set(files), set(files)
        while new:
            data = {path for path in new if PurePosixPath(path).suffix not in PYTHON}
            naming = self._matching([_literal(PurePosixPath(path).name) for path in data])
            modules = [pattern for path in new - data for pattern in _mentions(path)]
            importing = {p for p in self._matching(modules) if self.of(p) & new}
            new = (naming | importing) - found
            found |= new
        return found

    def _matching(self, patterns: Iterable[str]) -> set[str]:
        """The Python files with a line that matches one of the patterns."""
        options = [word for pattern in dict.fromkeys(patterns) for word in ("-e", pattern)]
        if not options:
            return set()
        arguments = ("-l", "-z", "-E", *options, "--", *(f"*{suffix}" for suffix in PYTHON))
        return set((_asked(self.root, "grep", *arguments) or "").split("\0")) - {""}


def _mentions(file: str) -> list[str]:
    """Patterns of the lines that import the module `file`, some more among them."""
    path = PurePosixPath(file)
    folder = _literal(path.parent.name)
    name = folder if path.name == "__init__.py" else _literal(path.stem)
    several = f"({folder}|\\.)" if folder else r"\."
    return [rf"(from|import)[ .].*{name}", rf"from [.A-Za-z0-9_]*{several} import \("]


def _literal(text: str) -> str:
    return re.sub(r"([.+*?(){}^$|\\\[\]])", r"\\\1", text)


def _files_of(root: Path, commit: str) -> Iterator[tuple[str, bytes]]:
    """The files of a commit with settings or pins, as git has them: no filter runs."""
    listed = _git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", commit).decode()
    paths: list[tuple[str, str]] = []
    for entry in filter(None, listed.split("\0")):
        head, _, path = entry.partition("\t")
        mode, _, name, size = head.split()
        wanted = PurePosixPath(path).suffix in (*READ, *_PINS)
        if wanted and mode in _REGULAR and int(size) <= _MOST_BYTES:
            paths.append((path, name))
    names = "".join(f"{name}\n" for _, name in paths)
    answer = _git(root, "cat-file", "--batch", given=names.encode())
    start = 0
    for path, _ in paths:
        end = answer.index(b"\n", start)
        length = int(answer[start:end].split()[2])
        start = end + 1 + length + 1
        yield path, answer[end + 1 : end + 1 + length]


def _commit(root: Path, name: str) -> str | None:
    return _asked(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
    )


def _asked(root: Path, *words: str) -> str | None:
    """The answer of git; None where its answer is no."""
    try:
        return _git(root, *words).decode().strip()
    except InputError:
        return None


def _git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - git itself
            ["git", "-C", str(folder), *words],  # noqa: S607
            input=given,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise UnavailableError(
            "git is not installed", hint="tuner reads the base with it"
        ) from error
    if done.returncode:
        raise InputError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
