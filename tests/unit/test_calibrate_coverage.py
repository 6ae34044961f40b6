"""The coverage benchmark: rows are held out as it says, on rows made up for the purpose."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy import coverage
from benchmarks.accuracy.coverage import (
    ALLOCATED,
    HELD,
    PROGRAM,
    STEP,
    Held,
    Line,
    interval_of,
    lines,
    markdown,
    probable_priors,
    within_gpu,
)
from tuner.cost.calibrate import prior_of
from tuner.cost.interval import Calibration, Observation


def row(
    ratio: float, *, number: int, gpu: str = "t4", machine: str = "", quantity: str = "step_s"
) -> Held:
    observation = Observation(quantity, 10.0, measured=10.0 * ratio)
    return Held(gpu, "program", machine, "A", ("model", str(number)), observation)


PRIOR = prior_of("step_s", has_profile=False)


def test_a_row_and_its_repetitions_are_not_learned_from():
    rows = [row(1.5, number=1), row(1.5, number=1), row(1.0, number=2), row(1.0, number=3)]
    results = within_gpu(rows, {"t4": PRIOR}, lambda held: held.group)
    # Had the repetition been learned from, the correction would be well above 1.
    assert results[0].interval.median == pytest.approx(10.0, rel=0.02)
    assert results[0].error == pytest.approx(10 / 15 - 1, abs=0.02)
    assert results[0].is_above
    assert not results[0].is_covered
    # The other rows are corrected by the two that took half as much again.
    assert results[2].interval.median > 11.0


def test_other_machines_are_learned_from_only_when_asked():
    rows = [row(1.5, number=n, machine="a") for n in range(4)]
    rows.append(row(1.0, number=9, machine="b"))
    apart = within_gpu(rows, {"t4": PRIOR}, lambda held: held.group)
    together = within_gpu(rows, {"t4": PRIOR}, lambda held: held.gpu)
    assert len(apart) == 4  # the row alone on its machine has nothing to learn from
    assert len(together) == 5
    assert together[-1].interval.median > 13.0


def test_the_prior_of_made_up_rows_is_found():
    draw = np.random.default_rng(0)
    rows = []
    for machine in range(6):
        bias = 0.15 * draw.standard_normal()
        for number in range(8):
            ratio = math.exp(bias + 0.05 * draw.standard_t(4))
            rows.append(row(ratio, number=number, machine=str(machine)))
    found = probable_priors(rows, STEP, "made up")
    assert sum(share for share, _ in found) == pytest.approx(1.0)
    assert found[0][0] == max(share for share, _ in found)
    prior = found[0][1]
    assert 0.05 <= prior.bias_scale <= 0.3
    assert 0.03 <= prior.spread <= 0.1
    assert prior.least_spread == PRIOR.least_spread


def test_what_hosts_account_for_is_not_learned_again():
    """A step that waits for its host is 1.5 times as long: its interval reaches there already."""
    waiting = replace(row(1.5, number=1), unknown=(0.6, 1.6))
    assert waiting.unexplained.measured == pytest.approx(10.0)
    other = replace(row(0.5, number=1), unknown=(0.6, 1.6))
    left = math.sqrt(math.log(0.5) ** 2 - math.log(0.6) ** 2)
    assert other.unexplained.measured == pytest.approx(10.0 * math.exp(-left))
    low, high = 1 / interval_of(Calibration.fit((), PRIOR), 1.0, (1.0, 1.0)).low, 1.6
    wide = interval_of(Calibration.fit((), PRIOR), 10.0, waiting.unknown)
    assert wide.high == pytest.approx(10 * math.exp(math.hypot(math.log(low), math.log(high))))


def test_the_table_names_what_is_met_and_what_is_missed(monkeypatch):
    for scales in ("_BIAS_SCALES", "_SPREADS"):  # few, as each takes time
        assert len(getattr(coverage, scales)) > 2
        monkeypatch.setattr(coverage, scales, (0.01, 0.1))
    draw = np.random.default_rng(1)
    names = {ALLOCATED: "allocated", HELD: "device", STEP: "step_s"}
    rows = {
        quantity: [
            row(math.exp(0.02 * draw.standard_t(4)), number=n, gpu=gpu, quantity=name)
            for gpu in ("t4", "l4", "h200")
            for n in range(3)
        ]
        for quantity, name in names.items()
    }
    table, best = lines(rows)
    text = markdown(table, best)
    assert set(best) == {*names, PROGRAM}
    assert "8%)" in text
    assert {(line.quantity, line.held_out) for line in table} >= {
        (quantity, way) for quantity in names for way in ("another GPU", "same GPU")
    }
    exact = [row(1.0, number=n) for n in range(3)]
    results = within_gpu(exact, {"t4": PRIOR}, lambda held: held.gpu)
    cells = Line(STEP, "same GPU", "grade A", results).cells()
    assert "(met: 8%)" in cells[5]
    assert "100.0% (missed: 85% to 95%)" in cells[6]
