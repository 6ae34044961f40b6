"""What trials teach of predictions, what they do not, and predictions corrected by them."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from results_samples import GPU, make_measurement, make_memory, make_record, make_speed

from tuner.core.records import Exhausted, MemoryBudget, Outcome, Prediction, Status, TrialRecord
from tuner.core.units import GIB
from tuner.cost import calibrate

SPACE = "qlora27b"
CATALOGUE, PROFILE = "trace; roofline from the GPU catalogue", "trace; device profile"


def predicted(gib: float = 30, tokens_per_s: float = 300.0, method: str = CATALOGUE) -> Prediction:
    prediction = make_record(tokens_per_s, round(gib * GIB)).outcome.prediction
    return replace(prediction, method=method)


def trial(
    number: int,
    *,
    memory: float | None = 1.0,
    slowness: float = 1.0,
    status: Status = Status.OK,
    requested: int | None = None,
    prediction: Prediction | None = None,
    **fields: object,
) -> TrialRecord:
    """A trial that took `memory` times the predicted memory, `slowness` times the time."""
    prediction = prediction or predicted(10 + number)
    measurement = None
    if memory is not None:
        measurement = make_measurement(
            prediction,
            device=GPU.name,
            memory=make_memory(round(prediction.memory.device_bytes * memory)),
            speed=make_speed(prediction.speed.tokens_per_s / slowness),
        )
    outcome = Outcome(status, prediction, measurement, requested_bytes=requested)
    record = make_record(settings={"micro_batch": number}, **fields)
    return dataclasses.replace(record, outcome=outcome)


def test_trials_correct_what_they_measured():
    learned = calibrate.calibrations_from(trial(n, memory=1.1, slowness=1.4) for n in range(8))
    before = predicted(20)
    after = learned.apply(before, SPACE)
    assert after.memory.device_bytes == pytest.approx(22 * GIB, rel=0.005)
    assert after.speed.tokens_per_s == pytest.approx(300 / 1.4, rel=0.02)
    assert after.speed.step_s == pytest.approx(before.speed.step_s * 1.4, rel=0.02)
    assert after.memory.peak_allocated_bytes == pytest.approx(
        1.1 * before.memory.peak_allocated_bytes, rel=0.005
    )


@pytest.mark.parametrize("memory", [0.4, 0.9, 1.0, 1.3])
def test_a_corrected_prediction_adds_up(memory):
    learned = calibrate.calibrations_from(trial(n, memory=memory, slowness=0.5) for n in range(8))
    after = learned.apply(predicted(20), SPACE)
    sizes = after.memory
    assert sizes.peak_allocated_bytes <= sizes.peak_reserved_bytes <= sizes.device_bytes
    assert sum(sizes.breakdown.values()) == sizes.device_bytes
    assert min(sizes.breakdown.values()) >= 0
    speed = after.speed
    assert sum(speed.breakdown_s.values()) == pytest.approx(speed.step_s)
    assert speed.tokens_per_s * speed.step_s == pytest.approx(
        predicted(20).speed.tokens_per_s * predicted(20).speed.step_s
    )


def test_the_verdict_is_on_the_corrected_memory():
    learned = calibrate.calibrations_from(trial(n, memory=1.2) for n in range(8))
    tight = predicted(44)
    assert tight.fits
    assert not learned.apply(tight, SPACE).fits
    relieved = calibrate.calibrations_from(trial(n, memory=0.8) for n in range(8))
    assert not predicted(50).fits
    assert relieved.apply(predicted(50), SPACE).fits


def test_a_correction_can_be_taken_back_and_is_not_made_twice():
    learned = calibrate.calibrations_from(trial(n, memory=1.1, slowness=1.4) for n in range(8))
    raw = predicted(20)
    once = learned.apply(raw, SPACE)
    back = calibrate.uncorrected(once)
    assert back.memory.device_bytes == raw.memory.device_bytes
    assert back.speed.step_s == pytest.approx(raw.speed.step_s)
    assert back.corrections == {}
    twice = learned.apply(once, SPACE)
    assert twice.memory == once.memory
    assert twice.speed.step_s == pytest.approx(once.speed.step_s)


def test_trials_with_corrected_predictions_teach_the_same():
    trials = [trial(n, memory=1.1, slowness=1.4) for n in range(8)]
    learned = calibrate.calibrations_from(trials)
    corrected = [
        replace(
            t, outcome=replace(t.outcome, prediction=learned.apply(t.outcome.prediction, SPACE))
        )
        for t in trials
    ]
    again = calibrate.calibrations_from(corrected)
    for quantity in calibrate.QUANTITIES:
        one, other = (c.of(quantity, predicted(), SPACE).factors for c in (learned, again))
        assert other.median == pytest.approx(one.median, rel=1e-4)


def test_every_gpu_and_space_has_its_own():
    learned = calibrate.calibrations_from(trial(n, memory=1.2) for n in range(8))
    other_gpu = replace(predicted(20), gpu="t4")
    for prediction, space in ((other_gpu, SPACE), (predicted(20), "another")):
        untouched = learned.apply(prediction, space)
        assert untouched.memory == prediction.memory
        assert untouched.speed == prediction.speed
        assert untouched.corrections == {}
        assert untouched.intervals == calibrate.prior_intervals(
            prediction.memory,
            prediction.speed,
            prediction.method,
            limit_bytes=prediction.budget.limit_bytes,
        )


def test_step_times_of_a_device_profile_are_learned_apart():
    learned = calibrate.calibrations_from(trial(n, slowness=1.5) for n in range(8))
    with_profile = predicted(20, method=PROFILE)
    assert learned.apply(predicted(20), SPACE).speed.step_s > 1.4 * with_profile.speed.step_s
    assert learned.apply(with_profile, SPACE).speed == with_profile.speed


def test_simulated_trials_teach_nothing():
    simulated = [
        make_record(device_bytes=gib * GIB, settings={"micro_batch": gib}) for gib in (10, 40, 60)
    ]
    assert {r.outcome.status for r in simulated} == {Status.OK, Status.OOM}
    assert calibrate.calibrations_from(simulated).learned == {}
    assert calibrate.calibrations_from([]).learned == {}


def test_running_out_of_memory_lowers_the_probability_of_fitting():
    tight = predicted(45)
    before = calibrate._Calibrations().probabilities_of_fitting([tight], SPACE)[0]
    ran_out = trial(1, memory=None, status=Status.OOM, prediction=predicted(45))
    after = calibrate.calibrations_from([ran_out])
    assert after.probabilities_of_fitting([tight], SPACE)[0] < before - 0.05
    # Reserved memory is bounded as well, and step time says nothing.
    assert {key[0] for key in after.learned} == {calibrate.DEVICE, calibrate.RESERVED}
    fitted = calibrate.calibrations_from([trial(n, prediction=predicted(45)) for n in range(5)])
    assert fitted.probabilities_of_fitting([tight], SPACE)[0] > before


def test_memory_that_ran_out_as_predicted_counts_when_a_device_refused_it():
    beyond = predicted(60)
    refused = trial(1, memory=None, status=Status.OOM, prediction=beyond, requested=GIB)
    assert calibrate.observations_of(refused, beyond)[0].at_least == GPU.memory_bytes
    counted = trial(1, memory=None, status=Status.OOM, prediction=beyond)
    assert calibrate.observations_of(counted, beyond) == []


def test_a_trial_that_exhausted_the_host_says_nothing_of_the_device():
    ran_out = trial(1, memory=None, status=Status.OOM, prediction=predicted(45))
    host = replace(ran_out, outcome=replace(ran_out.outcome, exhausted=Exhausted.HOST))
    assert calibrate.observations_of(ran_out, predicted(45))
    assert calibrate.observations_of(host, predicted(45)) == []


def test_a_stand_in_ran_out_of_its_limit_and_not_of_its_memory():
    ran_out = trial(1, memory=None, status=Status.OOM, prediction=predicted(12))
    limited = replace(ran_out, memory_limit_bytes=10 * GIB)
    bound, *_ = calibrate.observations_of(limited, predicted(12))
    assert bound.at_least == 10 * GIB


def test_a_measured_trial_is_compared_with_the_prediction_of_another_record():
    pairs = []
    for number in range(8):
        both = trial(number, memory=1.1)
        for name in ("prediction", "measurement"):
            pairs.append(replace(both, outcome=replace(both.outcome, **{name: None})))
    learned = calibrate.calibrations_from(pairs)
    together = calibrate.calibrations_from(trial(n, memory=1.1) for n in range(8))
    assert learned.learned.keys() == together.learned.keys()
    for key, calibration in learned.learned.items():
        assert calibration.factors == together.learned[key].factors
    alone = [r for r in pairs if r.outcome.prediction is None]
    assert calibrate.calibrations_from(alone).learned == {}


def test_a_fixed_cost_of_micro_steps_is_found():
    """Short steps that take 40 ms longer than predicted, long ones that hardly notice."""
    trials = []
    for number in range(1, 9):
        prediction = predicted(20, tokens_per_s=600 * 32 / (0.02 * number**2 * 8))
        step_s = prediction.speed.step_s
        slowness = (step_s + 8 * 0.04) / step_s
        trials.append(trial(number, prediction=prediction, slowness=slowness))
    calibration = calibrate.calibrations_from(trials).of(calibrate.STEP, predicted(), SPACE)
    assert calibration.fixed_cost == pytest.approx(0.04)
    assert calibration.correct(1.0, units=8).median == pytest.approx(1.32, rel=0.03)


def test_probabilities_of_many_predictions_are_those_of_each():
    learned = calibrate.calibrations_from(trial(n, memory=1 + n / 40) for n in range(5))
    predictions = [predicted(gib) for gib in (10, 30, 43, 46, 47, 60)]
    predictions.append(replace(predicted(46), gpu="a100_80gb", budget=MemoryBudget(80 * GIB)))
    predictions.append(learned.apply(predicted(46), SPACE))
    many = learned.probabilities_of_fitting(predictions, SPACE)
    each = [learned.probabilities_of_fitting([p], SPACE)[0] for p in predictions]
    np.testing.assert_allclose(many, each, atol=1e-9)
    assert list(many[:6]) == sorted(many[:6], reverse=True)
    assert many[0] > 0.99
    assert many[5] < 0.05
    assert many[7] == pytest.approx(many[3], abs=1e-6)  # corrected or not, the same question


def test_the_prior_interval_contains_the_prediction_and_is_wider_without_a_profile():
    memory, speed = make_memory(20 * GIB), make_speed(300.0)
    plain = calibrate.prior_intervals(memory, speed, CATALOGUE, unknown=(0.7, 1.4))
    profiled = calibrate.prior_intervals(memory, speed, PROFILE)
    assert set(plain) == {*calibrate.QUANTITIES, calibrate.TOKENS}
    for name, (low, high) in plain.items():
        value = getattr(memory, name, None) or getattr(speed, name)
        assert low < value < high
    for name in (calibrate.STEP, calibrate.TOKENS):
        assert plain[name][1] / plain[name][0] > 1.05 * profiled[name][1] / profiled[name][0]
    # Unknowns add as squares: neither is hidden by the other, nor are both at their worst at once.
    known = calibrate.prior_intervals(memory, speed, CATALOGUE)[calibrate.STEP][1] / speed.step_s
    assert max(known, 1.4) < plain[calibrate.STEP][1] / speed.step_s < 1.4 * known
    # Speed is far less certain than memory, reserved memory less than allocated.
    widths = {name: high / low for name, (low, high) in plain.items()}
    assert widths[calibrate.STEP] > widths[calibrate.DEVICE] > widths[calibrate.ALLOCATED]


def test_intervals_survive_the_journal_and_old_journals_are_read():
    learned = calibrate.calibrations_from(trial(n, memory=1.1) for n in range(4))
    record = trial(1, prediction=learned.apply(predicted(20), SPACE))
    data = json.loads(json.dumps(record.to_dict()))
    assert TrialRecord.from_dict(data) == record
    assert (
        data["predicted"]["intervals"][calibrate.DEVICE][0]
        < data["predicted"]["intervals"][calibrate.DEVICE][1]
    )
    for name in ("intervals", "corrections"):
        del data["predicted"][name]
    old = TrialRecord.from_dict(data).outcome.prediction
    assert old.intervals == {}
    assert old.corrections == {}
