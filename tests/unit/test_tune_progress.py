"""Progress of a search, from records alone."""

from __future__ import annotations

import dataclasses

from tune_fakes import FakeSpace, outcome_of, record_of, samples_per_s, tokens_per_s

from tuner.core.records import Status
from tuner.report.terminal.progress import progress_line
from tuner.searches.progress import ProgressTracker

ALL = list(FakeSpace().configurations())
FITTING = [c for c in ALL if record_of(c).fits]
TOO_BIG = [c for c in ALL if outcome_of(c).status is Status.OOM]


def test_counts_best_and_time_left():
    tracker = ProgressTracker(total=10, started_s=100.0)
    tracker.reuse(record_of(FITTING[0]))
    assert tracker.at(101.0).eta_s is None
    tracker.use_workers(2)
    tracker.end(record_of(FITTING[1]), 140.0)
    tracker.end(record_of(TOO_BIG[0]), 141.0)
    now = tracker.at(142.0, running=1)
    assert (now.done, now.running, now.oom, now.failed, now.reused) == (3, 1, 1, 0, 1)
    assert now.best.configuration == max(FITTING[:2], key=samples_per_s)
    assert now.elapsed_s == 42.0
    # Each worker has had its first trial, of which most was its start.
    assert now.eta_s is None
    tracker.use_workers(1)
    tracker.end(record_of(FITTING[2]), 143.0)
    # One trial took 2 s after that, and six are left.
    assert tracker.at(143.0).eta_s == 12.0


def test_more_known_trials_than_are_asked_for_are_all_that_there_are():
    tracker = ProgressTracker(total=2, started_s=0.0)
    for configuration in FITTING[:3]:
        tracker.reuse(record_of(configuration))
    assert progress_line(tracker.at(1.0)).startswith("3/3 done, ")


def test_verification_is_counted_beside_the_trials():
    tracker = ProgressTracker(total=2, started_s=0.0)
    for configuration in FITTING[:2]:
        tracker.end(record_of(configuration), 1.0)
    for _ in range(2):
        tracker.end(dataclasses.replace(record_of(FITTING[0]), verification=True), 2.0)
    now = tracker.at(3.0)
    assert (now.done, now.total, now.verified) == (2, 2, 2)
    assert progress_line(now).startswith("2/2 done, verified 2 times, ")


def test_more_tokens_a_second_of_longer_examples_are_not_better():
    by_tokens = max(FITTING, key=tokens_per_s)
    by_samples = max(FITTING, key=samples_per_s)
    assert by_tokens != by_samples
    for first, second in ((by_tokens, by_samples), (by_samples, by_tokens)):
        tracker = ProgressTracker(total=2, started_s=0.0)
        tracker.end(record_of(first), 0.5)
        tracker.end(record_of(second), 0.5)
        assert tracker.at(1.0).best.configuration == by_samples


def test_time_left_is_no_more_than_the_limit_leaves():
    tracker = ProgressTracker(total=1000, started_s=0.0, time_limit_s=60.0)
    tracker.use_workers(1)
    tracker.end(record_of(FITTING[0]), 20.0)
    tracker.end(record_of(FITTING[1]), 40.0)
    assert tracker.at(50.0).eta_s == 10.0
    assert tracker.at(61.0).eta_s == 0.0


def test_what_does_not_fit_is_never_best():
    tracker = ProgressTracker(total=1, started_s=0.0)
    tracker.end(record_of(TOO_BIG[0]), 0.5)
    assert tracker.at(1.0).best is None
