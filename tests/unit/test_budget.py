"""When a search stops: the limits of its budget, and what trials have cost."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_record
from tune_fakes import (
    GPU,
    FakeFactory,
    FakeSpace,
    outcome_of,
    record_of,
    request_of,
    samples_per_s,
    state_of,
    tokens_per_s,
)

from tuner.core.errors import InputError
from tuner.core.records import Status
from tuner.report.terminal.progress import progress_line
from tuner.searches import state
from tuner.searches.candidates import Candidates
from tuner.searches.options import SearchOptions
from tuner.searches.progress import Budget, Progress, StoppedBy, device_s, eta_s
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge

HOUR_S = 3600.0


def reason_after(device_s: float, /, expected_gain=lambda: None, **limits) -> StoppedBy | None:
    """The limit reached after one trial and 10 s, if the next one ends after `device_s`."""
    usd_per_hour = limits.pop("usd_per_hour", None)
    budget = Budget(SearchOptions(**limits), usd_per_hour)
    return budget.used_up(trials=1, elapsed_s=10.0, device_s=device_s, expected_gain=expected_gain)


def measured(duration_s: float, **fields):
    record = make_record(measured=True, **fields)
    outcome = dataclasses.replace(record.outcome, duration_s=duration_s)
    return dataclasses.replace(record, outcome=outcome)


def test_counts_what_measured_trials_took_times_their_gpus():
    records = [measured(20.0), measured(40.0), make_record()]  # the last one was simulated
    assert device_s(records, 2.0) == 120.0 + 60.0
    assert device_s(records, 2.0, running=1) == 120.0 + 2 * 60.0


class TestBudget:
    @pytest.mark.parametrize(
        ("limit", "device_s", "reason"),
        [
            ({"trials": 1}, 0.0, StoppedBy.BUDGET),
            ({"time_limit_s": 10.0}, 0.0, StoppedBy.TIME_LIMIT),
            ({"time_limit_s": 10.1}, 0.0, None),
            ({"gpu_hours": 1.0}, 3600.0, None),
            ({"gpu_hours": 1.0}, 3601.0, StoppedBy.GPU_HOURS),
            ({"max_cost_usd": 2.0, "usd_per_hour": 2.0}, 3600.0, None),
            ({"max_cost_usd": 2.0, "usd_per_hour": 2.1}, 3600.0, StoppedBy.MAX_COST),
            (
                {"max_cost_usd": 2.0, "usd_per_hour": 1.0, "gpu_hours": 0.5},
                1860.0,
                StoppedBy.GPU_HOURS,
            ),
        ],
    )
    def test_ends_at_its_first_limit(self, limit, device_s, reason):
        assert reason_after(device_s, **limit) is reason

    @pytest.mark.parametrize(("gain", "reason"), [(0.011, None), (None, None),
                                                  (0.009, StoppedBy.MIN_GAIN)])  # fmt: skip
    def test_ends_where_too_little_is_expected(self, gain, reason):
        assert reason_after(0.0, lambda: gain, min_gain=0.01) is reason

    @given(
        hours=st.floats(0.01, 10), durations=st.lists(st.floats(1, 3000), min_size=1, max_size=60)
    )
    def test_goes_beyond_its_hours_by_no_more_than_the_trials_differ(self, hours, durations):
        budget, used = Budget(SearchOptions(trials=1000, gpu_hours=hours)), []
        for duration_s in durations:
            next_s = device_s(map(measured, used), 1.0)
            if budget.used_up(trials=len(used), elapsed_s=0.0, device_s=next_s) is not None:
                break
            used.append(duration_s)
        assert sum(used) <= hours * HOUR_S + max(durations)

    def test_refuses_all_that_is_no_limit_at_once(self):
        with pytest.raises(InputError) as error:
            Budget(SearchOptions(trials=0, time_limit_s=-1.0, gpu_hours=0.0, min_gain=float("nan")))
        assert str(error.value).count("must be") == 4

    def test_refuses_a_cost_without_a_price(self):
        with pytest.raises(InputError, match="price of the GPU, which is unknown"):
            Budget(SearchOptions(trials=1, max_cost_usd=5.0))


class TestExpectedGain:
    def adapter(self, sampler: str = "guided") -> Proposer:
        space = FakeSpace()
        candidates = Candidates(list(space.configurations()), tuple(space.knobs))
        predictions = [outcome_of(c).prediction for c in candidates.configurations]
        return Proposer(
            candidates, sampler=sampler, seed=0, trials=40, knowledge=Knowledge(predictions)
        )

    def test_falls_until_hardly_anything_is_left_to_gain(self):
        adapter, gains = self.adapter(), []
        while len(gains) < 40 and (configuration := adapter.propose()) is not None:
            adapter.tell(record_of(configuration))
            gains.append(adapter.expected_gain())
        assert all(gain is not None and gain >= 0 for gain in gains)
        assert gains[0] > 0.05
        assert gains[-1] < 0.01


# -- progress of a search, from records alone -------------------------------------------------


ALL = list(FakeSpace().configurations())
FITTING = [c for c in ALL if record_of(c).fits]
TOO_BIG = [c for c in ALL if outcome_of(c).status is Status.OOM]


def progress(records, total=2, **more) -> Progress:
    told = {"running": 0, "reused": 0, "elapsed_s": 1.0, "eta_s": None, **more}
    return Progress.of(records, total=total, **told)


def test_counts_and_best():
    records = [record_of(c) for c in (*FITTING[:2], TOO_BIG[0])]
    now = progress(records, total=10, running=1, reused=1)
    assert (now.done, now.running, now.oom, now.failed, now.reused) == (3, 1, 1, 0, 1)
    assert now.best.configuration == max(FITTING[:2], key=samples_per_s)


def test_time_left_is_that_of_trials_after_the_first_of_each_worker():
    assert eta_s([], 0, 9, 1.0) is None
    # Each worker has had its first trial, of which most was its start.
    assert eta_s([40.0, 41.0], 2, 7, 42.0) is None
    # One trial took 2 s after that, and six are left.
    assert eta_s([40.0, 41.0, 43.0], 2, 6, 43.0) == 12.0


def test_more_known_trials_than_are_asked_for_are_all_that_there_are():
    now = progress(list(map(record_of, FITTING[:3])), reused=3)
    assert progress_line(now).startswith("3/3 done, ")


def test_verification_is_counted_beside_the_trials():
    records = list(map(record_of, FITTING[:2]))
    records += [dataclasses.replace(record_of(FITTING[0]), verification=True)] * 2
    now = progress(records)
    assert (now.done, now.total, now.verified) == (2, 2, 2)
    assert progress_line(now).startswith("2/2 done, verified 2 times, ")


def test_more_tokens_a_second_of_longer_examples_are_not_better():
    by_tokens = max(FITTING, key=tokens_per_s)
    by_samples = max(FITTING, key=samples_per_s)
    assert by_tokens != by_samples
    for both in ((by_tokens, by_samples), (by_samples, by_tokens)):
        assert progress(list(map(record_of, both))).best.configuration == by_samples


def test_time_left_is_no_more_than_the_limit_leaves(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: now[0])
    asked = request_of(
        space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(), searcher="random",
        trials=1000, time_limit_s=60.0, run_id="r",
    )  # fmt: skip
    found = state_of(asked)
    for number in range(2):
        configuration = found.propose(str(number))
        found.start(str(number))
        now[0] += 20.0
        found.end(str(number), outcome_of(configuration))
    now[0] = 50.0
    assert found.progress.eta_s == 10.0
    now[0] = 61.0
    assert found.progress.eta_s == 0.0


def test_what_does_not_fit_is_never_best():
    assert progress([record_of(TOO_BIG[0])]).best is None
