"""Progress of a search, from records alone."""

from __future__ import annotations

import dataclasses

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

from tuner.core.records import Status
from tuner.report.terminal.progress import progress_line
from tuner.searches import state
from tuner.searches.progress import Progress, eta_s

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
