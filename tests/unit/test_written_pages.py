"""Pages that scripts write from committed files are current, and so are the zoo's entries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import gallery, reported_runs
from benchmarks.accuracy import chart
from benchmarks.zoo import page as zoo
from benchmarks.zoo.data import MAKERS
from benchmarks.zoo.entries import PROGRAMS, Entry, Expected, names, read
from benchmarks.zoo.running import Row, judged, kept
from tuner.report.reported import read_rows
from tuner.space.gpus import get_gpu


def reported_page() -> str:
    return reported_runs.page(read_rows(reported_runs.ROWS).values())


@pytest.mark.parametrize(
    ("page", "written"),
    [
        (gallery.PAGE, lambda: gallery.page(gallery.RESULTS)),
        (reported_runs.PAGE, reported_page),
        (zoo.PAGE, lambda: zoo.page(kept())),
        (chart.CHART, lambda: chart.chart(chart.TABLES.read_text("utf-8"))),
    ],
    ids=["gallery", "reported_runs", "zoo", "chart"],
)
def test_the_page_is_current(page, written):
    assert page.read_text("utf-8") == written(), f"run its script: {page.name} names it"


def test_every_search_has_a_row_that_says_predicted_or_measured():
    searches = gallery.found(gallery.RESULTS)
    assert len(searches) == len(list(gallery.RESULTS.glob("*/*/trials.jsonl")))
    text = gallery.page(gallery.RESULTS)
    for each in searches:
        assert f"{each.folder.parent.name}/{each.folder.name}/best.yaml)" in text
        assert each.row[1].split(",")[0] in ("predicted", "measured")


ROW = Row(
    name="trl_sft",
    date="2026-11-26",
    versions={},
    ended="steps",
    kind="",
    fits=True,
    steps=3,
    peak_allocated_bytes=6 * 2**30,
)


@pytest.mark.parametrize("name", names())
def test_an_entry_is_complete(name: str) -> None:
    entry = read(name)
    shrunk = entry.shrunk()
    assert entry.expected.allocated_gib != 0  # raises for a term without a number
    assert entry.data is None or entry.data in MAKERS
    assert get_gpu(entry.gpu)
    for part in (*entry.command, *shrunk.command):
        if part.startswith("{here}/"):
            assert (PROGRAMS / part.removeprefix("{here}/")).exists()
        assert entry.model is not None or "{model}" not in part
        assert entry.data is not None or "{data}" not in part


def test_arithmetic_is_summed_and_words_in_it_are_refused() -> None:
    assert Expected(arithmetic="weights 2.5 + fp32 states 9.9").allocated_gib == pytest.approx(12.4)
    assert Expected().allocated_gib is None
    with pytest.raises(ValueError, match="is not like"):
        _ = Expected(arithmetic="weights 2.5 + gradients").allocated_gib


@pytest.mark.parametrize(
    ("changes", "expected", "kind"),
    [
        ({}, {"arithmetic": "weights 5.6"}, "answered"),
        ({}, {"arithmetic": "weights 3.0"}, "wrong"),
        ({}, {"arithmetic": "weights 3.0", "why": "activations"}, "answered"),
        ({"ended": "oom", "fits": False}, {"arithmetic": "weights 5.6"}, "wrong"),
        ({"ended": "oom", "fits": False}, {"ended": "oom"}, "answered"),
        ({"fits": None}, {"arithmetic": "weights 5.6"}, "unknown"),
        ({"ended": "error", "fits": None}, {"arithmetic": "weights 5.6"}, "set-up"),
        (
            {"ended": "error", "fits": None, "unknown_calls": {"cusparse": 1}},
            {"arithmetic": "weights 5.6"},
            "not emulated",
        ),
        ({"ended": "timeout", "fits": None}, {"arithmetic": "weights 5.6"}, "timeout"),
    ],
)
def test_a_row_is_judged_by_what_its_entry_expects(
    changes: dict[str, Any], expected: dict[str, Any], kind: str
) -> None:
    entry = Entry(**{**read("trl_sft").model_dump(), "expected": expected})
    assert judged(dataclasses.replace(ROW, **changes), entry).kind == kind
