"""Timelines and predictions on disk: read quickly, rebuilt when anything about them changed.

An entry's name is a digest of everything that the result depends on: the model's
architecture, the structure, the code that traces, and the versions of the libraries. An
entry that is damaged is deleted and built again; nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from tuner.core.files import user_cache
from tuner.core.records import Prediction
from tuner.cost.as_arrays import from_arrays

FOLDER_VARIABLE = "TUNER_CACHE"
"""Environment variable that names the folder; "off" switches the cache off."""

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")
_CODE = ("core", "cost", "predict")
_CHECKSUM_BYTES = 32


def cache_folder() -> Path | None:
    """The folder of entries: $TUNER_CACHE, else the user's cache folder; None when off."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named)
    folder = user_cache()
    return folder and folder / "timelines"


@cache
def environment_digest(without: str = "") -> str:
    """A digest of the code that traces and of the libraries it traces.

    The code in folders of the name `without` is left out.
    """
    digest = hashlib.sha256(sys.version.encode())
    for library in _LIBRARIES:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            version = "missing"
        digest.update(f"{library}={version}\n".encode())
    package = Path(__file__).parents[1]
    for folder in _CODE:
        for path in sorted((package / folder).rglob("*.py")):
            if path.parent.name == without:
                continue
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def entry_name(*parts: str) -> str:
    """The name of an entry that depends on these parts and on the environment."""
    text = json.dumps([environment_digest(), *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_arrays(name: str) -> Mapping[str, Any] | None:
    """The arrays stored under a name, or None when there are none, or none that are whole."""
    content = _read(f"{name}.npz")
    if content is None:
        return None
    try:
        return _unpacked(content)
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        _delete(f"{name}.npz")
        return None


def _unpacked(content: bytes) -> dict[str, Any]:
    import numpy as np

    arrays = np.load(io.BytesIO(content), allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise ValueError("one array and no archive of arrays")
    with arrays:
        found = {key: arrays[key] for key in arrays.files}
    if not all(isinstance(array, np.ndarray) for array in found.values()):
        raise ValueError("an archive of other files")
    return found


def write_arrays(name: str, arrays: Mapping[str, Any]) -> None:
    """Store arrays under a name. A folder that cannot be written is no error."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    _write(f"{name}.npz", buffer.getvalue())


def read_json(name: str) -> Any | None:
    """The JSON value stored under a name, or None."""
    content = _read(f"{name}.json")
    if content is None:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        _delete(f"{name}.json")
        return None


def write_json(name: str, value: Any) -> None:
    """Store a JSON value under a name. A folder that cannot be written is no error."""
    _write(f"{name}.json", json.dumps(value).encode())


def delete(name: str) -> None:
    """Forget what is stored under a name, because it turned out not to be usable."""
    _delete(f"{name}.npz")
    _delete(f"{name}.json")


def _checksum(file: str, content: bytes) -> bytes:
    """Digest of an entry under its name: an entry under another name counts as damaged."""
    return hashlib.sha256(file.encode() + b"\0" + content).digest()


def _read(file: str) -> bytes | None:
    folder = cache_folder()
    if folder is None:
        return None
    try:
        stored = (folder / file).read_bytes()
    except OSError:
        return None
    checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    if _checksum(file, content) != checksum:
        _delete(file)
        return None
    return content


def _write(file: str, content: bytes) -> None:
    folder = cache_folder()
    if folder is None:
        return
    path = folder / file
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(_checksum(file, content) + content)
        draft.replace(path)
    except OSError:
        # A full or read-only disk costs time the next time, and nothing else.
        _delete(draft.name)


def _delete(file: str) -> None:
    folder = cache_folder()
    if folder is not None:
        try:
            (folder / file).unlink(missing_ok=True)
        except OSError:
            return


def read_predictions(entry: str) -> list[Prediction] | None:
    """The predictions in this entry; None where there are none that are whole."""
    return _parsed(entry, lambda stored: [*map(Prediction.from_dict, stored)])


_Stored = TypeVar("_Stored")


def read_parsed(entry: str, cls: type[_Stored]) -> _Stored | None:
    """The dataclass of arrays in this entry; None where there is none that is whole."""
    return _parsed(entry, partial(from_arrays, cls), read_arrays)


def _parsed(
    entry: str, parse: Callable[[Any], _Stored], read: Callable[[str], Any] = read_json
) -> _Stored | None:
    """The entry's content as parsed by `parse`; an entry that cannot be parsed is deleted."""
    stored = read(entry)
    if stored is None:
        return None
    try:
        return parse(stored)
    except (KeyError, TypeError, ValueError, IndexError):
        delete(entry)
        return None
