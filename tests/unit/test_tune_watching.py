"""What others can watch of a search: metrics, trackers, and where to look."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from pathlib import Path

import promql_parser
import pytest
from device_fakes import measurement_of
from tune_fakes import GPU, FakeFactory, FakeSpace, outcome_of, record_of

from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Measurement, Outcome, Status
from tuner.searches import watch
from tuner.searches.front import hypervolume, pareto_front
from tuner.searches.progress import Progress
from tuner.searches.ranking import Ranking
from tuner.searches.ray.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SearchMetrics,
)
from tuner.searches.ray.watching import numbers_of, tracker_of
from tuner.searches.request import SearchRequest
from tuner.searches.watch import GRAFANA_DASHBOARD, Tracker, Tracking, parse_tracking

CONFIGURATIONS = list(FakeSpace().configurations())
REFERENCE = (0.0, float(GPU.memory_bytes))


class Noted:
    """Instruments that note what they are told."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self.shown: dict[str, float] = {}
        self.observed: list[tuple[str, float]] = []

    def count(self, name, value, tags):
        assert name in COUNTERS
        self.counted[name, tuple(sorted(tags.items()))] += value

    def show(self, name, value, tags):
        assert name in GAUGES
        if value is not None:
            self.shown[name] = value

    def observe(self, name, value, tags):
        assert name in HISTOGRAMS
        self.observed.append((name, value))


def measured(configuration) -> Measurement:
    return measurement_of(outcome_of(configuration).prediction, device="Testium 9", factor=1.1)


def metrics(noted, clock=lambda: 0.0) -> SearchMetrics:
    request = SearchRequest(space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(), run_id="r1")
    return SearchMetrics([request], instruments=lambda: noted, clock=clock)


def progress(done: int) -> Progress:
    return Progress(done, 2, 0, 0, 0, 40, None, 5.0, None)


def test_gauges_are_of_the_front_and_of_all_trials_and_counters_of_new_ones():
    noted = Noted()
    told = metrics(noted)
    known, new = (
        record_of(c, Outcome(Status.OK, measurement=measured(c))) for c in CONFIGURATIONS[:2]
    )
    told.record(new)
    front = Ranking([known, new]).front()
    told.progress([Progress(3, 2, 1, 0, 1, 40, None, 5.0, None, verified=1, front=front,
                            held_back=7, saved_s=1800.0)])  # fmt: skip
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
    assert noted.shown["tuner_predicted_saved_gpu_seconds"] == 1800.0
    told.progress([progress(4)], now=True)  # its time is unknown: not 0
    assert noted.shown["tuner_held_back"] == 0
    assert noted.shown["tuner_predicted_saved_gpu_seconds"] == 1800.0


def test_gauges_are_set_once_a_second_and_at_the_end():
    noted, now = Noted(), [100.0]
    told = metrics(noted, clock=lambda: now[0])
    for time_s, expected in ((100.0, 1), (100.5, 1), (101.1, 3), (101.2, 3)):
        now[0] = time_s
        told.progress([progress(expected if time_s in (100.0, 101.1) else 99)])
        assert noted.shown["tuner_trials_done"] == expected
    told.progress([progress(7)], now=True)
    assert noted.shown["tuner_trials_done"] == 7


def test_predictions_are_compared_with_measurements():
    noted = Noted()
    told = metrics(noted)
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


# -- Grafana ------------------------------------------------------------------------------------


