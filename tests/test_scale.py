"""What a search costs with many trials and workers: what is looked at, not how long it takes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from device_fakes import measurement_of
from tune_fakes import FakeSpace, outcome_of, record_of

from benchmarks.scale.decisions import request_of
from benchmarks.scale.world import ScaleSpace, predicted, scattered
from tuner.core.records import Outcome, Status
from tuner.searches.front import pareto_front, samples_per_s
from tuner.searches.guided.goals import Front
from tuner.searches.journal import latest
from tuner.searches.ranking import Ranking, give_up_rule
from tuner.searches.ray.driver import proposer_of
from tuner.trial.base import GiveUp, Instructions


@pytest.fixture(scope="module")
def adapter():
    """One that knows 60 trials, with 5 more that run."""
    adapter = proposer_of(request_of(100, "guided"))
    begun = [adapter.propose() for _ in range(65)]
    for configuration in begun[:60]:
        record = record_of(configuration, scattered(configuration, predicted(configuration)))
        adapter.tell(record)
    return adapter


def test_the_risk_of_all_candidates_is_worked_out_once_per_outcome(adapter):
    guide = adapter.guide
    first = guide.oom_probability()
    assert guide.oom_probability() is first
    guide.experience.note(5_000, 1.0, 1e9)
    assert guide.oom_probability() is not first


def test_the_standing_is_that_of_all_records_whatever_runs_again():
    rng = random.Random(7)
    configurations = list(FakeSpace().configurations())
    standing, records = Ranking(), []
    for number in range(150):
        configuration = rng.choice(configurations)
        outcome = outcome_of(configuration)
        if outcome.status is Status.OK and rng.random() < 0.8:
            measured = measurement_of(
                outcome.prediction, device="Testium 9", factor=rng.uniform(0.9, 1.1)
            )
            rate = measured.speed.samples_per_s
            measured = replace(measured, samples_per_s_interval=(0.97 * rate, 1.03 * rate))
            outcome = Outcome(Status.OK, prediction=outcome.prediction, measurement=measured)
        else:
            outcome = Outcome(Status.OOM, prediction=outcome.prediction)
        record = replace(record_of(configuration, outcome), trial_id=f"t{number}")
        standing.add(record)
        records.append(record)
        fitting = [r for r in latest(records) if r.fits and r.outcome.measurement]
        front = {r.configuration for r in standing.front()}
        assert front == {r.configuration for r in pareto_front(fitting)}
        assert {r.configuration for r in standing.fitting} == {r.configuration for r in fitting}
        reach = rng.choice([samples_per_s(r) for r in fitting]) if fitting else 0.0
        assert {r.configuration for r in standing.as_fast_as(reach)} == {
            r.configuration
            for r in fitting
            if (ends := r.outcome.measurement.samples_per_s_interval) and ends[1] >= reach
        }


def test_the_rule_of_giving_up_is_one_object_until_the_front_changes():
    standing = Ranking()
    configurations = list(ScaleSpace().configurations())[:400]
    records = [record_of(c, scattered(c, predicted(c))) for c in configurations]
    rules = []
    for record in records:
        before = standing.front()
        standing.add(record)
        rules.append(give_up_rule(standing, 10**12).front)
        if standing.front() is before and len(rules) > 1:
            assert rules[-1] is rules[-2]
    assert len({id(rule) for rule in rules}) < len(rules) / 2
    assert rules[-1] == tuple(
        (r.outcome.measurement.memory.device_bytes, r.outcome.measurement.samples_per_s_interval[0])
        for r in standing.front()
    )


def test_the_front_of_few_is_the_front_of_all(adapter):
    experience = adapter.guide.experience
    rng = random.Random(3)
    for index in rng.sample(range(17_280), 40) + rng.sample(sorted(experience.known), 10):
        pool = experience.pool
        speed = float(pool.samples_per_s[index]) * rng.uniform(0.8, 1.1)
        experience.note(index, speed, float(pool.device_bytes[index]) * rng.uniform(0.9, 1.1))
        _, speeds, sizes = experience.estimates()
        few = experience.front_estimates()
        limits = {"usable_bytes": pool.usable_bytes, "reference_bytes": pool.limit_bytes}
        whole, part = Front.of(speeds, sizes, **limits), Front.of(*few, **limits)
        assert part.speed.tolist() == whole.speed.tolist()
        assert part.size.tolist() == whole.size.tolist()


def test_instructions_are_not_copied():
    instructions = Instructions(give_up=GiveUp(1, ((1, 2.0),)))
    assert copy.deepcopy({"instructions": instructions})["instructions"] is instructions
