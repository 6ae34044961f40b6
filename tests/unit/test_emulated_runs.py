"""Published programs on emulated GPUs: their command lines, what they print, and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy.rows import Row, read_rows
from benchmarks.emulated_runs.__main__ import ROWS
from benchmarks.emulated_runs.environments import source
from benchmarks.emulated_runs.page import page
from benchmarks.emulated_runs.programs import Program, program_of
from benchmarks.emulated_runs.running import Outcome, save, saved


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder in which the programs' sources lie already."""
    for name in ("fitcheck_llm-0.3.1", "fitscout-0.1.1"):
        (tmp_path / "sources" / name).mkdir(parents=True)
    return tmp_path


def program(row: Row) -> Program:
    found = program_of(row)
    assert isinstance(found, Program), found
    return found


def outcome(row: int, **changes: object) -> Outcome:
    made = Outcome(
        row=row,
        environment="torch-2.10",
        emulated={"allocated": 2.0, "reserved": 3.03},
        measured={"allocated": 2.00004, "reserved": 3.0},
        torch="2.10.0+cu128",
        note="",
        unknown_calls={},
        duration_s=1.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_each_row_has_a_program_or_a_reason(rows: list[Row]) -> None:
    assert all(isinstance(program_of(rows[number]), Program) for number in ROWS)
    assert all(len(found) > 20 for row in rows if isinstance(found := program_of(row), str))


def test_a_row_is_asked_for_as_the_package_asks(rows: list[Row], root: Path) -> None:
    command = program(rows[46]).command(rows[46], root, root)

    assert command[0] == str(source(root, "fitcheck-llm", "0.3.1") / "scripts" / "measure.py")
    assert command[1] == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    told = " ".join(command)
    assert "--batch-size 2 --seq-len 1024 --grad-checkpoint --quant nf4" in told
    assert "--flash-attn --attn-impl sdpa" in told
    assert "--attn-impl" not in program(rows[45]).command(rows[45], root, root)


def test_no_command_holds_a_measured_value(rows: list[Row], root: Path) -> None:
    changed = replace(rows[46], peak_gib=99.0, throughput=99.0)
    assert program(changed).command(changed, root, root) == program(rows[46]).command(
        rows[46], root, root
    )


def test_results_are_found_among_warnings(rows: list[Row], tmp_path: Path) -> None:
    measured = {
        "peak_allocated_mib": 2048.0,
        "peak_reserved_mib": 3072.0,
        "after_load_allocated_mib": 512.0,
        "peak_forward_mib": 1024.0,
    }
    printed = "a warning {\n" + json.dumps({"run": {}, "measured": measured}, indent=2) + "\nbye\n"
    assert program(rows[46]).read(printed, tmp_path) == {
        "allocated": 2.0,
        "reserved": 3.0,
        "loaded": 0.5,
        "forward": 1.0,
    }
    table = "| Qwen/Qwen2.5-1.5B | 1.5B | 5.0 | 4.1 | +25% |\n"
    assert program(rows[428]).read(table, tmp_path) == {"allocated": 4.1}
    with pytest.raises(ValueError, match="no result"):
        program(rows[46]).read("Traceback", tmp_path)


def test_outcomes_are_kept_and_the_newest_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for one in (outcome(46, failure="it broke"), outcome(46), outcome(47)):
        save(one, file)
    assert saved(file) == {(n, "torch-2.10"): outcome(n) for n in (46, 47)}


def test_the_page_says_what_is_exact_what_is_off_and_what_failed(rows: list[Row]) -> None:
    text = page([outcome(46), outcome(49, emulated={}, failure="it broke"), outcome(47)], rows)

    assert "| with the row's versions | peak allocated | 2 | 2 | 0.00% | 0.00% |" in text
    assert "| with the row's versions | peak reserved | 2 | 0 | 1.00% | 1.00% |" in text
    assert "| peak reserved | 3.0300 | 3.0000 | +1.00% |" in text
    assert "| 49 | Qwen/Qwen2.5-0.5B-Instruct | torch-2.10 | it broke |" in text
    assert "torch 2.4 and 2.6" in text
