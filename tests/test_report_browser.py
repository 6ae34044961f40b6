"""The report as a person meets it: opened in headless Chromium, hovered, filtered and narrowed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results_samples import GPU, SPACE, make_record, make_search

from tuner.estimators.course import MemoryCourse, PhaseSpan
from tuner.results.report import report_html
from tuner.results.view import build_view
from tuner.units import GIB

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
)
# No sandbox inside containers that run as root; nothing is asked of the network.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
TRIALS = 5000

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=120_000)
        yield opened
        opened.close()


class Opened:
    """A page of the browser, with all that it complained of and asked for."""

    def __init__(self, browser: Any, path: Path, **how: Any) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **how})
        self.page.set_default_timeout(120_000)
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def check(self) -> None:
        """Nothing went wrong, and nothing but the file itself was asked for."""
        assert self.errors == []
        asked = [url for url in self.requests[1:] if not url.startswith(("data:", "blob:"))]
        assert asked == []

    def draw_everything(self) -> None:
        """Scroll through the page, so that plots which wait to be seen are drawn."""
        for plot in self.page.query_selector_all(".plot"):
            plot.scroll_into_view_if_needed()
            self.page.wait_for_selector(f"#{plot.get_attribute('id')} .main-svg", state="attached")


def hovered(page: Any, point: Any) -> str:
    """The text that is shown when the mouse is over a point of the front."""
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return str(page.wait_for_selector("#front .hoverlayer .hovertext").text_content())


COURSE = MemoryCourse(
    times_s=(0.0, 1.0, 2.0),
    categories={"weights": (10 * GIB,) * 3, "activations": (0, 5 * GIB, GIB)},
    reserved_bytes=(11 * GIB, 16 * GIB, 16 * GIB),
    spans=(PhaseSpan("forward", 0, 0.0, 1.5), PhaseSpan("backward", 0, 1.5, 2.0)),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    records = make_search(TRIALS)
    measured = make_record(290.0, settings={"micro_batch": 1}, measured=True)
    view = build_view([*records, measured], SPACE, GPU, command="tuner search", notes=["a note"])
    path.write_text(report_html(view, course=COURSE), "utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_everything_is_drawn_without_errors_network_or_overflow(browser, report, scheme, width):
    opened = Opened(browser, report, color_scheme=scheme, viewport={"width": width, "height": 900})
    opened.draw_everything()
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{name}").removeprefix("rgb")
        for name in ("color", "backgroundColor")
    )
    brightness = [sum(map(int, re.findall(r"\d+", text)[:3])) / 3 for text in (ink, paper)]
    assert (brightness[0] > brightness[1]) is (scheme == "dark")
    assert abs(brightness[0] - brightness[1]) > 150
    opened.check()
    page.close()


def test_hover_shows_the_whole_configuration(browser, report):
    opened = Opened(browser, report)
    page = opened.page
    page.wait_for_selector("#front .main-svg")
    best = page.locator("#front .scatterlayer .trace.scatter").last.locator("path.point").first
    text = hovered(page, best)
    for name in SPACE.knobs:
        assert name in text
    assert "samples/s" in text
    assert "GiB" in text
    opened.check()
    page.close()


def test_table_filters_sorts_and_turns_pages_from_the_keyboard(browser, report):
    opened = Opened(browser, report)
    page = opened.page
    count = page.locator("#count")
    total = int(re.sub(r"\D", "", count.text_content().split(" of ")[1]))
    assert total > TRIALS * 0.9
    page.locator("#filter").focus()
    page.keyboard.type("nf4 true")
    found = int(re.sub(r"\D", "", count.text_content().split(" of ")[0]))
    assert 0 < found < total
    rows = page.locator("#trials tbody tr")
    assert rows.count() == 50
    assert all("nf4" in text for text in rows.all_text_contents())
    page.locator("#filter").fill("")
    page.locator("#kind").select_option("too_large")
    assert all("oom" in text for text in rows.all_text_contents())
    page.locator("#kind").select_option("")
    header = page.locator("#trials thead button", has_text="device GiB")
    column = [h.text_content() for h in page.locator("#trials thead th").all()].index("device GiB")
    header.focus()
    page.keyboard.press("Enter")
    sizes = [float(row.locator("td").nth(column).text_content()) for row in rows.all()[:20]]
    assert sizes == sorted(sizes)
    assert page.locator("#trials thead th[aria-sort=ascending]").count() == 1
    page.locator("#next").focus()
    page.keyboard.press("Enter")
    assert page.locator("#pages").text_content().startswith("page 2 of")
    opened.check()
    page.close()


def test_reader_without_eyes_is_told_what_each_plot_and_section_is(browser, report):
    opened = Opened(browser, report)
    page = opened.page
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("role") in ("img", "figure")
        assert len(plot.get_attribute("aria-label")) > 20
    for section in page.locator("section").all():
        title = section.get_attribute("aria-labelledby")
        assert page.locator(f"#{title}").text_content().strip()
    for control in page.locator("select, input").all():
        assert control.evaluate("e => e.labels.length") == 1
    assert page.locator("h1").count() == 1
    opened.check()
    page.close()


def test_names_with_markup_are_shown_and_never_run(browser, tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>$x$\u202e\x07"
    records = [
        make_record(
            100.0 + i,
            settings={"micro_batch": i, "model_path": f"{evil}{i}"},
            trial_id=evil,
            searcher=evil,
            versions={evil: evil},
        )
        for i in range(1, 4)
    ]
    view = build_view(records, SPACE, GPU, conditions=[evil], command=evil, notes=[evil])
    path = tmp_path / "report.html"
    path.write_text(report_html(view), "utf-8")
    opened = Opened(browser, path)
    opened.draw_everything()
    page = opened.page
    assert page.locator("img").count() == 0
    assert page.locator("body > script").count() == 3
    assert "<img src=x onerror=alert(1)>" in page.locator("#trials tbody").text_content()
    text = hovered(page, page.locator("#front .scatterlayer path.point").last)
    assert "<img src=x onerror=alert(1)>" in text
    opened.check()
    page.close()
