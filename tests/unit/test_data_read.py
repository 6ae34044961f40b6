"""Token lengths from JSONL files: a column, and everything malformed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tuner.core.errors import InputError
from tuner.space import TokenLengths, data
from tuner.space.data import read_lengths


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def problems_of(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [str(problem) for problem in error.value.problems]


# --- what is read ----------------------------------------------------------------------------


def test_a_column_of_lengths(tmp_path: Path):
    path = write(tmp_path, {"n_tokens": 5}, "", {"n_tokens": 7.0, "x": None}, {"n_tokens": 0})
    found = read_lengths(path, length_column="n_tokens")
    assert found == TokenLengths.from_lengths([5, 7, 0])


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 3}\r\n{"n": 4}')
    assert read_lengths(path, length_column="n").examples == 2


# --- malformed files -------------------------------------------------------------------------


def test_pipes_and_devices_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="is not a file"):
            read_lengths(path, length_column="n")


def test_every_malformed_line_is_named(tmp_path: Path):
    path = write(
        tmp_path,
        {"n": 1},
        '{"n": 2',
        "[1, 2]",
        {"m": 3},
        {"n": -4},
        {"n": True},
        {"n": "5"},
        {"n": 1.5},
        "[" * 100_000,
        '{"n": ' + "9" * 5000 + "}",
        {"n": 2**40},
    )
    with pytest.raises(InputError) as error:
        read_lengths(path, length_column="n")
    found = problems_of(error)
    assert [text.split(":")[1] for text in found] == [str(n) for n in range(2, 12)]
    assert all(text.startswith(f"{path}:") for text in found)
    for text, part in zip(
        found,
        (
            "not JSON at column",
            "a list where an object is needed",
            "no column 'n' (there are: m)",
            "n is -4",
            "n is True",
            "n is a string",
            "n is 1.5",
            "nested too deeply",
            "not readable as JSON",
            "n is 1099511627776",
        ),
        strict=True,
    ):
        assert part in text


def test_malformed_bytes(tmp_path: Path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(InputError, match=r"bytes.jsonl:2: not UTF-8 at byte 8"):
        read_lengths(path, length_column="n")


def test_a_huge_line_is_skipped_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "MAX_LINE_BYTES", 1000)
    fits = '{"n": 1' + " " * 992 + "}"
    path = write(tmp_path, fits, '{"n": 2}' + " " * 9000, {"n": "last"})
    with pytest.raises(InputError) as error:
        read_lengths(path, length_column="n")
    first, second = problems_of(error)
    assert f"{path}:2: the line is longer" in first
    assert f"{path}:3: n is a string" in second


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_examples(tmp_path: Path, content: str):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no examples"):
        read_lengths(path, length_column="n")


def test_a_compressed_file_and_a_json_array_say_what_to_do(tmp_path: Path):
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(InputError, match=r"compressed[\s\S]*gunzip"):
        read_lengths(packed, length_column="n")
    array = write(tmp_path, '[{"n": 1},', '{"n": 2}]')
    with pytest.raises(InputError, match=r"jq -c"):
        read_lengths(array, length_column="n")


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_lengths(path, length_column="n")


def test_a_file_without_a_named_column(tmp_path: Path):
    path = write(tmp_path, {"n": 1, "text": "a", "ok": True})
    with pytest.raises(InputError, match=r"is unknown[\s\S]*first line: n\)"):
        read_lengths(path, None)
