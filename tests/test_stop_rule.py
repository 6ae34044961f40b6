"""Trials that end early, and trials that verify: what decides, and what a real one then says."""

import pytest
from measure_samples import job, knobs, model_folder, quick

from tuner.core.records import Measurement, Status
from tuner.trial.base import GiveUp, Instructions, MeasureOptions
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.stop_rule import STEP_SCATTER, VERIFIED_STEPS, RunningMean, StopRule


def rule_of(give_up: GiveUp, device_bytes: int = 100) -> StopRule:
    options = MeasureOptions(instructions=Instructions(give_up=give_up), budget_s=1e9)
    return StopRule(options, lambda: device_bytes)


def mean_of(*times_s: float) -> RunningMean:
    mean = RunningMean()
    for time_s in times_s:
        mean.add(time_s)
    return mean


def test_memory_beyond_what_is_usable_decides_after_the_first_step():
    rule = rule_of(GiveUp(usable_bytes=99))
    assert rule.ends_warm_up(samples=8, step_s=1.0)
    assert rule.warmup_steps == 1
    assert rule.reason_to_stop(mean_of(1.0), 8) == "memory"


def test_memory_that_is_just_usable_goes_on():
    rule = rule_of(GiveUp(usable_bytes=100))
    assert not rule.ends_warm_up(8, 1.0)
    assert rule.ends_warm_up(8, 1.0)
    assert rule.reason_to_stop(mean_of(1.0), 8) is None


@pytest.mark.parametrize(
    ("size", "rate", "ended"),
    [
        (100, 8.0 * STEP_SCATTER + 0.1, True),
        (100, 8.0 * STEP_SCATTER - 0.1, False),  # steps may still get that much faster
        (101, 1e9, False),  # the other takes more memory
    ],
)
def test_second_step_decides_against_a_front_with_no_more_memory(size, rate, ended):
    rule = rule_of(GiveUp(front=((size, rate), (500, 1e9))))
    assert not rule.ends_warm_up(8, 1000.0)  # the first step loads kernels: it says nothing
    rule.ends_warm_up(8, 1.0)
    assert (rule.reason_to_stop(mean_of(1.0), 8) == "dominated") is ended


def test_timed_steps_are_dominated_when_the_whole_interval_is_slower():
    rule = rule_of(GiveUp(front=((100, 9.0),)))
    for _ in range(2):
        rule.ends_warm_up(8, 1.0)
    assert rule.reason_to_stop(mean_of(1.0), 8) is None
    assert rule.reason_to_stop(mean_of(1.0, 1.6), 8) is None
    assert rule.reason_to_stop(mean_of(1.0, 1.001), 8) == "dominated"


def test_without_a_rule_nothing_ends_early():
    rule = StopRule(MeasureOptions(), lambda: 1 / 0)
    assert [rule.ends_warm_up(8, 1.0) for _ in range(2)] == [False, True]
    assert rule.reason_to_stop(mean_of(1.0, 1.0), 8) is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs a trial in a process of its own: in this one, what earlier tests left free is used
    again, and is no growth.
    """
    model = model_folder(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch, IsolatedRunner(job(model), quick()) as runner:
        patch.setenv("OMP_NUM_THREADS", "1")

        def run(instructions: Instructions, **changes) -> Measurement:
            outcome = runner.run(knobs(**changes), instructions)
            assert outcome.status is Status.OK, outcome.message
            assert outcome.measurement is not None
            return outcome.measurement

        yield run


@pytest.mark.proof
def test_a_trial_that_cannot_be_recommended_measures_one_step_and_says_why(measured):
    found = measured(Instructions(GiveUp(usable_bytes=1)))
    assert (found.stopped_by, found.warmup_steps, found.steps) == ("memory", 1, 1)
    assert found.memory.device_bytes > 1
    assert found.speed.samples_per_s > 0
    assert found.samples_per_s_interval is None
    assert Measurement.from_dict(found.to_dict()) == found


@pytest.mark.proof
def test_a_verification_trains_longer_evaluates_and_saves(measured):
    found = measured(Instructions(verify=True), precision="bf16")
    assert found.steps >= VERIFIED_STEPS
    # Adapters with two moments each, 4 bytes every number at least for the moments.
    assert found.checkpoint_bytes >= found.trainable_params * (2 + 2 * 2)
    assert found.checkpoint_bytes < found.total_params * 4
    assert found.memory.peak_allocated_bytes >= found.evaluation_peak_bytes > 0
    plain = measured(Instructions(), precision="bf16")
    assert (plain.checkpoint_bytes, plain.evaluation_peak_bytes) == (None, None)
