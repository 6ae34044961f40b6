"""Pages in headless Chromium, for tests of what a person meets."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
)
# No sandbox inside containers that run as root; nothing is asked of the network.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser without pages."""
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
        self.page.on("dialog", self._dismiss)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def _dismiss(self, dialog: Any) -> None:
        self.errors.append(dialog.message)
        dialog.dismiss()

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
