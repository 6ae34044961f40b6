"""What errors teach: who is to blame, what is closed and reopened, and when a search ends."""

import dataclasses

import numpy as np
import pytest
from tune_fakes import GPU, FakeFactory, FakeSpace, drive, outcome_of, request_of, state_of

from tuner.core.errors import UnavailableError
from tuner.core.records import Exhausted, Outcome, Status
from tuner.searches.failures import FAILURES_THAT_END, MOST_FAILURES, Failures, failure_of
from tuner.searches.options import SEARCHERS

SPACE = FakeSpace()
ALL = list(SPACE.configurations())
COLUMNS = {name: [c[name] for c in ALL] for name in SPACE.knobs}
ERROR = "RuntimeError: no kernel image is available"


def places(**wanted):
    return [i for i, c in enumerate(ALL) if all(c[k] == v for k, v in wanted.items())]


def crash(configuration, message=ERROR):
    return Outcome(Status.CRASHED, prediction=outcome_of(configuration).prediction, message=message)


def search(outcome, *, searcher="guided", trials=30, resume=()):
    """A search without Ray: its state, and what it tried."""
    request = request_of(
        space=SPACE, gpu=GPU, runner_factory=FakeFactory(), searcher=searcher, trials=trials,
        versions={"tuner": "1"}, run_id="r", resume=resume,
        predictions={c.key: outcome_of(c).prediction for c in ALL},
    )  # fmt: skip
    state = state_of(request)
    state.reuse()
    return state, drive(state, lambda configuration, _: outcome(configuration))


# -- blame ----------------------------------------------------------------------------------


def test_what_ran_is_cleared_and_the_rest_shares_the_blame():
    failures = Failures(COLUMNS)
    (bad,) = places(precision="nf4", micro_batch=4, lora_rank=16, gradient_checkpointing=True)
    assert (failures.probability() == 1).all()
    failures.failed(bad, "crashed")
    first = failures.probability()
    other = places(precision="bf16", micro_batch=2, lora_rank=32, gradient_checkpointing=False)
    close = places(precision="nf4", micro_batch=4, lora_rank=16, gradient_checkpointing=False)
    assert first[other[0]] == 1 > first[close[0]]
    # All of its values but the precision run elsewhere.
    for name in ("micro_batch", "lora_rank", "gradient_checkpointing"):
        failures.ran(places(precision="bf16", **{name: ALL[bad][name]})[0])
    after = failures.probability()
    assert after[places(precision="nf4")].max() < 0.75
    assert after[places(precision="bf16")].min() == 1


def test_a_pair_is_to_blame_where_each_of_its_values_runs():
    failures = Failures(COLUMNS)
    pair = {"precision": "bf16", "gradient_checkpointing": False}
    for place in places(precision="bf16", gradient_checkpointing=True)[:4]:
        failures.ran(place)
    for place in places(precision="nf4", gradient_checkpointing=False):
        failures.ran(place)
    for place in places(**pair)[::4]:
        failures.failed(place, "crashed")
    found = failures.probability()
    assert found[places(**pair)].max() < 0.1
    assert np.delete(found, places(**pair)).min() > 0.8


def test_a_value_is_closed_after_three_alike_and_reopened_by_a_success():
    failures = Failures(COLUMNS)
    bad = places(precision="nf4", gradient_checkpointing=True)
    for place in places(precision="bf16", gradient_checkpointing=True):
        failures.ran(place)
    for place in (bad[0], bad[9]):
        failures.failed(place, "crashed: a")
    failures.failed(bad[17], "crashed: another")
    assert not failures.closed()
    failures.failed(bad[21], "crashed: a")
    ((reason, mask),) = failures.closed().items()
    assert reason == "precision=nf4 failed 3 times and never ran: crashed: a"
    assert set(np.flatnonzero(mask)) >= set(bad)
    assert not mask[places(precision="bf16")].any()
    failures.ran(bad[5])
    assert not failures.closed()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("CUDA error at 0x7f31", "CUDA error at 0x8e20", True),
        ("no file /a/b.so in 3 s", "no file /c/d.so in 21 s", True),
        ("no kernel image", "no such operator", False),
    ],
)
def test_errors_are_alike_but_for_numbers_addresses_and_paths(one, other, alike):
    kinds = {failure_of(Outcome(Status.CRASHED, message=text)) for text in (one, other)}
    assert (len(kinds) == 1) is alike


def test_the_device_s_memory_is_no_failure_and_the_machine_s_is():
    assert failure_of(Outcome(Status.OOM, exhausted=Exhausted.DEVICE)) is None
    assert failure_of(Outcome(Status.OOM)) is None
    assert failure_of(Outcome(Status.INTERRUPTED)) is None
    assert "main memory" in failure_of(Outcome(Status.OOM, exhausted=Exhausted.HOST))
    assert failure_of(Outcome(Status.TIMEOUT, message="killed after 9 s")) is not None


# -- searches -------------------------------------------------------------------------------


def best_of(configurations):
    return max(outcome_of(c).prediction.speed.samples_per_s for c in configurations)


@pytest.mark.parametrize("broken", [{"precision": "nf4"}, {"gradient_checkpointing": True}])
def test_guided_finds_the_best_of_what_runs_where_a_value_always_crashes(broken):
    ((name, value),) = broken.items()

    def outcome(configuration):
        return crash(configuration) if configuration[name] == value else outcome_of(configuration)

    state, tried = search(outcome, trials=14)
    fitting = [c for c in ALL if c[name] != value and outcome_of(c).prediction.fits]
    ran = [c for c in tried if c[name] != value]
    assert best_of(ran) == best_of(fitting)
    failed = len(tried) - len(ran)
    assert failed <= 5
    if failed >= 3:
        assert any(f"{name}={value}" in note for note in state.result().warnings)


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_a_search_in_which_everything_fails_ends_with_the_common_cause(searcher):
    state, tried = search(crash, searcher=searcher)
    assert FAILURES_THAT_END <= len(tried) <= MOST_FAILURES
    assert isinstance(state.failure, UnavailableError)
    assert ERROR in state.failure.message
    assert "--fresh" in state.failure.hint
    assert len(state.result().records) == len(tried)


@pytest.mark.parametrize("searcher", ["tpe", "random"])
def test_other_searchers_leave_alone_what_is_closed(searcher):
    state, tried = search(
        lambda c: crash(c) if c["precision"] == "nf4" else outcome_of(c),
        searcher=searcher, trials=len(ALL),
    )  # fmt: skip
    assert state.failure is None
    assert sum(c["precision"] == "nf4" for c in tried) < len(places(precision="nf4")) / 2
    assert any("precision=nf4" in note for note in state.result().warnings)


def test_who_resumes_knows_what_failed():
    def outcome(configuration):
        return (
            crash(configuration)
            if configuration["precision"] == "nf4"
            else outcome_of(configuration)
        )

    whole, tried = search(outcome, trials=12)
    known = [dataclasses.replace(r, versions={"tuner": "1"}) for r in whole.records[:5]]
    _, rest = search(outcome, trials=12, resume=known)
    assert [*(r.configuration for r in known), *rest] == tried
