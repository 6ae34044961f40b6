"""When a search stops: the limits of its budget, and what trials have cost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_record
from tune_fakes import FakeSpace, outcome_of, record_of

from tuner.core.errors import InputError
from tuner.searches.candidates import Candidates
from tuner.searches.progress import Budget, Meter, Spent, StoppedBy
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge

HOUR_S = 3600.0


def so_far(device_s: float = 0.0, mean_s: float | None = None, **fields) -> Spent:
    return Spent(trials=1, elapsed_s=10.0, device_s=device_s, mean_device_s=mean_s, **fields)


def measured(duration_s: float, **fields):
    record = make_record(measured=True, **fields)
    outcome = dataclasses.replace(record.outcome, duration_s=duration_s)
    return dataclasses.replace(record, outcome=outcome)


class TestSpent:
    def test_is_what_measured_trials_took_times_their_gpus(self):
        records = [measured(20.0), measured(40.0), make_record()]  # the last one was simulated
        found = Meter(2.0, records).spent(trials=3, elapsed_s=99.0, running=1)
        assert (found.device_s, found.mean_device_s) == (120.0, 60.0)
        assert found.with_next_s() == 240.0

    def test_simulated_trials_cost_nothing(self):
        found = Meter(1.0, [make_record()]).spent(trials=1, elapsed_s=1.0, running=0)
        assert found == Spent(1, 1.0, 0.0, None, 0)
        assert Budget(trials=9, gpu_hours=1e-9).used_up(found) is None


class TestBudget:
    @pytest.mark.parametrize(
        ("limit", "now", "reason"),
        [
            ({"trials": 1}, so_far(), StoppedBy.BUDGET),
            ({"time_limit_s": 10.0}, so_far(), StoppedBy.TIME_LIMIT),
            ({"time_limit_s": 10.1}, so_far(), None),
            ({"gpu_hours": 1.0}, so_far(3000.0, 600.0), None),
            ({"gpu_hours": 1.0}, so_far(3001.0, 600.0), StoppedBy.GPU_HOURS),
            ({"gpu_hours": 1.0}, so_far(2500.0, 600.0, running=1), StoppedBy.GPU_HOURS),
            ({"max_cost_usd": 2.0, "usd_per_hour": 2.0}, so_far(3000.0, 600.0), None),
            ({"max_cost_usd": 2.0, "usd_per_hour": 2.1}, so_far(3000.0, 600.0),
             StoppedBy.MAX_COST),
            ({"max_cost_usd": 2.0, "usd_per_hour": 1.0, "gpu_hours": 0.5}, so_far(1800.0, 60.0),
             StoppedBy.GPU_HOURS),
        ],
    )  # fmt: skip
    def test_ends_at_its_first_limit(self, limit, now, reason):
        assert Budget(**{"trials": 40, **limit}).used_up(now) is reason

    @pytest.mark.parametrize(("gain", "reason"), [(0.011, None), (None, None),
                                                  (0.009, StoppedBy.MIN_GAIN)])  # fmt: skip
    def test_ends_where_too_little_is_expected(self, gain, reason):
        budget = Budget(trials=40, min_gain=0.01)
        assert budget.used_up(so_far(), expected_gain=lambda: gain) is reason

    @given(
        hours=st.floats(0.01, 10), durations=st.lists(st.floats(1, 3000), min_size=1, max_size=60)
    )
    def test_goes_beyond_its_hours_by_no_more_than_the_trials_differ(self, hours, durations):
        budget, used = Budget(trials=1000, gpu_hours=hours), []
        for duration_s in durations:
            mean_s = sum(used) / len(used) if used else None
            now = Spent(len(used), 0.0, sum(used), mean_s)
            if budget.used_up(now) is not None:
                break
            used.append(duration_s)
        assert sum(used) <= hours * HOUR_S + max(durations)

    def test_refuses_all_that_is_no_limit_at_once(self):
        with pytest.raises(InputError) as error:
            Budget(trials=0, time_limit_s=-1.0, gpu_hours=0.0, min_gain=float("nan"))
        assert str(error.value).count("must be") == 4

    def test_refuses_a_cost_without_a_price(self):
        with pytest.raises(InputError, match="price of the GPU, which is unknown"):
            Budget(trials=1, max_cost_usd=5.0)


class TestExpectedGain:
    def adapter(self, sampler: str = "guided") -> Proposer:
        space = FakeSpace()
        candidates = Candidates(list(space.configurations()), tuple(space.knobs))
        predictions = [outcome_of(c).prediction for c in candidates.configurations]
        return Proposer(
            candidates, sampler=sampler, seed=0, trials=40, knowledge=Knowledge(predictions)
        )

    def test_is_unknown_without_a_guide_and_before_anything_fits(self):
        assert self.adapter("tpe").expected_gain() is None
        assert self.adapter().expected_gain() is None

    def test_falls_until_hardly_anything_is_left_to_gain(self):
        adapter, gains = self.adapter(), []
        while len(gains) < 40 and (configuration := adapter.propose()) is not None:
            adapter.tell(record_of(configuration))
            gains.append(adapter.expected_gain())
        assert all(gain is not None and gain >= 0 for gain in gains)
        assert gains[0] > 0.05
        assert gains[-1] < 0.01
