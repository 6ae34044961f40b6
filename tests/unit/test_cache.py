"""The cache on disk: what is damaged, stale or strange is rebuilt or ignored, never trusted."""

import hashlib
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.predict import cache

ARRAYS = {"counts": np.arange(12, dtype=np.int32).reshape(3, 4), "names": np.array(["a", "bc"])}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "timelines"))
    return tmp_path / "timelines"


def stored_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def checked(file: str, content: bytes) -> bytes:
    """Content with the checksum that makes it look whole."""
    return hashlib.sha256(file.encode() + b"\0" + content).digest() + content


def test_arrays_come_back_as_they_were(folder):
    cache.write_arrays("entry", ARRAYS)
    read = cache.read_arrays("entry")
    assert read.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    assert [path.name for path in folder.iterdir()] == ["entry.npz"]


@settings(max_examples=60)
@given(place=st.integers(0, 10_000), value=st.integers(1, 255))
def test_one_changed_byte_makes_an_entry_unusable(folder, place, value):
    cache.write_arrays("entry", ARRAYS)
    path = stored_file(folder)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= value
    path.write_bytes(content)
    assert cache.read_arrays("entry") is None
    assert not path.exists()  # so that it is built again and not looked at each time


@settings(max_examples=30)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_truncated_entry_is_unusable(folder, kept):
    cache.write_arrays("entry", ARRAYS)
    cache.write_json("numbers", list(range(100)))
    for path in folder.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
    assert cache.read_arrays("entry") is None
    assert cache.read_json("numbers") is None
    assert list(folder.iterdir()) == []


def test_an_entry_under_the_name_of_another_is_unusable(folder):
    """Whole in itself, it would give the numbers of something else."""
    for name in ("one", "other"):
        cache.write_arrays(name, ARRAYS)
        cache.write_json(name, [name])
    for suffix in ("npz", "json"):
        (folder / f"one.{suffix}").replace(folder / f"other.{suffix}")
    assert cache.read_arrays("other") is None
    assert cache.read_json("other") is None
    assert list(folder.iterdir()) == []


def pickled_array() -> bytes:
    """An array file that numpy would have to unpickle."""
    buffer = io.BytesIO()
    np.savez(buffer, counts=np.array([{"an": "object"}], dtype=object))
    return buffer.getvalue()


STRANGE = {
    "no archive": b"nothing of the sort",
    "empty": b"",
    "a pickle": pickle.dumps({"counts": 1}),
    "objects in arrays": pickled_array(),
    "a plain array": None,
    "an archive of other files": None,
}


def strange_content(name: str) -> bytes:
    buffer = io.BytesIO()
    if name == "a plain array":
        np.save(buffer, np.arange(3))
        return buffer.getvalue()
    if name == "an archive of other files":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("counts.npy", b"not an array")
        return buffer.getvalue()
    return STRANGE[name] or b""


@pytest.mark.parametrize("name", STRANGE)
def test_strange_content_with_a_right_checksum_is_unusable(folder, name):
    folder.mkdir(parents=True)
    for suffix in ("npz", "json"):
        file = f"entry.{suffix}"
        (folder / file).write_bytes(checked(file, strange_content(name)))
    assert cache.read_arrays("entry") is None
    assert cache.read_json("entry") is None
    assert list(folder.iterdir()) == []


class Trap:
    """Raises when it is unpickled."""

    def __reduce__(self):
        return (os.remove, ("a file that a trap would remove",))


def test_nothing_in_an_entry_is_executed(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "a file that a trap would remove"
    victim.write_text("still here")
    buffer = io.BytesIO()
    np.savez(buffer, counts=np.array([Trap()], dtype=object))
    folder.mkdir(parents=True)
    (folder / "entry.npz").write_bytes(checked("entry.npz", buffer.getvalue()))
    assert cache.read_arrays("entry") is None
    assert victim.exists()


def test_a_changed_environment_has_other_entries(monkeypatch):
    before = cache.entry_name("passes", "structure")
    assert cache.entry_name("passes", "structure") == before
    assert cache.entry_name("passes", "other structure") != before
    monkeypatch.setattr(cache, "environment_digest", lambda: "another version of a library")
    assert cache.entry_name("passes", "structure") != before


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "bitsandbytes", "numpy"])
def test_each_library_is_part_of_the_environment(library, monkeypatch):
    cache.environment_digest.cache_clear()
    before = cache.environment_digest()
    real = cache.metadata.version
    monkeypatch.setattr(
        cache.metadata, "version", lambda name: "0.0.1" if name == library else real(name)
    )
    cache.environment_digest.cache_clear()
    try:
        assert cache.environment_digest() != before
    finally:
        cache.environment_digest.cache_clear()


def test_code_that_traces_is_part_of_the_environment(monkeypatch):
    cache.environment_digest.cache_clear()
    before = cache.environment_digest()
    real = Path.read_bytes
    seen = set()

    def read_bytes(path: Path) -> bytes:
        seen.add(f"{path.parent.name}/{path.name}")
        return real(path) + (b"# a change" if path.name == "recorder.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    cache.environment_digest.cache_clear()
    try:
        assert cache.environment_digest() != before
    finally:
        cache.environment_digest.cache_clear()
    assert {"tracing/trace.py", "compiler/deepening.py", "training/causal_lm.py"} <= seen


def test_switched_off_it_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "off")
    monkeypatch.chdir(tmp_path)
    cache.write_arrays("entry", ARRAYS)
    cache.write_json("entry", [1])
    cache.delete("entry")
    assert cache.cache_folder() is None
    assert cache.read_arrays("entry") is None
    assert cache.read_json("entry") is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    # A file where the folder should be: no one can write into it, root included.
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(blocked))
    cache.write_arrays("entry", ARRAYS)
    cache.write_json("entry", [1])
    cache.delete("entry")
    assert cache.read_arrays("entry") is None
    assert cache.read_json("entry") is None
    assert blocked.read_text() == "a file"


def test_a_full_disk_leaves_neither_an_entry_nor_a_draft(folder, monkeypatch):
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache.write_json("entry", [1])
    monkeypatch.undo()
    assert not folder.exists() or list(folder.iterdir()) == []
