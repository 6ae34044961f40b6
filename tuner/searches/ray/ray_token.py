"""The token that processes of a Ray cluster show each other: a file that its owner alone may read.

Ray makes `~/.ray/auth_token` for the first cluster of this machine with the modes that the umask
leaves, mostly for all to read (Ray 2.60). Who has it can run code as the user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tuner.core.errors import UnavailableError

TOKEN_BYTES = 32
"""As many as Ray takes."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def default_path() -> Path | None:
    """Where Ray keeps it by itself; None where nobody knows a home directory."""
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:  # as in some containers
        return None


def keep_private() -> str:
    """Make the token where there is none; what is to be said of one that others could read.

    Nothing is done where another token is named in the environment, or none is asked for. Raises
    `UnavailableError` where the file is not the user's own.
    """
    path = default_path()
    if path is None or _is_settled():
        return ""
    with _as_unavailable(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
        found = path.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise UnavailableError(
                f"{str(path)!r} is no file of yours, and is to be the token of your Ray clusters",
                hint="move it away: a new one is made then",
            )
        if not found.st_mode & _OTHERS:
            return ""
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    return (
        f"{path} could be read by other users of this machine, and no longer can: where they may "
        "have read it, remove it, and a new one is made"
    )


def _is_settled() -> bool:
    """Whether the environment says of which token, or that none is asked for."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"


def _make(path: Path) -> None:
    """A token at `path`, whole from the beginning, unless something is there."""
    if os.path.lexists(path):
        return
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        with contextlib.suppress(FileExistsError):  # another search was first
            os.link(draft, path)
    finally:
        Path(draft).unlink()


@contextlib.contextmanager
def _as_unavailable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"Ray needs a token in {str(path)!r}: {error.strerror or error}",
            hint="make it with `ray get-auth-token --generate`, or set RAY_AUTH_TOKEN",
        ) from error
