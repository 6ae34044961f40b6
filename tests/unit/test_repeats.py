"""Trials of one configuration that was measured more than once."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from results_samples import GPU, SPACE, make_record

from tuner.core.records import Exhausted, Status
from tuner.core.units import GIB
from tuner.searches.journal import latest
from tuner.searches.view import build_view


def trial(name: str, tokens_per_s: float, gib: float = 30, **fields):
    return make_record(tokens_per_s, round(gib * GIB), measured=True, trial_id=name, **fields)


def numbers(record):
    measurement = record.outcome.measurement
    return measurement.speed.tokens_per_s, measurement.memory.device_bytes / GIB


def test_speed_of_all_and_the_largest_memory_stand_for_all():
    trials = [trial("a", 300, 30), trial("b", 330, 31), trial("c", 310, 30)]
    (one,) = latest(trials)
    speed, gib = numbers(one)
    assert 300 < speed < 330
    assert gib == 31
    for order in itertools.permutations(trials):
        assert numbers(latest(order)[0]) == pytest.approx((speed, gib))


def test_out_of_memory_at_last_is_out_of_memory():
    oom = trial("b", 300, status=Status.OOM, device=GPU.name)
    outcome = dataclasses.replace(oom.outcome, measurement=None, exhausted=Exhausted.DEVICE)
    oom = dataclasses.replace(oom, outcome=outcome)
    view = build_view([trial("a", 300, device=GPU.name), oom], SPACE, GPU)
    assert (len(view.records), view.front, view.best) == (1, (), None)


def test_a_line_written_again_is_no_other_trial():
    (one,) = latest([trial("a", 300), trial("a", 320)])
    assert numbers(one)[0] == 320


def test_other_versions_are_not_mixed_in():
    old = trial("a", 100, versions={"torch": "2.12.0"})
    (one,) = latest([old, trial("b", 300), trial("c", 302)])
    assert 300 < numbers(one)[0] < 302
