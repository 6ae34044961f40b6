"""Who cannot win, who is tied and who is verified; and what a search makes of that."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import sys
from dataclasses import dataclass, replace

import pytest
from device_fakes import measured, measurement_of
from tune_fakes import GPU, FakeSpace, drive, outcome_of, record_of, request_of, state_of

from tuner.core.records import Configuration, Outcome, Source, Status, TrialRecord
from tuner.searches.candidates import Candidates
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import pareto_front, samples_per_s
from tuner.searches.journal import latest
from tuner.searches.objectives import objectives_of
from tuner.searches.proposer import Proposer
from tuner.searches.ranking import MOST_RUNS, Ranking, give_up_rule, near_tie, to_verify
from tuner.searches.ray.driver import search
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.searches.state import SearchState
from tuner.searches.strategies import Knowledge
from tuner.trial.base import PLAIN, GiveUp, Instructions

SPACE = FakeSpace()
NF4 = [c for c in SPACE.configurations() if c["precision"] == "nf4" and c["lora_rank"] == 16]
FITTING = [c for c in NF4 if outcome_of(c).prediction.fits]
FASTEST = max(FITTING, key=lambda c: outcome_of(c).prediction.speed.samples_per_s)


def trial(configuration: Configuration, *, width: float = 0.0, name: str = "", **changes):
    """A measured record; the interval of its rate has this relative half width."""
    record = measured(record_of(configuration), device="Testium 9")
    measurement = record.outcome.measurement
    rate = measurement.speed.samples_per_s
    ends = (rate * (1 - width), rate * (1 + width)) if width else None
    measurement = dataclasses.replace(measurement, samples_per_s_interval=ends)
    outcome = dataclasses.replace(record.outcome, measurement=measurement)
    trial_id = name or record.trial_id
    return dataclasses.replace(record, outcome=outcome, trial_id=trial_id, **changes)


class TestRule:
    def test_it_holds_the_front_at_the_slow_end_of_its_intervals(self):
        records = [trial(c, width=0.1) for c in FITTING]
        rule = give_up_rule(Ranking(records), usable_bytes=77)
        assert rule.usable_bytes == 77
        for size, rate in rule.front:
            (record,) = (r for r in records if r.outcome.measurement.memory.device_bytes == size)
            assert rate == pytest.approx(0.9 * record.outcome.measurement.speed.samples_per_s)

    def test_it_would_have_ended_what_is_dominated_and_nothing_on_the_front(self):
        records = [trial(c) for c in FITTING]
        rule = give_up_rule(Ranking(records), usable_bytes=GPU.memory_bytes)
        sizes = [size for size, _ in rule.front]
        for record in records:
            memory, speed = (getattr(record.outcome.measurement, n) for n in ("memory", "speed"))
            on_front = memory.device_bytes in sizes
            # Off the front some are as fast as one on it, which is no reason to end them.
            rate = speed.samples_per_s * (1.0 if on_front else 0.999)
            assert rule.is_dominated(memory.device_bytes, rate) is not on_front


class TestTies:
    def test_no_tie_where_intervals_are_apart_or_unknown(self):
        assert near_tie(Ranking([trial(c, width=1e-6) for c in FITTING])) is None
        assert near_tie(Ranking([trial(c) for c in FITTING])) is None
        assert near_tie(Ranking([])) is None

    def test_the_fastest_and_who_may_be_as_fast_run_again_until_three_runs(self):
        records = [trial(FITTING[0], width=0.9), trial(FASTEST, width=0.9)]
        again = []
        while (configuration := near_tie(Ranking(records))) is not None:
            again.append(configuration)
            records.append(trial(configuration, width=0.9, name=f"again-{len(again)}"))
        assert again == [FASTEST, FITTING[0]] * (MOST_RUNS - 1)


@pytest.mark.parametrize("verification", [False, True])
def test_repeats_that_differ_by_more_than_their_intervals_are_said(verification):
    first = trial(FASTEST, width=0.01, name="a")

    def again(factor: float) -> Ranking:
        measurement = first.outcome.measurement
        rate = factor * measurement.speed.samples_per_s
        measurement = dataclasses.replace(
            measurement,
            speed=dataclasses.replace(measurement.speed, samples_per_s=rate),
            samples_per_s_interval=(rate * 0.99, rate * 1.01),
        )
        outcome = dataclasses.replace(first.outcome, measurement=measurement)
        second = dataclasses.replace(
            first, outcome=outcome, trial_id="b", verification=verification
        )
        return Ranking([first, second])

    assert again(1.01).unsteady() is None
    assert (
        "not steady: trials of one configuration differed by up to 25 %" in again(1.25).unsteady()
    )


class TestVerification:
    def test_the_fastest_that_fits_is_verified_once(self):
        records = [trial(c) for c in NF4]
        assert to_verify(Ranking(records)) == FASTEST
        passed = trial(FASTEST, name="v", verification=True)
        assert passed.verified
        assert to_verify(Ranking([*records, passed])) is None
        assert next(r for r in latest([*records, passed]) if r.configuration == FASTEST).verified

    def test_what_fails_is_not_recommended_and_the_next_one_is_verified(self):
        records = [trial(c) for c in NF4]
        failed = trial(FASTEST, name="v", verification=True)
        oom = Outcome(Status.OOM, phase="evaluation")
        records.append(dataclasses.replace(failed, outcome=oom))
        second = to_verify(Ranking(records))
        assert second not in (None, FASTEST)
        assert second in FITTING

    def test_a_crash_of_a_verification_takes_nothing_from_the_trial(self):
        records = [trial(c) for c in NF4]
        failed = trial(FASTEST, name="v", verification=True)
        records.append(dataclasses.replace(failed, outcome=Outcome(Status.CRASHED)))
        best = next(r for r in latest(records) if r.configuration == FASTEST)
        assert best.fits
        assert not best.verified
        assert to_verify(Ranking(records)) is None

    def test_verification_survives_the_journal(self):
        passed = trial(FASTEST, verification=True)
        assert TrialRecord.from_dict(passed.to_dict()).verified
        old = passed.to_dict()
        del old["verification"]
        assert not TrialRecord.from_dict(old).verified


def request(**changes) -> SearchRequest:
    values = {"space": SPACE, "gpu": GPU, "runner_factory": Verifying(), "run_id": "r",
              "versions": {"tuner": "1"}, "trial_device": TrialDevice("Testium 9"),
              "margin_bytes": 7, "searcher": "random", "trials": 6}  # fmt: skip
    return request_of(**{**values, **changes})


@dataclass(frozen=True)
class Verifying:
    """Measures what is predicted; a verification of `fails` runs out of memory."""

    fails: str = ""
    source = Source.MEASURED

    def __call__(self) -> Verifying:
        return self

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        if instructions.verify and configuration.key == self.fails:
            return Outcome(Status.OOM, phase="evaluation", message="in the evaluation")
        outcome = outcome_of(configuration)
        if outcome.status is not Status.OK:
            return Outcome(Status.OOM, phase="forward", requested_bytes=1)
        note = f"{instructions.give_up is not None}"
        return Outcome(
            Status.OK,
            measurement=measurement_of(outcome.prediction, device="Testium 9"),
            message=note,
            duration_s=1.0,
        )


def test_a_search_ends_with_a_verification_and_takes_the_next_best_where_it_fails():
    plain = state_of(request())
    drive(plain, Verifying().run)
    assert len(plain.records) == 6
    fitting = sorted((r for r in plain.records if r.fits), key=lambda r: (
        r.outcome.measurement.speed.samples_per_s))  # fmt: skip
    best, second = fitting[-1].configuration, fitting[-2].configuration
    state = state_of(request(verify=True))
    drive(state, Verifying(fails=best.key).run)
    assert [r.configuration for r in state.records[:6]] == [r.configuration for r in plain.records]
    first_try, passed = state.records[6:]
    assert (first_try.configuration, first_try.verified) == (best, False)
    assert (passed.configuration, passed.verified) == (second, True)
    assert max((r for r in latest(state.records) if r.fits), key=lambda r: (
        r.outcome.measurement.speed.samples_per_s)).verified  # fmt: skip
    again = state_of(request(verify=True, resume=state.records, run_id="again"))
    again.reuse()
    assert again.finished
    assert again.reused == 8


@pytest.mark.proof
def test_a_search_verifies_in_its_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    result = search(request(verify=True, trials=4, workers=1, initial=FITTING[:1]))
    assert [r.verification for r in result.records] == [False] * 4 + [True]
    assert result.records[-1].verified
    # What the user's space starts from runs in full, whatever it is compared with.
    told = {r.configuration: r.outcome.message for r in result.records if r.fits}
    assert told.pop(FITTING[0]) == "False" or result.records[-1].configuration == FITTING[0]


def test_near_ties_are_repeated_in_the_last_tenth_of_the_budget():
    state = state_of(request(trials=20))

    class Noisy(Verifying):
        def run(self, configuration, instructions=PLAIN):
            found = super().run(configuration, instructions)
            if found.measurement is None:
                return found
            rate = found.measurement.speed.samples_per_s
            wide = dataclasses.replace(
                found.measurement, samples_per_s_interval=(rate / 2, rate * 2)
            )
            return dataclasses.replace(found, measurement=wide)

    drive(state, Noisy().run)
    assert len(state.records) == 20
    first = [r.configuration for r in state.records[:18]]
    assert len(set(first)) == 18
    assert {r.configuration for r in state.records[18:]} <= set(first)


def test_trials_of_other_versions_are_hints_and_are_run_again():
    predictions = [outcome_of(c).prediction for c in NF4]
    candidates = Candidates(NF4, tuple(SPACE.knobs))
    old = [dataclasses.replace(trial(c), versions={"tuner": "0"}) for c in FITTING[:6]]
    asked = request(resume=old, searcher="guided")
    assert not any(map(asked.is_known, old))
    assert all(map(asked.is_stale, old))
    other_model = dataclasses.replace(old[0], versions={"tuner": "0", "model": "another"})
    assert not asked.is_stale(other_model)
    adapter = Proposer(
        candidates, sampler="guided", seed=0, trials=9, knowledge=Knowledge(predictions)
    )
    state = SearchState(asked, adapter, on_record=lambda r: None, on_progress=lambda p: None)
    before = adapter.guide.experience.beliefs()[1].sd.copy()
    state.reuse()
    assert (state.stale, state.reused, len(state.records)) == (6, 0, 0)
    assert candidates.untried_count == len(NF4)
    fresh = Proposer(
        candidates, sampler="guided", seed=0, trials=9, knowledge=Knowledge(predictions)
    )
    for record in old:
        fresh.remember(record)
    hinted = fresh.guide.experience.beliefs()[1].sd
    sure = Proposer(
        Candidates(NF4, tuple(SPACE.knobs)), sampler="guided", seed=0, trials=9,
        knowledge=Knowledge(predictions),
    )  # fmt: skip
    for record in old:
        sure.tell(record)
    known = sure.guide.experience.beliefs()[1].sd
    place = candidates.place(FITTING[0])
    assert known[place] < hinted[place] < before[place]


class TestOtherObjectives:
    """What is slow may win in another objective, and the first one says what is best."""

    OBJECTIVES = objectives_of(["lora_rank", "samples_per_s"], SpaceFacts(name="fake"), GPU)

    def test_nothing_is_given_up_for_being_slow(self):
        predictions = {c.key: outcome_of(c).prediction for c in SPACE.configurations()}
        asked = request(searcher="guided", predictions=predictions, objectives=self.OBJECTIVES)
        state = state_of(asked)
        for number in range(3):
            assert state.propose(str(number)) is not None
            rule = state.instructions(str(number)).give_up
            assert rule.usable_bytes == GPU.memory_bytes - 7
            assert not rule.front
            state.start(str(number))
            state.end(str(number), trial(FITTING[number]).outcome)


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


def test_instructions_are_not_copied():
    instructions = Instructions(give_up=GiveUp(1, ((1, 2.0),)))
    assert copy.deepcopy({"instructions": instructions})["instructions"] is instructions
