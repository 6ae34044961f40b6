"""The page docs/gallery.md is what its script makes of the committed results."""

from __future__ import annotations

from benchmarks.gallery import PAGE, RESULTS, found, main, page


def test_the_page_is_current():
    assert PAGE.read_text("utf-8") == page(RESULTS), "run `python -m benchmarks.gallery`"


def test_every_search_has_a_row_that_says_predicted_or_measured():
    searches = found(RESULTS)
    assert len(searches) == len(list(RESULTS.glob("*/*/trials.jsonl")))
    text = page(RESULTS)
    for each in searches:
        assert f"{each.folder.parent.name}/{each.folder.name}/best.yaml)" in text
        assert each.row[1].split(",")[0] in ("predicted", "measured")


def test_is_written_where_asked(tmp_path):
    assert main(["--to", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text("utf-8") == page(RESULTS)
