"""How soon a report of many trials can be used: `python -m benchmarks.report_load [TRIALS]`.

Writes a report of simulated trials, opens it in headless Chromium, and prints seconds from the
navigation to the drawn front, to a filtered table, and for writing the page. Needs `.[test]`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the sample trials of the tests

ROUNDS = 5


def main() -> None:
    """Print one line for each figure: the median of five rounds."""
    from playwright.sync_api import sync_playwright
    from results_samples import GPU, SPACE, make_search

    from tuner.report.report import report_html
    from tuner.searches.view import build_view

    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    started = time.perf_counter()
    text = report_html(build_view(make_search(trials), SPACE, GPU))
    write_s = time.perf_counter() - started
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or "google-chrome"
    drawn, filtered = [], []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(text, "utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(ROUNDS):
            page = browser.new_page()
            started = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector("#front .main-svg")
            drawn.append(time.perf_counter() - started)
            page.locator("#filter").fill("nf4 true")
            page.wait_for_function("!document.querySelector('#count').textContent.startsWith('0')")
            filtered.append(time.perf_counter() - started)
            page.close()
        browser.close()
    print(f"{trials} trials, {len(text) / 1e6:.1f} MB, written in {write_s:.2f} s")
    print(f"front drawn after {statistics.median(drawn):.2f} s (worst {max(drawn):.2f} s)")
    print(f"table filtered after {statistics.median(filtered):.2f} s (worst {max(filtered):.2f} s)")


if __name__ == "__main__":
    main()
