"""The metrics of a search, and the port that serves them."""

from collections import Counter

import pytest
from device_fakes import measurement_of
from tune_fakes import GPU, FakeFactory, FakeSpace, outcome_of, record_of

from tuner.app.search.plan import make_plan
from tuner.app.target import load_targets
from tuner.core.errors import InputError
from tuner.core.records import Measurement, Outcome, Status
from tuner.searches.front import hypervolume, pareto_front
from tuner.searches.options import SearchOptions
from tuner.searches.progress import Progress
from tuner.searches.ranking import Ranking
from tuner.searches.ray import driver as of_ray
from tuner.searches.ray.driver import COUNTERS, GAUGES, HISTOGRAMS, _SearchMetrics
from tuner.searches.request import SearchRequest

CONFIGURATIONS = list(FakeSpace().configurations())
REFERENCE = (0.0, float(GPU.memory_bytes))


class Noted:
    """Stands in for an instrument of Ray, and notes what it is told."""

    counted: Counter[tuple[str, tuple[tuple[str, str], ...]]]
    shown: dict[str, float]
    observed: list[tuple[str, float]]

    def __init__(self, name, *_):
        assert name in {*COUNTERS, *GAUGES, *HISTOGRAMS}
        self.name = name

    def inc(self, value, tags):
        self.counted[self.name, tuple(sorted(tags.items()))] += value

    def set(self, value, tags):
        self.shown[self.name] = value

    def observe(self, value, tags):
        self.observed.append((self.name, value))


@pytest.fixture
def noted(monkeypatch) -> type[Noted]:
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(of_ray, kind, Noted)
    Noted.counted, Noted.shown, Noted.observed = Counter(), {}, []
    return Noted


def measured(configuration) -> Measurement:
    return measurement_of(outcome_of(configuration).prediction, device="Testium 9", factor=1.1)


def metrics(clock=lambda: 0.0) -> _SearchMetrics:
    request = SearchRequest(space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(), run_id="r1")
    told = _SearchMetrics([request], clock=clock)
    told.begin()
    return told


def progress(done: int) -> Progress:
    return Progress(done, 2, 0, 0, 0, 40, None, 5.0, None)


def test_gauges_are_of_the_front_and_of_all_trials_and_counters_of_new_ones(noted):
    told = metrics()
    known, new = (
        record_of(c, Outcome(Status.OK, measurement=measured(c))) for c in CONFIGURATIONS[:2]
    )
    told.record(new)
    front = Ranking([known, new]).front()
    told.progress([Progress(3, 2, 1, 0, 1, 40, None, 5.0, None, verified=1, front=front,
                            held_back=7)])  # fmt: skip
    tags = {"space": "fake", "gpu": GPU.id, "run": "r1", "outcome": "ok", "source": "measured"}
    assert noted.counted["tuner_trials", tuple(sorted(tags.items()))] == 1
    assert noted.shown["tuner_hypervolume"] == hypervolume([known, new], reference=REFERENCE)
    assert noted.shown["tuner_front_size"] == len(pareto_front([known, new]))
    fastest = max(r.outcome.evidence.speed.samples_per_s for r in (known, new))
    assert noted.shown["tuner_best_samples_per_second"] == fastest
    assert noted.shown["tuner_oom_ratio"] == 1 / 4
    assert noted.shown["tuner_trials_running"] == 2
    assert noted.shown["tuner_gpu_memory_bytes"] == GPU.memory_bytes
    assert noted.shown["tuner_held_back"] == 7
    told.progress([progress(4)], now=True)
    assert noted.shown["tuner_held_back"] == 0


def test_gauges_are_set_once_a_second_and_at_the_end(noted):
    now = [100.0]
    told = metrics(clock=lambda: now[0])
    for time_s, expected in ((100.0, 1), (100.5, 1), (101.1, 3), (101.2, 3)):
        now[0] = time_s
        told.progress([progress(expected if time_s in (100.0, 101.1) else 99)])
        assert noted.shown["tuner_trials_done"] == expected
    told.progress([progress(7)], now=True)
    assert noted.shown["tuner_trials_done"] == 7


def test_predictions_are_compared_with_measurements(noted):
    told = metrics()
    configuration = CONFIGURATIONS[0]
    predicted = outcome_of(configuration).prediction
    found_out = measured(configuration)
    told.record(record_of(configuration, Outcome(
        Status.OK, prediction=predicted, measurement=found_out, duration_s=3.0)))  # fmt: skip
    told.progress([progress(1)])
    assert noted.shown["tuner_predicted_memory_ratio"] == pytest.approx(1 / 1.1)
    assert noted.shown["tuner_predicted_throughput_ratio"] == pytest.approx(1.1)
    share = dict(noted.observed)["tuner_trial_memory_ratio"]
    assert share == found_out.memory.device_bytes / GPU.memory_bytes
    assert {name: v for (name, _), v in noted.counted.items()}["tuner_trial_seconds"] == 3.0


def test_a_cluster_that_is_joined_serves_metrics_itself():
    (target,) = load_targets("tiny_cpu", ["cpu"])
    with pytest.raises(InputError, match="for a cluster of its own"):
        make_plan(target, SearchOptions(metrics=True, address="head:6379"))
