"""Pages that scripts write from committed files are what those scripts write today."""

from __future__ import annotations

import json

import pytest

from benchmarks import gallery, reported_runs
from benchmarks.accuracy import chart


def reported_page() -> str:
    return reported_runs.page(
        [json.loads(line) for line in reported_runs.ROWS.read_text().splitlines()]
    )


@pytest.mark.parametrize(
    ("page", "written"),
    [
        (gallery.PAGE, lambda: gallery.page(gallery.RESULTS)),
        (reported_runs.PAGE, reported_page),
        (chart.CHART, lambda: chart.chart(chart.TABLES.read_text("utf-8"))),
    ],
    ids=["gallery", "reported_runs", "chart"],
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
