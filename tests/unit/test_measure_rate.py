"""When enough steps were timed, and what the driver's counters come to."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.trial import device as gpu_watch
from tuner.trial.device import GpuWatch
from tuner.trial.stop_rule import RunningMean, student_t

# Quantiles at 97.5 %, from the table in NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 20: 2.086, 100: 1.984}


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_students_t_is_that_of_the_tables(degrees, expected):
    assert student_t(degrees) == pytest.approx(expected, rel=1.5e-3)


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=40))
def test_the_running_mean_is_the_mean(times):
    mean = RunningMean()
    for time_s in times:
        mean.add(time_s)
    found = mean.interval()
    expected = student_t(len(times) - 1) * statistics.stdev(times) / math.sqrt(len(times))
    assert found.mean_s == pytest.approx(statistics.fmean(times))
    assert found.half_width_s == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert mean.total_s == pytest.approx(sum(times))


def test_one_time_says_nothing_of_the_spread():
    mean = RunningMean()
    mean.add(2.0)
    assert mean.interval().half_width_s == math.inf
    assert mean.interval().rates(10) is None


def test_the_interval_of_a_rate_holds_the_rate():
    mean = RunningMean()
    for time_s in (1.0, 1.1, 0.9, 1.0):
        mean.add(time_s)
    low, high = mean.interval().rates(8)
    assert low < 8 / 1.0 < high
    assert low == pytest.approx(8 / (1 + mean.interval().half_width_s))


class FakeReader:
    """A busy device."""

    closed = False

    def utilization(self):
        return 0.75

    def close(self):
        self.closed = True


def test_use_of_the_device_is_the_mean_of_samples(monkeypatch):
    reader = FakeReader()
    monkeypatch.setattr(gpu_watch, "open_reader", lambda index: reader)
    with GpuWatch(0) as watch:
        pass
    assert watch.utilization == 0.75
    assert reader.closed


def test_without_a_driver_nothing_is_known(monkeypatch):
    monkeypatch.setattr(gpu_watch, "open_reader", lambda index: None)
    for index in (0, None):
        with GpuWatch(index) as watch:
            pass
        assert watch.utilization is None
