"""The report as a person meets it: opened in headless Chromium, hovered, filtered and narrowed."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from browsing import Opened, needs_chromium
from results_samples import GPU, SPACE, make_record, make_search, write_all

from tuner.core.records import StageNumbers
from tuner.core.units import GIB, printable
from tuner.cost.step_details import MemoryTimeline, PhaseSpan
from tuner.report.report import report_html
from tuner.searches.facts import _StageFacts
from tuner.searches.store import ResultsFolder
from tuner.searches.view import build_view

TRIALS = 5000

SPAN_OF_TEXT = """cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const { left, right } = range.getBoundingClientRect();
  return [left, right];
}"""

pytestmark = needs_chromium


def hovered(page: Any, point: Any) -> str:
    """The text that is shown when the mouse is over a point of the front."""
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return str(page.wait_for_selector("#front .hoverlayer .hovertext").text_content())


TIMELINE = MemoryTimeline(
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
    path.write_text(report_html(view, timeline=TIMELINE), "utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 380)])
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


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_memory_and_speed_of_all_configurations_are_on_the_screen(browser, report, width):
    opened = Opened(browser, report, viewport={"width": width, "height": 900})
    page = opened.page
    section = page.locator("section[aria-labelledby=trials-title] .scroll").bounding_box()
    names = page.locator("#trials thead th").all_text_contents()
    cells = page.locator("#trials tbody tr").first.locator("td")
    for name in ("device GiB", "samples/s", "verdict"):
        left, right = cells.nth(names.index(name)).evaluate(SPAN_OF_TEXT)
        assert left >= max(0, section["x"])
        assert right <= min(width, section["x"] + section["width"])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
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


@pytest.mark.slow
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


PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "<svg/onload=alert(3)>",
    '"><b id=own>',
    "' onmouseover='alert(4)",
    '<a href="javascript:alert(5)">x</a>',
    "{{7*7}}%{y}$x^2$",
    "]]>\u2028\u2029\u202e\u2066\x00\x07\x1b[31m",
)
EVIL = "".join(PAYLOADS)


def report_of(text: str, folder: Path) -> Path:
    """A report with `text` in every field of words."""
    folder.mkdir()
    gpu = dataclasses.replace(GPU, name=f"gpu {text}", price_date=f"date {text}")
    knob = f"knob {text}"
    space = dataclasses.replace(
        SPACE,
        name=f"space {text}",
        description=f"description {text}",
        model=f"model {text}",
        knobs=(knob, "micro_batch"),
        baseline=None,
        stages=(_StageFacts(f"stage {text}", {"max_length": f"length {text}"}, 10, 1.0),),
    )
    records = [_record_of(text, i, space=space, gpu=gpu, knob=knob) for i in range(1, 6)]
    found = ResultsFolder(folder, space.name, gpu.id)
    write_all(
        found,
        records,
        space,
        gpu,
        conditions=[f"condition {text}"],
        command=f"command {text}",
        notes=[f"note {text}"],
        timeline_of=lambda best: TIMELINE,
    )
    return found.report_html


def _record_of(text: str, number: int, *, space: Any, gpu: Any, knob: str) -> Any:
    record = make_record(
        100.0 + number,
        settings={knob: f"value {number} {text}", "micro_batch": number, "fixed": f"x {text}"},
        gpu=gpu,
        space=space.name,
        trial_id=f"trial {number} {text}",
        searcher=f"searcher {text}",
        versions={f"library {text}": f"version {text}"},
        started_at=f"date {text}",
        device=f"device {text}",
    )
    stage = StageNumbers(device_bytes=30 * GIB, samples_per_s=1.0, step_s=1.0)
    prediction = dataclasses.replace(
        record.outcome.prediction, method=f"method {text}", stages={f"stage {text}": stage}
    )
    measured = make_record(110.0 + number, measured=True, gpu=gpu).outcome.measurement
    outcome = dataclasses.replace(
        record.outcome,
        prediction=prediction,
        measurement=dataclasses.replace(measured, device=f"device {text}") if number > 2 else None,
        message=f"message {text}",
        phase=f"phase {text}",
    )
    return dataclasses.replace(record, outcome=outcome)


STRUCTURE = """() => {
  const elements = [...document.querySelectorAll("*")];
  const own = elements.filter((e) => e.namespaceURI.endsWith("xhtml") && !e.closest(".plot"));
  const names = own.map((e) => [e.tagName, ...[...e.attributes].map((a) => a.name)].join(" "));
  const foreign = elements.filter((e) => e.matches("img, iframe, object, embed, svg a, svg image, "
    + "svg script, foreignObject, [onerror], [onload], [onmouseover], [href^=javascript], #own"));
  return { names: names.sort(), foreign: foreign.map((e) => e.outerHTML.slice(0, 200)) };
}"""


@pytest.mark.proof
def test_text_in_any_field_is_shown_and_adds_nothing_to_the_page(browser, tmp_path):
    structures = []
    for name, text in (("plain", "word"), ("evil", EVIL)):
        opened = Opened(browser, report_of(text, tmp_path / name))
        opened.draw_everything()
        page = opened.page
        page.locator("summary").first.click()
        hover = hovered(page, page.locator("#front .scatterlayer path.point").last)
        structures.append(page.evaluate(STRUCTURE))
        body = page.locator("body").inner_text()
        for field in (
            "space",
            "gpu",
            "model",
            "knob",
            "value 5",
            "note",
            "condition",
            "command",
            "trial 5",
            "searcher",
            "library",
            "version",
            "device",
            "stage",
            "method",
        ):
            assert f"{field} {printable(text)[:20]}" in body.lower().replace("\xa0", " "), field
        assert f"value 5 {printable(text)[:20]}" in hover
        opened.check()
        page.close()
    plain, evil = structures
    assert evil["foreign"] == []
    assert evil["names"] == plain["names"]


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_accessibility_checker_finds_nothing(browser, report, tmp_path, scheme):
    from axe_playwright_python.sync_playwright import Axe

    for path in (report, report_of("word", tmp_path / "small")):
        # The checker is a script of its own, which the page's policy would refuse.
        opened = Opened(browser, path, color_scheme=scheme, bypass_csp=True)
        opened.draw_everything()
        found = Axe().run(opened.page).response["violations"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []
        opened.page.close()


def test_everything_that_can_be_used_is_reached_with_the_tab_key(browser, report):
    opened = Opened(browser, report)
    page = opened.page
    page.wait_for_selector("#front .main-svg")
    wanted = page.evaluate("""() => [...document.querySelectorAll(
      "summary, select, input, th button, #next")].filter((e) => !e.disabled).length""")
    reached = set()
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("""() => {
          const e = document.activeElement;
          return e.matches("summary, select, input, th button, #next") ? e.outerHTML : "";
        }""")
        )
    assert len(reached - {""}) == wanted
    opened.check()
    page.close()
