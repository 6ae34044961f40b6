"""Tables in terminals of every width: no digit is lost, and what is left out is named."""

import ast
import re
from pathlib import Path

import pytest
from cli_samples import make_trial, write_samples
from hypothesis import given
from hypothesis import strategies as st
from whole_tables import WIDTHS, assert_whole, printed

from tuner.app.cli.main import run
from tuner.core.units import GIB, MIB, format_duration, format_range, format_size, significant
from tuner.report.terminal.tables import _Sheet
from tuner.searches.cost import ShownInterval
from tuner.searches.store import ResultsFolder

PACKAGE = Path(__file__).parents[2] / "tuner"
NAMES = ["id", "memory", "samples/s", "settings", "note"]
CELLS = st.text("abc=_/é漢 0123456789", max_size=50).map(str.strip)


@given(data=st.data(), width=st.integers(10, 120))
def test_no_character_is_lost_at_any_width(data, width):
    names = data.draw(st.lists(st.sampled_from([*NAMES, ""]), min_size=1, max_size=6, unique=True))
    right = data.draw(st.lists(st.sampled_from(names), unique=True))
    sheet = _Sheet(
        names, right=right, drop=data.draw(st.lists(st.sampled_from(names), unique=True))
    )
    for row in data.draw(st.lists(st.tuples(*[CELLS] * len(names)), max_size=4)):
        sheet.add_row(*row)
    assert_whole(sheet, width)


def test_columns_go_in_the_order_of_their_worth():
    sheet = _Sheet(["id", "a", "b", "c"], right=("a", "b", "c"), drop=("b",))
    sheet.add_row("x" * 20, *["1" * 10] * 3)
    assert printed(sheet, 80)[0].split() == ["id", "a", "b", "c"]
    assert printed(sheet, 50)[0].split() == ["id", "a", "c"]
    assert printed(sheet, 40)[0].split() == ["id", "a"]
    assert " ".join(printed(sheet, 40)[-2:]) == (
        "not shown at this width: b, c; widen the terminal or use --json"
    )


def numbers(text: str) -> set[str]:
    return set(re.findall(r"(?<!\S)[+-]?\d[\d.,]*%?(?!\S)", text))


@pytest.mark.parametrize("command", ["gpus", "models", "spaces", "show", "best", "best --gpu all"])
def test_each_number_is_one_of_the_widest_terminal(command, tmp_path, monkeypatch, capsys):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        for gib, speed, size in ((20, 100, 1), (20.5, 300, 2), (40, 501.7, 4)):
            writer.append(make_trial(tmp_path, gib, speed, micro_batch=size, precision="bf16"))
    words = command.split()
    if words[0] in ("show", "best"):
        words += ["--space", "tiny.yaml", *(["--gpu", "a6000"] if "--gpu" not in words else [])]
    found = {}
    for width in (*WIDTHS, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(words) == 0
        found[width] = numbers(capsys.readouterr().out.partition("throughput (")[0])
    assert found[60] <= found[1000]
    assert found[80] <= found[1000]
    assert found[200] == found[1000] != set()


def test_tables_are_drawn_in_one_place():
    """rich cuts cells that have no room."""
    own = {"tables.py", "progress.py"}  # the place; a bar that is drawn over
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.table":
                assert path.name in own, path


@pytest.mark.parametrize(
    ("low", "high", "shown", "text"),
    [
        (812.3 * MIB, 1.06 * GIB, format_size, "812.3 MiB to 1.06 GiB"),
        (40.65 * GIB, 54.2 * GIB, format_size, "40.65 to 54.20 GiB"),
        (0.511, 0.704, format_duration, "511 to 704 ms"),
        (0.9, 1.2, format_duration, "900 ms to 1.2 s"),
        (62, 122, format_duration, "1 min 02 s to 2 min 02 s"),
        (1340, 1840, significant, "1,340 to 1,840"),
    ],
)
def test_an_interval_has_its_unit_once_or_at_each_end(low, high, shown, text):
    assert format_range(low, high, shown) == text
    assert ShownInterval(low, high, 90).text(shown) == f"90 %: {text}"
