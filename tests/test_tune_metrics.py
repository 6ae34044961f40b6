"""The metrics of a running search as Prometheus gets them, against the journal."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from device_fakes import measurement_of
from prometheus_client.parser import text_string_to_metric_families
from tune_fakes import GPU, FakeSpace, device_bytes, outcome_of, request_of

from tuner.core.records import Configuration, Outcome, Source, Status, TrialRecord
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.ray.driver import COUNTERS, GAUGES, HISTOGRAMS, search
from tuner.searches.request import TrialDevice
from tuner.trial.base import PLAIN, Instructions

TRIALS = 14
WAIT_S = 600.0  # twelve trials take 10 s alone and 80 s beside eight busy processes


@dataclass(frozen=True)
class HeldRunner:
    """Measures what `outcome_of` predicts; of trials after `free`, each waits for the file."""

    gate: Path
    source: Source = Source.MEASURED
    log: Path = field(default=Path())

    def __call__(self) -> HeldRunner:
        return self

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        (self.log / configuration.key).touch()
        until = time.monotonic() + WAIT_S
        while len(list(self.log.iterdir())) >= TRIALS - 1 and not self.gate.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        outcome = outcome_of(configuration)
        measurement = measurement_of(outcome.prediction, device="Testium 9", factor=1.05)
        if outcome.status is not Status.OK:
            return Outcome(outcome.status, prediction=outcome.prediction, phase=outcome.phase)
        return Outcome(
            Status.OK, prediction=outcome.prediction, measurement=measurement, duration_s=0.25
        )


@dataclass
class Scraped:
    """What was found at the address, and who listened meanwhile."""

    families: dict[str, object] = field(default_factory=dict)
    records: tuple[TrialRecord, ...] = ()
    listening: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Scraped:
    """One search, scraped while its second last trial runs."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "log").mkdir()
    gate, journal, found = folder / "gate", folder / "trials.jsonl", Scraped()
    done: list[TrialRecord] = []

    def look(address: str) -> None:
        try:
            until = time.monotonic() + WAIT_S
            while time.monotonic() < until:
                found.families = families_at(address)
                if shows(found.families, len(done), running=1) and len(done) == TRIALS - 2:
                    found.records = read_journal(journal).records
                    found.listening = addresses_of_children()
                    return
                time.sleep(0.2)
        finally:
            gate.touch()

    def tell(line: str) -> None:
        match = re.match(r"metrics: (http://127\.0\.0\.1:\d+/metrics)$", line)
        if match:
            watcher.append(threading.Thread(target=look, args=match.groups()))
            watcher[0].start()

    watcher: list[threading.Thread] = []
    all_of_them = list(FakeSpace().configurations())
    request = request_of(
        space=FakeSpace(), gpu=GPU, runner_factory=HeldRunner(gate, log=folder / "log"),
        trials=TRIALS, versions={}, trial_device=TrialDevice("Testium 9"),
        predictions={c.key: outcome_of(c).prediction for c in all_of_them},
        initial=[max(all_of_them, key=device_bytes)],  # which runs out of memory
        workers=1, margin_bytes=7, run_id="r1", seed=3,
        metrics=True, tell=tell,
    )  # fmt: skip
    with JournalWriter(journal) as writer, pytest.MonkeyPatch.context() as patch:
        # Workers unpickle the runner factory, and so import this module.
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))

        def record(new: TrialRecord) -> None:
            writer.append(new)
            done.append(new)

        search(request, on_record=record)
    watcher[0].join()
    assert found.records, "the metrics never showed all trials that had ended"
    return found


def families_at(address: str) -> dict[str, object]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:  # not there yet
        return {}
    families = text_string_to_metric_families(text)
    return {family.name: family for family in families if "ray_tuner" in family.name}


def shows(families, trials: int, *, running: int) -> bool:
    """Whether counters and gauges have come to this many trials."""
    if {"ray_tuner_trials", "ray_tuner_trials_done", "ray_tuner_trials_running"} - set(families):
        return False
    counted = sum(s.value for s in families["ray_tuner_trials"].samples if s.name.endswith("total"))
    shown = families["ray_tuner_trials_done"].samples[0].value
    runs = families["ray_tuner_trials_running"].samples[0].value
    return (counted, shown, runs) == (trials, trials, running)


def addresses_of_children() -> set[str]:
    """Where the processes that this one started listen."""
    found = set()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            found |= {c.laddr.ip for c in child.net_connections("inet") if c.status == "LISTEN"}
        except psutil.NoSuchProcess:
            continue
    return found


def value_of(scraped: Scraped, name: str) -> float:
    (sample,) = scraped.families[f"ray_{name}"].samples
    return sample.value


@pytest.mark.slow
def test_every_metric_is_there_with_its_type_and_its_tags(scraped):
    kinds = {f"ray_{name}": "counter" for name in COUNTERS}
    kinds |= {f"ray_{name}": "gauge" for name in GAUGES}
    kinds |= {f"ray_{name}": "histogram" for name in HISTOGRAMS}
    assert {name: family.type for name, family in scraped.families.items()} == kinds
    for family in scraped.families.values():
        assert family.documentation
        for sample in family.samples:
            tags = (sample.labels["space"], sample.labels["gpu"], sample.labels["run"])
            assert tags == ("fake", GPU.id, "r1")


@pytest.mark.slow
def test_trials_are_counted_by_their_outcome_as_the_journal_has_them(scraped):
    counted = Counter()
    for sample in scraped.families["ray_tuner_trials"].samples:
        if sample.name == "ray_tuner_trials_total":
            counted[sample.labels["outcome"], sample.labels["source"]] += sample.value
    journal = Counter((str(r.outcome.status), str(r.source)) for r in scraped.records)
    assert counted == journal
    assert len(journal) > 1  # some ran out of memory


@pytest.mark.slow
def test_sums_say_what_the_journal_says(scraped):
    def total(family: str, suffix: str) -> float:
        samples = scraped.families[f"ray_{family}"].samples
        return sum(s.value for s in samples if s.name == f"ray_{family}{suffix}")

    seconds = sum(r.outcome.duration_s for r in scraped.records)
    assert total("tuner_trial_seconds", "_total") == pytest.approx(seconds)
    assert total("tuner_decisions", "_total") == TRIALS - 1  # and one of these runs
    assert total("tuner_decision_seconds", "_total") > 0
    assert value_of(scraped, "tuner_predicted_memory_ratio") == pytest.approx(1 / 1.05, rel=1e-6)
    assert value_of(scraped, "tuner_predicted_throughput_ratio") == pytest.approx(1.05)
    assert total("tuner_trial_memory_ratio", "_count") == len(scraped.records)


@pytest.mark.slow
def test_a_cluster_of_its_own_listens_on_localhost_alone(scraped):
    assert scraped.listening
    assert {address.removeprefix("::ffff:") for address in scraped.listening} <= {"127.0.0.1"}
