"""When a trial is given up, by the user's time or by the pace of its first step."""

from runner_bodies import CLOCK, set_ahead
from slow_body import FIRST_STEP_WITHIN_S as SHORT_S
from slow_body import LONGER_S
from test_runner_processes import job

from tuner.core.records import Configuration, Status
from tuner.trial.base import MeasureOptions
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.stop_rule import FIRST_STEP_WITHIN_S, LONGEST_S, NEEDED_S, SLACK, Deadline


def test_time_of_the_user_stands():
    deadline = Deadline(30.0, started_s=100.0)
    deadline.hear({NEEDED_S: 1000.0}, now_s=110.0)
    assert deadline.limit_s == 30.0
    assert deadline.left_s(now_s=110.0) == 20.0
    assert deadline.left_s(now_s=140.0) == -10.0


def test_first_step_says_how_long_all_steps_may_take():
    deadline = Deadline(None, started_s=100.0)
    assert deadline.limit_s == FIRST_STEP_WITHIN_S
    deadline.hear({"phase": "forward"}, now_s=120.0)
    deadline.hear({NEEDED_S: 5.0}, now_s=120.0)
    assert deadline.limit_s == FIRST_STEP_WITHIN_S  # never less than that
    deadline.hear({NEEDED_S: 700.0}, now_s=150.0)
    assert deadline.limit_s == 50.0 + SLACK * 700.0
    deadline.hear({NEEDED_S: 1e6}, now_s=150.0)
    assert deadline.limit_s == LONGEST_S


def test_a_trial_that_goes_on_is_not_given_up_and_one_that_hangs_is(tmp_path, monkeypatch):
    clock = tmp_path / "clock"
    monkeypatch.setenv(CLOCK, str(clock))

    def longer(facts):
        set_ahead(clock, LONGER_S)

    with IsolatedRunner(job(), MeasureOptions(device="cpu"), body="slow_body:BODY") as runner:
        goes_on = runner.run(Configuration({"needed_s": 60.0}), on_progress=longer)
        clock.unlink()
        hangs = runner.run(Configuration({"needed_s": 0}))
    assert goes_on.status is Status.OK, goes_on.message
    assert (hangs.status, hangs.message) == (Status.TIMEOUT, f"killed after {SHORT_S:g} s")
