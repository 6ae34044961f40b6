"""What is known of values in device memory, noted on the storage that holds them.

Views share the note, and it ends with the memory. Without a note, integers and few floats are
what memory holds, and more floats are unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import full

WRITTEN, UNKNOWN, UNIFORM = "written", "unknown", "uniform"

AT_MOST = "at most"
"""Booleans that are true wherever they may be true: a selection by them is as large as possible."""
ASSUMED = "assumed"
"""Choices among unknown floats that go round all candidates; unknown floats that are finite."""
MADE_UP = "made up"
"""Values that nobody knows, and no bound of them either."""
_ORDER: dict[str | None, int] = {None: 0, AT_MOST: 1, ASSUMED: 2, MADE_UP: 3}

FEW = 4096
"""Memory always holds the floats of a storage that has no more than these."""

NOTE = "tuner_values"
"""The attribute of a storage that has its note."""


class Note(NamedTuple):
    """Of one storage: where its values are, and what they rest on.

    `state` is `WRITTEN` (memory holds them), `UNKNOWN`, or `UNIFORM` (all are `value`, of `dtype`,
    and memory does not hold them). `origin` is None for values that the program computed.
    """

    state: str
    value: Any = None
    dtype: torch.dtype | None = None
    origin: str | None = None


_KNOWN, _UNKNOWN = Note(WRITTEN), Note(UNKNOWN)


def noted(tensor: torch.Tensor) -> Note | None:
    """The note of this tensor's storage; None for one without a storage of its own (sparse)."""
    try:
        return getattr(tensor.untyped_storage(), NOTE, None)
    except NotImplementedError:
        return None


def origin_of(tensor: torch.Tensor) -> str | None:
    """What the values of this tensor rest on; None for what the program computed."""
    note = noted(tensor)
    return None if note is None else note.origin


def worst(one: str | None, other: str | None) -> str | None:
    """The origin of what is computed from values of two origins."""
    return one if _ORDER[one] >= _ORDER[other] else other


def note_known(tensor: torch.Tensor) -> None:
    """Notes that the floats of this storage are in memory."""
    _set(tensor, _KNOWN)


def note_unknown(tensor: torch.Tensor) -> None:
    """Notes that nobody computed the integers of this storage."""
    _set(tensor, _UNKNOWN)


def note_uniform(tensor: torch.Tensor, value: Any, origin: str | None = None) -> None:
    """Notes that all elements of this storage have this value; memory does not have it."""
    _set(tensor, Note(UNIFORM, value, tensor.dtype, origin))


def constant(tensor: torch.Tensor, note: Note) -> torch.Tensor | None:
    """The value that all elements of this tensor have, as a CPU tensor; None where they differ."""
    if note.state != UNIFORM or (note.dtype is not tensor.dtype and note.value):
        return None
    return full((), note.value, dtype=tensor.dtype)


def note_origin(tensor: torch.Tensor, origin: str | None) -> None:
    """Notes what the values in memory rest on, beside what was noted before."""
    if origin is None:
        return
    note = noted(tensor)
    if note is None:
        size = tensor.untyped_storage().nbytes()
        if tensor.dtype.is_floating_point and size > FEW * tensor.dtype.itemsize:
            return  # part of many floats that are unknown anyway
        note = _KNOWN
    if note.state != UNKNOWN:
        _set(tensor, note._replace(origin=worst(note.origin, origin)))


def forget_note(tensor: torch.Tensor) -> None:
    """Takes back what was noted of this storage."""
    storage: Any = tensor.untyped_storage()
    if getattr(storage, NOTE, None) is not None:
        storage.tuner_values = None


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether a write to this tensor writes all of its storage."""
    return tensor.numel() * tensor.dtype.itemsize >= tensor.untyped_storage().nbytes()


def _set(tensor: torch.Tensor, note: Note) -> None:
    storage: Any = tensor.untyped_storage()
    storage.tuner_values = note
