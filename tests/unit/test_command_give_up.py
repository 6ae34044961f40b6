"""Commands that are ended because they cannot win, and how long they are waited for."""

import json
import sys

import pytest

from tuner.core.records import Configuration, Status
from tuner.space.command import Command
from tuner.space.gpus import get_gpu
from tuner.trial.base import GiveUp, Instructions, MeasureOptions, TrialJob
from tuner.trial.command_progress import CommandProgress
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.stop_rule import STEP_SCATTER


def heard_of(give_up: GiveUp | None, times_s: list[float], *, tagged: bool) -> CommandProgress:
    """A command that has told of steps of 8 samples at these times; two of them warm up."""
    options = MeasureOptions(device="cpu", budget_s=1e9, instructions=Instructions(give_up))
    heard = CommandProgress(options, None)
    for step, at_s in enumerate(times_s, start=1):
        line = f'tuner: {{"samples": 8, "time_s": {at_s}}}\n' if tagged else f"step {step}\n"
        heard.take(1, line.encode(), at_s)
    return heard


@pytest.mark.parametrize("tagged", [True, False])
class TestJudge:
    def verdict(self, give_up, times_s, *, tagged, device_bytes=100, samples=8.0):
        heard = heard_of(give_up, times_s, tagged=tagged)
        heard.judge(device_bytes, samples)
        return heard.stopped_by

    def test_memory_decides_once_a_step_was_timed(self, tagged):
        rule = GiveUp(usable_bytes=99)
        assert self.verdict(rule, [1.0, 2.0], tagged=tagged) is None
        assert self.verdict(rule, [1.0, 2.0, 3.0], tagged=tagged) == "memory"
        assert self.verdict(GiveUp(100), [1.0, 2.0, 3.0], tagged=tagged) is None

    @pytest.mark.parametrize(
        ("rate", "size", "expected"),
        [
            (8 * STEP_SCATTER + 0.1, 100, "dominated"),
            (8 * STEP_SCATTER - 0.1, 100, None),
            (1e9, 101, None),  # the other takes more memory
        ],
    )
    def test_one_step_may_have_been_a_slow_one(self, tagged, rate, size, expected):
        rule = GiveUp(front=((size, rate),))
        assert self.verdict(rule, [1.0, 2.0, 3.0], tagged=tagged) == expected

    def test_several_decide_by_their_interval(self, tagged):
        rule = GiveUp(front=((100, 8.5),))
        assert self.verdict(rule, [1.0, 2.0, 3.0, 4.6], tagged=tagged) is None
        # Exactly one second each: enough of them would end it too, in a moment.
        assert self.verdict(rule, [1.0, 2.0, 3.0, 4.001], tagged=tagged) == "dominated"

    def test_without_a_rule_nothing_ends_early(self, tagged):
        assert self.verdict(None, [1.0, 2.0, 3.0], tagged=tagged) is None


def test_a_bar_without_samples_is_never_dominated():
    heard = heard_of(GiveUp(front=((0, 1e9),)), [1.0, 2.0, 3.0], tagged=False)
    heard.judge(100, None)
    assert heard.stopped_by is None


def test_pace_of_its_reports_says_how_long_timing_goes_on():
    assert heard_of(None, [1.0, 2.0], tagged=True).needed_s is None
    needed_s = heard_of(None, [1.0, 2.0, 62.0], tagged=True).needed_s
    assert needed_s == pytest.approx(1e9 + 3 * 60.0)


@pytest.mark.parametrize(
    ("give_up", "stopped_by"),
    [(GiveUp(usable_bytes=1), "memory"), (GiveUp(front=((0, 1e9),)), "dominated")],
)
def test_a_command_that_cannot_win_is_ended_and_measured(tmp_path, give_up, stopped_by):
    line = json.dumps({"samples": 4})
    code = f"import time\nwhile True:\n    time.sleep(0.05)\n    print('tuner: {line}')\n"
    (tmp_path / "train.py").write_text(code)
    command = Command((sys.executable, "train.py"), str(tmp_path))
    job = TrialJob("command", None, get_gpu("a6000"), command=command)
    # Only the rule ends it: the interval is never narrow enough, and the budget is an hour.
    options = MeasureOptions(device="cpu", budget_s=3600.0, relative_error=0.0, timeout_s=300.0)
    facts: dict = {}
    with IsolatedRunner(job, options) as runner:
        outcome = runner.run(Configuration({}), Instructions(give_up), on_progress=facts.update)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.measurement.stopped_by == stopped_by
    assert outcome.measurement.speed.samples_per_s > 0
    assert outcome.measurement.memory.device_bytes > 1
    assert facts["needed_s"] > 3600.0
