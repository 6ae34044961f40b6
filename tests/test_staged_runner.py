"""Trials in stages: each distinct stage is run once, and the hardest decides."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from test_stages import prediction

from tuner.records import Measurement, Outcome, Source, Status
from tuner.runner.base import PLAIN
from tuner.runner.staged import StagedFactory, StagedRunner
from tuner.space import load_space

SPACE = load_space(str(Path(__file__).parents[1] / "search_spaces" / "naics_embedder.yaml"))


class Recorded:
    """Answers by the number of negatives, and keeps what it was asked."""

    source = Source.PREDICTED

    def __init__(self, outcomes=None):
        self.outcomes = outcomes or {}
        self.asked = []

    def run(self, configuration, instructions=PLAIN):
        negatives = configuration["n_negatives"]
        self.asked.append(negatives)
        known = Outcome(Status.OK, prediction=prediction(negatives / 2, 1.0), duration_s=2.0)
        return self.outcomes.get(negatives, known)


def test_the_hardest_stage_decides():
    inner = Recorded()
    outcome = StagedRunner(inner, SPACE).run(SPACE.configuration())
    assert inner.asked == [24, 8]
    assert outcome.status is Status.OK
    assert outcome.duration_s == 4.0
    assert outcome.prediction.memory.device_bytes == 12 * 2**30
    assert "stage stage1" in outcome.prediction.method
    assert outcome.measurement is None


def test_a_stage_that_runs_out_of_memory_ends_the_trial():
    inner = Recorded({24: Outcome(Status.OOM, phase="backward", message="too much")})
    outcome = StagedRunner(inner, SPACE).run(SPACE.configuration())
    assert inner.asked == [24]
    assert outcome.status is Status.OOM
    assert outcome.phase == "backward"
    assert outcome.message == "in stage stage1: too much"


def test_a_later_stage_may_fail_too():
    inner = Recorded({8: Outcome(Status.CRASHED)})
    outcome = StagedRunner(inner, SPACE).run(SPACE.configuration())
    assert outcome.status is Status.CRASHED
    assert outcome.message == "in stage stage2"
    assert outcome.duration_s == pytest.approx(2.0)


def test_measurements_are_combined_too():
    slow, fast = measurement(prediction(12, 2.0)), measurement(prediction(4, 1.0))
    inner = Recorded({n: Outcome(Status.OK, measurement=m) for n, m in ((24, slow), (8, fast))})
    found = StagedRunner(inner, SPACE).run(SPACE.configuration()).measurement
    assert found.memory.device_bytes == 12 * 2**30
    assert slow.speed.samples_per_s < found.speed.samples_per_s < fast.speed.samples_per_s
    assert found.limiting_stage == "stage1"
    assert found.stages["stage1"].device_bytes == 12 * 2**30
    assert found.stages["stage2"].samples_per_s == fast.speed.samples_per_s
    low, high = found.samples_per_s_interval
    assert low < found.speed.samples_per_s < high
    assert any("stage1" in note for note in found.notes)


def measurement(of):
    return Measurement(
        memory=of.memory,
        speed=of.speed,
        trainable_params=1,
        total_params=2,
        device="a device",
        steps=3,
        loss_finite=True,
        samples_per_s_interval=(0.9 * of.speed.samples_per_s, 1.1 * of.speed.samples_per_s),
    )


def test_a_factory_can_travel():
    factory = pickle.loads(pickle.dumps(StagedFactory(Recorded, SPACE)))
    assert isinstance(factory(), StagedRunner)
    assert factory().source is Source.PREDICTED
