"""Token lengths from JSONL files: a column, and everything malformed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tuner.app.cli.main import run
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


def test_a_column_of_lengths(tmp_path):
    path = write(tmp_path, {"n_tokens": 5}, "", {"n_tokens": 7.0, "x": None}, {"n_tokens": 0})
    found = read_lengths(path, length_column="n_tokens")
    assert found == TokenLengths.from_lengths([5, 7, 0])


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 3}\r\n{"n": 4}')
    assert read_lengths(path, length_column="n").examples == 2


# --- malformed files -------------------------------------------------------------------------


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="is not a file"):
            read_lengths(path, length_column="n")


def test_every_malformed_line_is_named(tmp_path):
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


def test_malformed_bytes(tmp_path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(InputError, match=r"bytes.jsonl:2: not UTF-8 at byte 8"):
        read_lengths(path, length_column="n")


def test_a_huge_line_is_skipped_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_LINE_BYTES", 1000)
    fits = '{"n": 1' + " " * 992 + "}"
    path = write(tmp_path, fits, '{"n": 2}' + " " * 9000, {"n": "last"})
    with pytest.raises(InputError) as error:
        read_lengths(path, length_column="n")
    first, second = problems_of(error)
    assert f"{path}:2: the line is longer" in first
    assert f"{path}:3: n is a string" in second


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_examples(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no examples"):
        read_lengths(path, length_column="n")


def test_a_compressed_file_and_a_json_array_say_what_to_do(tmp_path):
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(InputError, match=r"compressed[\s\S]*gunzip"):
        read_lengths(packed, length_column="n")
    array = write(tmp_path, '[{"n": 1},', '{"n": 2}]')
    with pytest.raises(InputError, match=r"jq -c"):
        read_lengths(array, length_column="n")


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_lengths(path, length_column="n")


def test_a_file_without_a_named_column(tmp_path):
    path = write(tmp_path, {"n": 1, "text": "a", "ok": True})
    with pytest.raises(InputError, match=r"is unknown[\s\S]*first line: n\)"):
        read_lengths(path, None)


# -- `tuner data` -----------------------------------------------------------------------------


SPACE = """\
workload: causal_lm
model: tiny
knobs:
  micro_batch: [1, 2]
  max_length: [25, 200]
fixed: {effective_batch: 2}
derived: {grad_accum: effective_batch // micro_batch}
"""
LENGTHS = [10, 20, 30, 100]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_space("silent", SPACE)
    stated = "data: {examples: 4, token_lengths: {mean: 40, max: 100}}\n"
    write_space("stated", SPACE + stated)
    Path("d.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in LENGTHS))
    return tmp_path


def write_space(name: str, text: str) -> None:
    Path(f"{name}.yaml").write_text(f"name: {name}\n{text}")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["data", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["data", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.usefixtures("folder")
class TestAnswers:
    FILE = ("--data", "d.jsonl", "--length-column", "n")

    def test_numbers_by_hand(self, capsys):
        found = as_json(capsys, "--space", "silent.yaml", *self.FILE)
        assert (found["examples"], found["tokens"], found["max_tokens"]) == (4, 160, 100)
        short, full = found["max_lengths"]
        assert (short["max_length"], full["max_length"]) == (25, 200)
        assert short["truncated_examples_share"]["value"] == pytest.approx(0.5)
        assert short["lost_tokens_share"]["value"] == pytest.approx(0.5)
        assert full["steps_per_epoch"] == {"longest": 2, "max_length": 2, "packing": 1}
        pair = full["padding"]["longest"][1]
        assert (pair["micro_batch"], pair["worst_length"]) == (2, 100)
        assert pair["expected_length"]["value"] == pytest.approx(920 / 16)

    def test_settings_narrow_the_tables(self, capsys):
        pinned = ("--set", "max_length=200", "--set", "micro_batch=2")
        found = as_json(capsys, "--space", "silent.yaml", *self.FILE, *pinned)
        (row,) = found["max_lengths"]
        assert [entry["micro_batch"] for entry in row["padding"]["longest"]] == [2]

    def test_tables_fit_a_terminal_of_80_columns(self, capsys):
        for space in (("silent.yaml", *self.FILE), ("stated.yaml",), ("qlora27b",)):
            assert run(["data", "--space", *space]) == 0
            out = capsys.readouterr().out
            assert max(map(len, out.splitlines())) <= 80
            assert "…" not in out

    def test_more_micro_batches_than_a_table_holds(self, capsys):
        wide = SPACE.replace("micro_batch: [1, 2]", "micro_batch: {min: 1, max: 9, step: 1}")
        wide = wide.replace("effective_batch: 2", "effective_batch: 2520")
        write_space("wide", wide)
        assert run(["data", "--space", "wide.yaml", *self.FILE]) == 0
        out = capsys.readouterr().out
        assert "batch 1 " in out
        assert "batch 9 " in out
        assert "3 more micro-batches" in out


@pytest.mark.usefixtures("folder")
class TestBadInput:
    def test_a_space_that_states_nothing(self, capsys):
        assert "has no token lengths" in error_of(capsys, "--space", "silent.yaml")

    def test_a_column_without_a_file(self, capsys):
        err = error_of(capsys, "--space", "stated.yaml", "--length-column", "n")
        assert "--data" in err
