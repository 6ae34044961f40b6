"""What a command prints of its progress, and what is made of it."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.trial.base import MeasureOptions
from tuner.trial.command_progress import (
    CommandProgress,
    _Counted,
    _NotFinite,
    _OutputReader,
    _Summary,
    _TaggedLine,
    events_of,
)
from tuner.trial.stop_rule import Amounts, StepTimer

OPTIONS = MeasureOptions(device="cpu", budget_s=1.0, min_steps=3, warmup_steps=2)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('tuner: {"samples": 8}', _TaggedLine({"samples": 8})),
        (' 12%|##        | 3/25 [00:01<00:09]tuner: {"samples": 8}', _TaggedLine({"samples": 8})),
        (" 12%|#2        | 3/25 [00:01<00:09,  2.50it/s]", _Counted("", 3, 25, 2.5)),
        ("  8%|8         | 1/12 [00:01<00:15,  4.00s/it]", _Counted("", 1, 12, 0.25)),
        ("Epoch 0:  50%|#####     | 5/10 [00:00<00:00, 8.00it/s, v_num=0]",
         _Counted("Epoch 0", 5, 10, 8.0)),
        ("train: 7it [00:03,  2.00it/s, loss=2.1]", _Counted("train", 7, None, 2.0)),
        ("  0%|          | 0/12 [00:00<?, ?it/s]", _Counted("", 0, 12, None)),
        ("99%|#9| 990/1000 [1:02:03<00:10, 50.0samples/s]", _Counted("", 990, 1000, 50.0)),
        ("step 12/100 | loss 2.31", _Counted("step", 12, 100)),
        ("iter 7: loss 2.3, time 12ms", _Counted("iter", 7)),
        ("[train] Step: 40 lr 1e-4", _Counted("step", 40)),
        ("{'loss': 'nan', 'grad_norm': '1.0'}", _NotFinite()),
        ("loss=inf", _NotFinite()),
        ("{'train_runtime': '6.1', 'train_samples_per_second': '7.7', "
         "'train_steps_per_second': '1.9', 'train_loss': '4.1'}", _Summary(7.7, 1.9)),
    ],
)  # fmt: skip
def test_lines_that_tell_something(line, event):
    assert list(events_of(line.encode())) == [event]


@pytest.mark.parametrize(
    "line",
    ["", "tuner: hello", "tuner: [1]", "{'eval_loss': nan}", "stepping 3 back", "loss: 2.3",
     "Downloading https://host/x/12 [bytes]", "{'train_runtime': broken}", "\xff\x00"],
)  # fmt: skip
def test_lines_that_tell_nothing(line):
    assert list(events_of(line.encode("latin-1"))) == []


@given(st.binary(max_size=400), st.integers(1, 7))
def test_any_output_can_be_read_in_any_pieces(data, size):
    reader = _OutputReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])


def test_the_tagged_lines_do_not_depend_on_how_they_arrive():
    lines = "".join(f'tuner: {{"samples": {n}}}\n' for n in range(1, 6)).encode()
    for size in range(1, len(lines)):
        reader, events = _OutputReader(), []
        for start in range(0, len(lines), size):
            events += reader.feed(lines[start : start + size])
        assert events == [_TaggedLine({"samples": n}) for n in range(1, 6)]


def test_tqdm_itself_is_understood():
    """The installed version's own output, with its throttling and its units."""
    code = (
        "import time\nfrom tqdm import tqdm\nfor _ in tqdm(range(30), desc='fit'): time.sleep(0.01)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    counted = [e for e in _OutputReader().feed(done.stderr) if isinstance(e, _Counted)]
    assert counted[0] == _Counted("fit", 0, 30, None)
    assert (counted[-1].name, counted[-1].count, counted[-1].total) == ("fit", 30, 30)
    assert 1 < counted[-1].rate <= 100  # a step sleeps 10 ms, and is held up at times


class TestStepTimer:
    def test_leaves_the_warm_up_out(self):
        timer = StepTimer(2)
        for count, at_s in ((1, 100.0), (2, 110.0), (3, 110.5), (5, 111.5)):
            timer.report(count, at_s)
        assert (timer.steps, timer.total_s) == (3, 1.5)
        assert timer.interval.mean_s == pytest.approx(0.5)

    def test_a_bar_that_begins_anew_loses_only_the_time_between(self):
        timer = StepTimer(1)
        for count, at_s in ((1, 0.0), (2, 1.0), (0, 50.0), (1, 51.0), (2, 52.0)):
            timer.report(count, at_s)
        assert (timer.steps, timer.total_s) == (3, 3.0)

    def test_stops_when_the_mean_is_known_or_the_budget_spent(self):
        even, uneven = StepTimer(1), StepTimer(1)
        for step in range(5):
            even.report(step, step * 0.1)
            uneven.report(step, step**3 * 0.1)
        assert even.reason_to_stop(OPTIONS) == "interval"
        assert uneven.reason_to_stop(OPTIONS) == "budget"
        assert StepTimer(1).reason_to_stop(OPTIONS) is None

    @given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 10)), max_size=30))
    def test_never_counts_more_than_was_reported(self, reports):
        timer, at_s = StepTimer(2), 0.0
        for count, passed_s in reports:
            at_s += passed_s
            timer.report(count, at_s, Amounts(count, 0))
        assert 0 <= timer.total_s <= at_s + 1e-9
        assert 0 <= timer.steps <= 30 * len(reports)


class TestHeard:
    def heard(self, progress=None):
        return CommandProgress(OPTIONS, progress)

    def feed_bar(self, heard, name, counts, *, step_s=0.5, total=100):
        for count in counts:
            text = f"\r{name}  1%|# | {count}/{total} [00:01<00:09, 2.00it/s]"
            heard.take(2, text.encode(), 10 + count * step_s)

    def test_tagged_lines_count_before_bars(self):
        heard = self.heard()
        self.feed_bar(heard, "", range(6))
        for step in range(5):
            line = {"samples": 4, "tokens": 40, "time_s": 20 + step}
            heard.take(1, f"tuner: {json.dumps(line)}\n".encode(), 20 + step + 0.2)
        assert heard.is_tagged
        assert heard.timer.interval.mean_s == pytest.approx(1.0)
        assert (heard.timer.samples, heard.timer.tokens) == (12, 120)

    def test_bars_that_prepare_are_passed_over(self):
        heard = self.heard()
        for name in (
            "Loading checkpoint shards:",
            "Map:",
            "Evaluating:",
            "Tokenizing train dataset:",
        ):
            self.feed_bar(heard, name, range(20))
        assert not heard.has_rate
        assert heard.stopped_by is None

    def test_the_space_can_name_the_bar(self):
        heard = self.heard("fit")
        self.feed_bar(heard, "", range(20))
        assert not heard.has_rate
        self.feed_bar(heard, "fit:", range(6), step_s=0.25)
        assert heard.timer.interval.mean_s == pytest.approx(0.25)

    def test_the_loss_that_is_not_finite_ends_it(self):
        heard = self.heard()
        self.feed_bar(heard, "", range(4))
        assert heard.stopped_by is not None or heard.loss_finite
        heard.take(1, b"{'loss': nan}\n", 20.0)
        assert heard.stopped_by == "loss"
