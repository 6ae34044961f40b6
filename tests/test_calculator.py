"""The calculator in a browser: its numbers are those of `tuner estimate` without PyTorch."""

import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from base_install import without_torch
from browsing import Opened, needs_chromium

from tuner.app import estimate
from tuner.app.calculator import METHODS, calculator_html
from tuner.app.cli.main import load
from tuner.app.estimate import Estimate
from tuner.core.errors import UnavailableError
from tuner.predict.shipped import SHIPPED_OPTIMIZERS, Shipped, shipped
from tuner.space.gpus import load_catalogue

pytestmark = needs_chromium

POINTS = 60
MODELS = (
    "gemma-2-2b", "gemma-3-1b", "llama-3.1-8b", "mistral-7b-v0.1", "phi-4-mini", "qwen2.5-7b",
    "qwen3-0.6b", "qwen3-8b", "smollm3-3b", "tinyllama-1.1b",
)  # fmt: skip
"""With and without a window, shared embeddings and grouped heads; all are on the site's page."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calculator") / "calculator.html"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tuner.app.calculator.all_models", lambda: MODELS)
        path.write_text(calculator_html(shipped()), "utf-8")
    return path


def opened(browser: Any, made: Path, **how: Any) -> Opened:
    found = Opened(browser, made, **how)
    found.page.wait_for_function("() => Boolean(window.calculate)")
    return found


def choices() -> list[dict[str, Any]]:
    """Fields of the form, the same each time."""
    draw = random.Random(0)
    return [
        {
            "model": draw.choice(MODELS),
            "gpu": draw.choice(list(load_catalogue())),
            "method": draw.choice(list(METHODS)),
            "batch": draw.choice([1, 1, 2, 3, 4, 8, 16, 37]),
            "tokens": draw.choice([64, 100, 512, 1000, 2048, 4096, 8192, 32_768]),
            "rank": draw.choice([4, 8, 11, 16, 32, 48, 64, 256]),
            "optimizer": draw.choice(SHIPPED_OPTIMIZERS),
            "checkpointing": draw.random() < 0.7,
        }
        for _ in range(POINTS)
    ]


class _AnsweredError(Exception):
    """Ends the command: what it would print is not asked."""


def asked(command: str, monkeypatch: pytest.MonkeyPatch) -> Estimate:
    """The answer of the command that the page shows."""
    answers: list[Estimate] = []
    program = load("estimate")

    def keep(*given: Any, **more: Any) -> Estimate:
        answers.append(estimate.estimate_asked(*given, **more))
        raise _AnsweredError

    monkeypatch.setattr("tuner.app.cli.estimate.estimate_asked", keep)
    with pytest.raises(_AnsweredError):
        program.main(shlex.split(command)[2:], standalone_mode=False)
    return answers[0]


def test_random_points_are_what_the_shown_command_says(browser, made, monkeypatch, tmp_path):
    without_torch(monkeypatch)
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    page = opened(browser, made)
    refused = 0
    for choice in choices():
        found = page.page.evaluate("chosen => window.calculate(chosen)", choice)
        if "refused" in found:
            refused += 1
            continue
        prediction = asked(found["command"], monkeypatch).prediction
        memory, speed = prediction.memory, prediction.speed
        sizes = [memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_bytes]
        names = ["allocated_bytes", "reserved_bytes", "device_bytes"]
        assert [found[name] for name in names] == pytest.approx(sizes, abs=1), choice
        parts = {name: memory.breakdown[name] for name in found["breakdown"]}  # of one GPU
        assert found["breakdown"] == pytest.approx(parts, abs=1), choice
        assert sum(parts.values()) == memory.device_bytes
        assert found["paged_bytes"] == memory.paged_bytes
        assert (found["phase"], found["verdict"]) == (memory.peak_phase, str(prediction.verdict))
        assert found["fits"] is prediction.fits
        assert found["step_s"] == pytest.approx(speed.step_s, rel=1e-9), choice
        assert found["tokens_per_s"] == pytest.approx(speed.tokens_per_s, rel=1e-9)
        assert found["step_ends_s"] == pytest.approx(prediction.intervals["step_s"], rel=1e-9)
        ends = prediction.intervals["device_bytes"]
        assert found["device_ends_bytes"] == pytest.approx(ends, abs=1)
    page.check()
    assert refused < POINTS / 2


def test_the_form_the_link_and_the_phone(browser, made):
    found = opened(browser, made, viewport={"width": 390, "height": 844})
    page = found.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("Model").select_option("qwen3-0.6b")
    page.locator("[name=gpu]").select_option("rtx4090")
    page.locator("[name=batch]").fill("1")
    assert page.inner_text("#verdict").startswith("fits: ")
    assert "--model qwen3-0.6b --gpu rtx4090 --qlora --batch-size 1" in page.inner_text("#command")
    page.locator("[name=batch]").fill("256")
    assert page.inner_text("#verdict").startswith("does not fit: ")
    page.locator("[name=method]").select_option("full")
    assert page.get_by_label("LoRA rank").is_disabled()
    # What has no answer says why, and has no number.
    page.locator("[name=method]").select_option("lora")
    page.locator("[name=gpu]").select_option("t4")
    assert page.inner_text("#verdict").startswith("does not fit: ")  # in fp16
    page.locator("[name=batch]").fill("0")
    assert "Micro-batch" in page.inner_text("#verdict")
    page.locator("[name=batch]").fill("3")
    page.locator("[name=method]").select_option("full")
    page.locator("[name=tokens]").fill("512")
    link = page.get_attribute("#link", "href")
    said = page.inner_text("#verdict")
    again = opened(browser, made)
    again.page.evaluate("link => { location.hash = link; }", link)
    again.page.wait_for_function("() => document.querySelector('[name=batch]').value === '3'")
    assert again.page.inner_text("#verdict") == said
    assert again.page.input_value("[name=method]") == "full"
    assert again.page.input_value("[name=gpu]") == "t4"
    for one in (found, again):
        one.check()


def test_a_page_of_no_timelines_is_refused(tmp_path):
    with pytest.raises(UnavailableError, match="no timelines"):
        calculator_html(Shipped(tmp_path / "none.zip"))
