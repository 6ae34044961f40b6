"""Sizes that rest on values which nobody knows: what an emulation says of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tuner.app.cli.emulated_text import sizes_text
from tuner.emulator.emulation import BRANCH, UnknownValues, sizes_rest_on, unknown_values
from tuner.emulator.inside.notes import ASSUMED, AT_MOST, MADE_UP, worst

ROW = UnknownValues("aten::index", "train.py:3", AT_MOST, decides_shape=True, times=2)


def rows(*kinds: str) -> tuple[UnknownValues, ...]:
    return tuple(dataclasses.replace(ROW, kind=kind) for kind in kinds)


@pytest.mark.parametrize(
    ("kinds", "rest_on"),
    [
        ((), "known"),
        ((ASSUMED,), "known"),
        ((AT_MOST, ASSUMED), "at most"),
        ((AT_MOST, MADE_UP), "unknown"),
        (("unknown",), "unknown"),
    ],
)
def test_sizes_are_as_certain_as_the_least_certain_of_them(
    kinds: tuple[str, ...], rest_on: str
) -> None:
    assert sizes_rest_on(rows(*kinds)) == rest_on
    read = [dataclasses.replace(row, decides_shape=False) for row in rows(*kinds)]
    assert sizes_rest_on(read) == "known"


def test_each_operator_is_shown_with_its_line_below_what_was_taken() -> None:
    text = sizes_text((*rows(AT_MOST, ASSUMED), dataclasses.replace(ROW, line=None)))

    assert text == (
        "at most that large: aten::index at train.py:3, aten::index; "
        "assumed (even choices, finite floats): aten::index at train.py:3"
    )
    assert sizes_text([dataclasses.replace(ROW, decides_shape=False)]) == ""
    branch = dataclasses.replace(ROW, operator="item", kind=BRANCH, decides_shape=False)
    assert sizes_text([branch]) == "branches on made-up values: item at train.py:3"


def test_ranks_add_up_and_what_decides_sizes_comes_first() -> None:
    row = dataclasses.asdict(ROW)
    read = {**row, "decides_shape": False, "times": 9}
    found = unknown_values([{"values_unknown": [read, row]}, {"values_unknown": [row]}])

    assert [(one.decides_shape, one.times) for one in found] == [(True, 4), (False, 9)]


def test_two_origins_give_the_less_certain_one() -> None:
    order = (None, AT_MOST, ASSUMED, MADE_UP)
    for (i, one), (j, other) in itertools.product(enumerate(order), repeat=2):
        assert worst(one, other) == order[max(i, j)]
