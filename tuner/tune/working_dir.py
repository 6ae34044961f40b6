"""A folder of the user's own code that is to go to a cluster: which of its files, and how much.

What is sent can be read by everybody who may use the cluster. So what looks like a secret, what a
link takes from elsewhere and what is far too much is refused unless it is asked for, and what goes
is put together here, file by file, rather than by Ray.
"""

from __future__ import annotations

import fnmatch
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tuner.errors import InputError, Problem
from tuner.tune.ray_private import ignored_by_files
from tuner.units import format_size

DEFAULT_MAX_BYTES = 200 << 20
"""Of all files together; Ray's own store of packages takes 500 MiB."""

NEVER = frozenset({".git", ".hg", ".svn", ".venv", "venv", "__pycache__"})
"""Folders that a training does not read: histories, environments of this machine, compiled code."""

SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "id_rsa*",
    "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", ".pgpass", ".pypirc", ".npmrc",
    ".git-credentials", "credentials", "credentials.json", "auth_token", ".htpasswd",
    "service-account*.json", "kubeconfig", "secrets.*",
)  # fmt: skip
"""Names of files that usually hold keys, tokens and passwords."""

SECRET_FOLDERS = frozenset({".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud"})

HARMLESS = (".env.example", ".env.sample", ".env.template", "*.pub")

_KEY_BEGINS = b"-----BEGIN "
_KEY = b"PRIVATE KEY"
_HEAD_BYTES = 100

SHOWN = 20
"""Files that an error or a list names one by one."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One file that goes along: its path in the folder, where it is read, and its size."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Package:
    """What of `folder` goes along. `left_out` is what does not."""

    folder: Path
    files: tuple[Sent, ...]
    left_out: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """All files together, before they are packed."""
        return sum(file.size_bytes for file in self.files)

    def lines(self) -> Iterator[str]:
        """What goes and what does not, for people; the largest files first."""
        yield (
            f"sends {len(self.files)} files of {str(self.folder)!r}, {format_size(self.size_bytes)}"
        )
        largest = sorted(self.files, key=lambda file: (-file.size_bytes, file.name))
        yield from (f"  {format_size(f.size_bytes):>10}  {f.name}" for f in largest[:SHOWN])
        if len(largest) > SHOWN:
            yield f"  and {len(largest) - SHOWN} smaller ones"
        if self.left_out:
            yield f"leaves out {_some(self.left_out)}"

    def write(self, archive: Path) -> None:
        """Pack the files. Raises `InputError` for one that cannot be read."""
        with zipfile.ZipFile(
            archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False
        ) as written:
            for file in self.files:
                try:
                    written.write(file.path, file.name)
                except OSError as error:
                    raise InputError(
                        f"cannot read {str(file.path)!r}: {error.strerror or error}"
                    ) from error


def collect(
    folder: Path,
    *,
    secrets: bool = False,
    links: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Package:
    """What of `folder` is to go along: all but what .gitignore and .rayignore name, and `NEVER`.

    Raises `InputError` with every file that looks like a secret unless `secrets`, every link out of
    the folder unless `links`, and for more than `max_bytes`.
    """
    found = _Found(folder.resolve())
    found.look(folder, "", [], frozenset())
    wrong = [] if links else [Problem(f"is a link to {to}", name) for name, to in found.outside]
    if wrong:
        raise InputError(
            f"{len(wrong)} links lead out of --working-dir {str(folder)!r}",
            hint="remove them, name them in .rayignore, or send what they lead to with "
            "--allow links",
            problems=wrong[:SHOWN],
        )
    names = [] if secrets else [f.name for f in found.files if _is_secret(f)]
    if names:
        raise InputError(
            f"{len(names)} files of --working-dir {str(folder)!r} look like secrets, and whoever "
            "uses the cluster could read them",
            hint="name them in .rayignore, or send them with --allow secrets",
            problems=[Problem("looks like a secret", name) for name in names[:SHOWN]],
        )
    package = Package(folder, tuple(found.files), tuple(found.left_out))
    if package.size_bytes > max_bytes:
        largest = sorted(package.files, key=lambda file: -file.size_bytes)[:SHOWN]
        raise InputError(
            f"--working-dir {str(folder)!r} holds {format_size(package.size_bytes)}, and at most "
            f"{format_size(max_bytes)} are sent",
            hint="name what the job does not need in .rayignore, or allow more with --max-size",
            problems=[Problem(format_size(file.size_bytes), file.name) for file in largest],
        )
    return package


@dataclass(slots=True)
class _Found:
    """What was found below `top`."""

    top: Path
    files: list[Sent] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def look(
        self,
        folder: Path,
        prefix: str,
        ignored: list[Callable[[Path], bool]],
        above: frozenset[str],
    ) -> None:
        """Add what is in `folder`; `above` are the real folders around it, which links may name."""
        real = os.path.realpath(folder)
        if real in above:
            return  # a link to a folder around it
        try:
            ignored = [*ignored, *ignored_by_files(folder)]
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(f"cannot read {str(folder)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(
                f"cannot read .gitignore or .rayignore in {str(folder)!r}: {error}"
            ) from error
        for entry in entries:
            name, path = prefix + entry.name, folder / entry.name
            if entry.name in NEVER or any(is_ignored(path) for is_ignored in ignored):
                self.left_out.append(name)
                continue
            target = os.path.realpath(path)
            if entry.is_symlink() and not Path(target).is_relative_to(self.top):
                self.outside.append((name, target))
            if entry.is_dir():
                self.look(path, f"{name}/", ignored, above | {real})
            elif entry.is_file():
                self.files.append(Sent(name, path, entry.stat().st_size))
            else:
                self.left_out.append(f"{name} (no file)")


def _is_secret(file: Sent) -> bool:
    *folders, last = file.name.lower().split("/")
    if any(fnmatch.fnmatchcase(last, pattern) for pattern in HARMLESS):
        return False
    if not SECRET_FOLDERS.isdisjoint(folders):
        return True
    if any(fnmatch.fnmatchcase(last, pattern) for pattern in SECRETS):
        return True
    try:
        with file.path.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return False  # packing it says what is wrong
    return head.lstrip().startswith(_KEY_BEGINS) and _KEY in head


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
