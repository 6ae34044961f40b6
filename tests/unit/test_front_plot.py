"""The front as characters: as wide as asked, without any control character, in every encoding."""

from __future__ import annotations

import dataclasses

import pytest
from results_samples import GPU, SPACE, make_record, make_search

from tuner.report.terminal.front import HEIGHT, plot_text
from tuner.searches.view import build_view


@pytest.fixture(scope="module")
def view():
    return build_view(make_search(60), SPACE, GPU)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_it_is_plain_text_that_fits(view, columns, is_ascii):
    text = plot_text(view, columns=columns, is_ascii=is_ascii)
    title = "throughput (samples/s) over peak device memory (GiB), predicted"
    assert text.replace("\n", " ").startswith(title)
    rows = text.splitlines()[-HEIGHT - 1 :]
    assert max(map(len, rows[:-1])) <= columns
    assert text.replace("\n", "").isprintable()
    assert text.isascii() is is_ascii


def test_each_kind_has_its_mark_and_the_legend_says_so(view):
    *rows, legend = plot_text(view, columns=80, is_ascii=True).splitlines()
    picture = "".join(rows[1:])
    assert picture.count("*") == 1
    assert "* recommended" in legend
    assert "x does not fit" in legend
    assert picture.count("x") > 1
    assert "| the GPU's memory" in legend


def test_there_is_none_where_it_would_say_nothing():
    view = build_view([make_record(300.0, settings={"micro_batch": 1})], SPACE, GPU)
    assert plot_text(view, columns=80, is_ascii=False) == ""
    assert plot_text(build_view([], SPACE, GPU), columns=80, is_ascii=False) == ""


def test_other_objectives_have_other_axes():
    space = dataclasses.replace(SPACE, objectives=("epoch_usd", "lora_rank"))
    text = plot_text(build_view(make_search(30), space, GPU), columns=80, is_ascii=True)
    assert text.startswith("cost per epoch (USD) over LoRA rank, predicted")
