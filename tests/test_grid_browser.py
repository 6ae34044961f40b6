"""The page of a grid as a person meets it: opened in headless Chromium, filtered and sorted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browsing import Opened, needs_chromium
from grid_samples import EVIL, make_grid

from tuner.report.grid import grid_html

pytestmark = needs_chromium

DOCUMENTED = Path(__file__).parents[1] / "docs" / "grid.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "grid.html"
    path.write_text(grid_html(make_grid()), "utf-8")
    return path


def texts(page: Any) -> list[list[str]]:
    """The table: of each row the model, then what its cells show."""
    return page.evaluate(
        "[...document.querySelectorAll('#grid tbody tr')].map("
        "row => [...row.querySelectorAll('button')].map(b => b.firstChild.data))"
    )


def columns(page: Any) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('#grid thead button')].map(b => b.firstChild.data)"
    )


def test_methods_numbers_filters_and_order(browser, made):
    opened = Opened(browser, made)
    page = opened.page
    assert columns(page) == ["T4", "RTX 3060 12 GB", "A100 SXM4 80 GB"]
    large, evil = ["large-70b", "-", "-", "1k"], [EVIL, "-", "-", "-"]
    assert texts(page) == [["small", "4k", "8k", "16k"], large, evil]
    page.get_by_label("Speed").check()
    # What fits, though not at this length, has no speed; a click says so.
    assert texts(page)[0] == ["small", "4", "2", "16"]
    assert texts(page)[1][3] == "-"
    page.get_by_label("Cost of an epoch").check()
    assert texts(page)[0][2] == "?"
    page.get_by_label("Full, bf16").check()
    assert texts(page)[0][1] == "-"
    assert texts(page)[1] == ["large-70b", "-", "-", "-"]
    page.get_by_label("QLoRA, NF4").check()
    page.get_by_label("Longest example").check()

    page.get_by_role("button", name="small 1 B").click()  # sorts the GPU types
    assert texts(page)[0] == ["small", "16k", "8k", "4k"]
    assert columns(page)[2] == "T4"
    page.get_by_role("button", name="A100").first.click()  # sorts the models
    page.get_by_role("button", name="A100").first.click()
    assert [row[0] for row in texts(page)] == ["large-70b", "small", EVIL]

    page.get_by_label("Find").fill("large a100")
    assert texts(page) == [["large-70b", "1k"]]
    page.get_by_label("Find").fill("nothing is called so")
    assert texts(page) == []
    page.get_by_label("Find").fill("")
    page.get_by_label("Model up to").select_option("2")
    assert [row[0] for row in texts(page)] == ["small", EVIL]
    page.get_by_label("GPU memory").select_option("60-")
    assert columns(page) == ["A100 SXM4 80 GB"]
    page.get_by_label("only what fits").check()
    assert texts(page) == [["small", "16k"]]
    assert "1 of 3 models" in page.inner_text("#count")
    opened.check()
    page.close()


def test_a_cell_tells_its_numbers_its_command_and_its_reason(browser, made):
    opened = Opened(browser, made)
    page = opened.page
    cell = page.locator("[data-cell='small/t4']")
    assert "predicted" in cell.get_attribute("title")
    cell.click()
    told = page.inner_text("#cell")
    assert "4 samples/s" in told
    assert "with checkpointing" in told
    assert "a remark of the trace" in told
    assert "T4 has no bf16" in told  # of full fine-tuning
    assert "tuner estimate --model small --gpu t4 --set precision=nf4 --set max_length=2048" in told
    assert page.url.endswith("#small/t4")
    page.keyboard.press("Escape")
    assert page.locator("#cell").is_hidden()
    large = page.locator("[data-cell='large-70b/t4']")
    assert "it needs 45 of 14.6 GiB" in large.get_attribute("title")
    page.close()
    opened.check()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 380)])
def test_the_documented_page_opens_in_every_light_and_width(browser, scheme, width):
    opened = Opened(
        browser, DOCUMENTED, color_scheme=scheme, viewport={"width": width, "height": 900}
    )
    page = opened.page
    assert len(texts(page)) >= 20
    assert len(columns(page)) >= 15
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator("#grid td button:not(.small):not(.refused)").first.click()
    box = page.locator("#cell").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    # The first column stays where it is while the others are scrolled.
    page.keyboard.press("Escape")
    page.evaluate("document.querySelector('.scroll').scrollLeft = 300")
    first = page.locator("#grid tbody th").first.bounding_box()
    assert first["x"] >= 0
    opened.check()
    page.close()