def exported_names() -> set[str]:
    """What Prometheus sees of the metrics that exist."""
    return (
        {f"ray_{name}_total" for name in COUNTERS}
        | {f"ray_{name}" for name in GAUGES}
        | {f"ray_{name}_bucket" for name in HISTOGRAMS}  # its sum is none, with Ray
    )


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard, with Grafana's variables filled in."""
    board = json.loads(GRAFANA_DASHBOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    filled = [text.replace("$__rate_interval", "5m") for text in found]
    return [re.sub(r"\$(space|gpu|run)\b", ".*", text) for text in filled]


def names_in(node) -> set[str]:
    """The metrics that a parsed expression reads."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name}
    if isinstance(node, promql_parser.MatrixSelector):
        return names_in(node.vector_selector)
    if isinstance(node, promql_parser.BinaryExpr):
        return names_in(node.lhs) | names_in(node.rhs)
    if isinstance(node, promql_parser.Call):
        return set().union(*map(names_in, node.args))
    if isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr):
        return names_in(node.expr)
    assert isinstance(node, promql_parser.NumberLiteral), node
    return set()


@pytest.mark.parametrize("expression", expressions())
def test_each_expression_of_the_dashboard_parses_and_reads_metrics_that_exist(expression):
    names = names_in(promql_parser.parse(expression))
    assert names
    assert names <= exported_names()


def test_the_dashboard_shows_every_gauge_and_counter():
    read = set().union(*(names_in(promql_parser.parse(text)) for text in expressions()))
    unread = exported_names() - read
    assert unread == {"ray_tuner_elapsed_seconds"}  # Grafana's own axis shows it


def test_the_dashboard_is_part_of_the_package():
    package = Path(watch.__file__).parent.parent
    assert GRAFANA_DASHBOARD.is_relative_to(package)
    board = json.loads(GRAFANA_DASHBOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# -- trackers -----------------------------------------------------------------------------------


def test_a_tracker_gets_numbers_and_no_objects():
    configuration = CONFIGURATIONS[0]
    predicted = outcome_of(configuration).prediction
    outcome = Outcome(Status.OK, prediction=predicted, measurement=measured(configuration))
    found = numbers_of(outcome)
    assert all(type(value) is float for value in found.values())
    assert found["samples_per_s"] == outcome.measurement.speed.samples_per_s
    assert found["predicted_device_bytes"] == predicted.memory.device_bytes
    assert (found["ok"], found["out_of_memory"]) == (1.0, 0.0)


def test_tensorboard_gets_a_run_per_trial(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    tracker = tracker_of(parse_tracking(f"tensorboard:{tmp_path}/tb"), "fake")
    records = [record_of(c) for c in CONFIGURATIONS[:3]]
    for record in records:
        tracker.record(record)
    for record in records:
        (path,) = (tmp_path / "tb" / "fake" / GPU.id / record.trial_id).iterdir()
        scalars = {}
        for line in tf_records(path.read_bytes()):
            for value in Event.FromString(line).summary.value:
                if value.HasField("simple_value"):
                    scalars[value.tag] = value.simple_value
        said = record.outcome.prediction.speed.samples_per_s
        assert scalars["ray/tune/predicted_samples_per_s"] == pytest.approx(said)
        assert b"micro_batch" in path.read_bytes()  # a hyperparameter


def tf_records(data: bytes):
    """The payloads of a TFRecord file: length, its checksum, payload, its checksum."""
    place = 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        yield data[place + 12 : place + 12 + length]
        place += 12 + length + 4


def test_mlflow_gets_a_run_per_trial(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    folder = tmp_path / "flow"
    tracker = tracker_of(parse_tracking(f"mlflow:{folder}"), "fake")
    records = [record_of(c) for c in CONFIGURATIONS[:2]]
    for record in records:
        tracker.record(record)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fake")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    for record in records:
        run = runs[record.trial_id]
        said = record.outcome.prediction.speed.samples_per_s
        assert run.data.metrics["predicted_samples_per_s"] == said
        assert run.data.params["lora_rank"] == str(record.configuration["lora_rank"])
        assert run.info.status == "FINISHED"


def test_what_is_no_tracking_is_refused(tmp_path, monkeypatch):
    for text in ("", "tensorboard", "tensorboard:", "wandb:x", ":x"):
        with pytest.raises(InputError) as refused:
            parse_tracking(text)
        assert "tensorboard:FOLDER" in refused.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        parse_tracking(f"tensorboard:{tmp_path / 'file'}")
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="MLflow, which is not installed"):
        parse_tracking("mlflow:runs")
    assert parse_tracking("tensorboard:a:b") == Tracking(Tracker.TENSORBOARD, "a:b")


def test_a_metrics_port_has_to_be_free_and_of_a_cluster_of_its_own():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1"):
            watch.check_metrics_port(port, None)
    watch.check_metrics_port(port, None)
    with pytest.raises(InputError, match="for a cluster of its own"):
        watch.check_metrics_port(port, "head:6379")
    watch.check_metrics_port(None, "head:6379")
