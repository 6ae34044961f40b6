"""The bytes that each step keeps, of those that are kept of each."""

from __future__ import annotations

import pytest

from tuner.emulator.inside.memory import _growth_of, _kept_each_step


@pytest.mark.parametrize(
    ("kept", "each"),
    [
        ([8] * 5, 8),
        ([8, 8, 0, 8, 8], 8),
        ([0] * 5, 0),
        ([8] * 3 + [0] * 10, 0),  # a cache that has all that it needs
        ([0] * 10 + [8] * 3, 0),  # a queue that has let go of the first
        ([0] * 9 + [8] + [0] * 9 + [8], 0),
        ([8] * 100, 0),  # its parts tell
    ],
)
def test_a_leak_is_what_nearly_all_steps_keep(kept: list[int], each: int) -> None:
    assert _kept_each_step(kept) == each


@pytest.mark.parametrize(
    ("levels", "grown"),
    [
        ([10, 20, 30, 40], 10),
        ([10, 19, 29, 40], 9),
        ([6, 12, 18, 20], 0),  # a queue that is full
        ([20, 20, 20, 20], 0),
        ([10, 30, 20, 40], 0),
        ([0, 0, 0, 40], 0),
    ],
)
def test_memory_that_some_steps_keep_grows_if_all_parts_of_the_run_do(
    levels: list[int], grown: int
) -> None:
    assert _growth_of(levels) == grown
