"""Trials in stages: each distinct stage is run once, and the hardest decides."""

import dataclasses
import json
from pathlib import Path

import pytest
from results_samples import make_measurement
from test_stages import prediction
from tune_fakes import record_of as known

from tuner.core.records import Outcome, Source, Status, TrialRecord
from tuner.cost.calibrate import multiplied, observations_of, uncorrected
from tuner.predict.stages import combine, hardest_first
from tuner.searches.strategies import score
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu
from tuner.trial.base import PLAIN, GiveUp, Instructions
from tuner.trial.staged import StagedRunner

GIB = 2**30
SPACE = load_space(str(Path(__file__).parents[2] / "search_spaces" / "naics_embedder.yaml"))


class Recorded:
    """Answers by the number of negatives, and keeps what it was asked."""

    source = Source.MEASURED

    def __init__(self, outcomes=None):
        self.outcomes = outcomes or {}
        self.asked = []
        self.instructions = []

    def run(self, configuration, instructions=PLAIN):
        negatives = configuration["n_negatives"]
        self.asked.append(negatives)
        self.instructions.append(instructions)
        taken = measurement(prediction(negatives / 2, 1.0))
        known = Outcome(Status.OK, measurement=taken, duration_s=2.0)
        return self.outcomes.get(negatives, known)


def test_a_stage_that_runs_out_of_memory_ends_the_trial():
    inner = Recorded({24: Outcome(Status.OOM, phase="backward", message="too much")})
    outcome = StagedRunner(inner, SPACE).run(configure(SPACE))
    assert inner.asked == [24]
    assert outcome.status is Status.OOM
    assert outcome.phase == "backward"
    assert outcome.message == "in stage stage1: too much"


class Real(Recorded):
    """Notes what it is told beside trials."""

    def __init__(self, outcomes):
        super().__init__(outcomes)
        self.told = []

    def start(self):
        self.told.append("start")

    def interrupt(self):
        self.told.append("interrupt")

    def close(self):
        self.told.append("close")


def real(hard_gib=12.0, easy_gib=4.0):
    sizes = {24: prediction(hard_gib, 2.0), 8: prediction(easy_gib, 1.0)}
    found = {n: Outcome(Status.OK, measurement=measurement(p)) for n, p in sizes.items()}
    return Real({n: dataclasses.replace(o, duration_s=2.0) for n, o in found.items()})


HARD_LAST = ("stage5", "stage4", "stage3", "stage2", "stage1")


def test_the_stage_that_is_predicted_to_need_most_comes_first():
    configuration, inner = configure(SPACE), real()
    found = StagedRunner(inner, SPACE, {configuration.key: HARD_LAST}).run(configuration)
    assert inner.asked == [8, 24]
    # What is told of the stages keeps the order of the space.
    assert next(iter(found.measurement.stages)) == "stage1"
    overall = combine(
        {"stage1": prediction(2, 1), "stage2": prediction(8, 1)}, {"stage1": None, "stage2": None}
    ).overall
    assert hardest_first(overall) == ("stage2", "stage1")


def test_a_stage_that_leaves_too_little_free_ends_a_real_trial():
    inner = real(hard_gib=15.0)
    rule = Instructions(GiveUp(14 * GIB, front=((GIB, 1e9),)))
    outcome = StagedRunner(inner, SPACE).run(configure(SPACE), rule)
    assert inner.asked == [24]
    # Throughput of one stage is none to be given up for.
    assert inner.instructions == [Instructions(GiveUp(14 * GIB))]
    assert (outcome.status, outcome.stage) == (Status.OK, "stage1")
    assert outcome.limiting_stage == "stage1"
    assert list(outcome.measurement.stages) == ["stage1"]
    record = record_of(outcome)
    assert not dataclasses.replace(record, margin_bytes=0, gpu_memory_bytes=16 * GIB).fits
    assert TrialRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_one_stage_tells_a_sampler_of_all_and_calibration_of_memory_only():
    stages = {"stage1": prediction(12, 2.0), "stage2": prediction(4, 1.0)}
    overall = combine(stages, dict.fromkeys(stages)).overall
    # Half as fast as predicted.
    alone = Outcome(
        Status.OK, overall, measurement(prediction(15, 4.0)), stage="stage1", message="too large"
    )
    record = record_of(alone)
    assert score(record).values[0] == pytest.approx(overall.speed.samples_per_s / 2)
    assert "step_s" not in {seen.quantity for seen in observations_of(record, overall)}
    whole = dataclasses.replace(alone, stage=None)
    assert "step_s" in {seen.quantity for seen in observations_of(record_of(whole), overall)}


def record_of(outcome):
    record = known(configure(SPACE), outcome, space=SPACE.name, gpu=get_gpu("t4"))
    more = {"gpu_memory_bytes": 16 * GIB, "device": "a device", "margin_bytes": 2 * GIB}
    return dataclasses.replace(record, **more)


def test_a_trial_is_interrupted_between_two_stages_too():
    inner = real()
    runner = StagedRunner(inner, SPACE)
    plain = inner.run

    def run(configuration, instructions=PLAIN):
        runner.interrupt()
        return plain(configuration, instructions)

    inner.run = run
    runner.start()
    outcome = runner.run(configure(SPACE))
    runner.close()
    assert inner.asked == [24]
    assert (outcome.status, outcome.stage) == (Status.INTERRUPTED, "stage2")
    assert inner.told == ["start", "interrupt", "close"]


def test_a_correction_holds_for_every_stage():
    stages = {"stage1": prediction(12, 2.0), "stage2": prediction(4, 1.0)}
    overall = combine(stages, dict.fromkeys(stages)).overall
    found = multiplied(overall, {"device_bytes": 1.25, "step_s": 2.0})
    assert found.stages["stage1"].device_bytes == 15 * GIB
    assert found.stages["stage2"].samples_per_s == pytest.approx(16)
    assert uncorrected(found).stages == overall.stages


def test_measurements_are_combined_too():
    slow, fast = measurement(prediction(12, 2.0)), measurement(prediction(4, 1.0))
    ended = ((24, slow), (8, fast))
    inner = Recorded({n: Outcome(Status.OK, measurement=m, duration_s=2.0) for n, m in ended})
    outcome = StagedRunner(inner, SPACE).run(configure(SPACE))
    assert inner.asked == [24, 8]
    assert (outcome.status, outcome.duration_s) == (Status.OK, 4.0)
    found = outcome.measurement
    assert found.memory.device_bytes == 12 * 2**30
    assert slow.speed.samples_per_s < found.speed.samples_per_s < fast.speed.samples_per_s
    assert found.limiting_stage == "stage1"
    assert found.stages["stage1"].device_bytes == 12 * 2**30
    assert found.stages["stage2"].samples_per_s == fast.speed.samples_per_s
    low, high = found.samples_per_s_interval
    assert low < found.speed.samples_per_s < high
    assert any("stage1" in note for note in found.notes)


def measurement(of):
    rate = of.speed.samples_per_s
    interval = (0.9 * rate, 1.1 * rate)
    return make_measurement(of, device="a device", samples_per_s_interval=interval)
