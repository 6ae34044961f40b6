"""`tuner trial`: which device, what is asked of the runner, and what is printed of its answer."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from cli_samples import write_samples
from device_fakes import A6000, measurement_of, pretend
from results_samples import make_prediction

from tuner.app import measuring
from tuner.app.cli import trial
from tuner.app.cli.main import run
from tuner.app.estimate import Estimate
from tuner.app.search.supported import require_supported
from tuner.core import host
from tuner.core.environment import trial_environment
from tuner.core.records import MemoryBudget, Outcome, Status
from tuner.core.units import GIB, MIB
from tuner.trial.base import MeasureOptions, TrialJob

TRIAL = ["trial", "--space", "tiny.yaml", "--set", "micro_batch=2"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The tiny space; a processor with 8 GiB; no GPU; and a runner that asks."""
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(host, "cpu_name", lambda: "Testium 9")
    monkeypatch.setattr(host, "usable_memory_bytes", lambda: 8 * GIB)
    pretend(monkeypatch)
    asked = SimpleNamespace(job=None, options=None, closed=0, outcome=measured_outcome())

    def predicted(space, configuration, gpu, *, margin_fraction, profile):
        require_supported(configuration, gpu)
        budget = MemoryBudget.of(gpu.memory_bytes, margin_fraction)
        prediction = dataclasses.replace(PREDICTION, budget=budget, gpu=gpu.id)
        return Estimate(space, configuration, gpu, prediction)

    class Runner:
        def __init__(self, job: TrialJob, options: MeasureOptions, *, environment: Any) -> None:
            asked.job, asked.options, asked.environment = job, options, environment

        def run(self, configuration: Any, *more: Any) -> Outcome:
            asked.configuration = configuration
            return asked.outcome

        def close(self) -> None:
            asked.closed += 1

    monkeypatch.setattr(trial, "estimate_configuration", predicted)
    monkeypatch.setattr(measuring, "IsolatedRunner", Runner)
    return asked


PREDICTION = make_prediction(100 * MIB, 3000, budget=MemoryBudget(8 * GIB, 0))


def measured_outcome(factor: float = 1.25) -> Outcome:
    measurement = measurement_of(PREDICTION, device="Testium 9", factor=factor)
    return Outcome(Status.OK, measurement=measurement, duration_s=3.0)


def test_runs_on_the_processor_and_prints_its_numbers(machine, capsys):
    assert run([*TRIAL, "--device", "cpu", "--budget", "2s", "--timeout", "5min"]) == 0
    assert (machine.job.gpu.id, machine.job.model) == ("cpu", "./tiny-model")
    options = MeasureOptions(device="cpu", budget_s=2.0, timeout_s=300.0)
    assert (machine.options, machine.closed) == (options, 1)
    assert machine.configuration["micro_batch"] == 2
    text = capsys.readouterr().out
    assert "measured on Testium 9" in text
    rows = {line[:16].strip(): line[16:].split() for line in text.splitlines()}
    assert rows["device memory"] == ["125.0", "MiB"]
    assert max(map(len, text.splitlines())) <= 80


def test_a_trial_sees_the_environment_of_a_search(machine, monkeypatch):
    monkeypatch.setattr(host, "usable_cpus", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's own, which a search has not either
    assert run([*TRIAL, "--device", "cpu"]) == 0
    assert machine.environment == trial_environment(6)
    assert machine.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    pretend(monkeypatch, A6000, A6000)
    assert run([*TRIAL, "--device", "cuda:1"]) == 0
    assert machine.environment["OMP_NUM_THREADS"] == "3"  # half of them: a search runs two at once


def test_lengths_come_from_the_space_or_a_file(machine, tmp_path):
    assert run([*TRIAL, "--device", "cpu"]) == 0
    known = machine.job.data
    assert (machine.options.lengths, known.token_lengths.mean) == ("full", 20.0)
    space = (tmp_path / "tiny.yaml").read_text()
    drawn = space.replace("{mean: 20, max: 30}", "{quantiles: {0.5: 20, 1: 30}}")
    assert drawn != space
    (tmp_path / "drawn.yaml").write_text(drawn.replace("name: tiny", "name: drawn"))
    arguments = [*TRIAL, "--device", "cpu", "--lengths", "data"]
    arguments[2] = "drawn.yaml"
    assert run(arguments) == 0
    assert (machine.options.lengths, machine.job.data.token_lengths.max) == ("data", 30)
    (tmp_path / "train.jsonl").write_text('{"n": 3}\n{"n": 5}\n{"n": 5}\n{"n": 9}\n')
    file = ["--data", "train.jsonl", "--length-column", "n"]
    assert run([*TRIAL, "--device", "cpu", *file]) == 0
    assert machine.options.lengths == "data"
    facts = machine.job.data
    assert (facts.examples, facts.token_lengths.mean, facts.token_lengths.max) == (4, 5.5, 9)
    assert facts.padding == known.padding
    assert facts.token_lengths.points[-1] == (9.0, 1.0)


def test_json_has_what_was_measured_and_nothing_of_a_search(machine, capsys):
    assert run([*TRIAL, "--gpu", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["source"], answer["device"], answer["fits"]) == ("measured", "Testium 9", True)
    assert answer["predicted"] is None
    assert answer["measured"]["memory"]["device_bytes"] == 125 * MIB
    assert "trial_id" not in answer


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (
            Outcome(Status.OOM, phase="backward", requested_bytes=2 * GIB),
            1,
            "oom in backward, 2.00",
        ),
        (Outcome(Status.TIMEOUT, message="still running after 10 min"), 4, "still running"),
        (Outcome(Status.CRASHED, message="signal 11"), 3, "signal 11"),
        (Outcome(Status.INVALID, message="no such module"), 2, "no such module"),
        (Outcome(Status.INTERRUPTED), 130, "interrupted"),
        (measured_outcome(81.0), 1, "verdict     tight (within headroom): 7.91 GiB of 8.00 GiB"),
    ],
)
def test_exit_code_says_how_it_ended(machine, capsys, outcome, code, says):
    machine.outcome = outcome
    assert run([*TRIAL, "--device", "cpu"]) == code
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--device", "cuda:0"], 3, "no CUDA device 0"),
        ([], 3, "--device cpu"),
        (["--device", "gpu"], 2, "'gpu'"),
        (["--device", "cuda:x"], 2, "write cuda:0 or cpu"),
        (["--device", "cpu", "--gpu", "a6000"], 2, "stand in for GPU 'a6000'"),
        (["--device", "cpu", "--memory-limit", "80GiB"], 2, "more than the device has"),
        (["--device", "cpu", "--budget", "never"], 2, "'never' is not a duration"),
        (["--device", "cpu", "--lengths", "long"], 2, "'long'"),
        (["--device", "cpu", "--lengths", "data"], 2, "mean and maximum of the token lengths only"),
        (["--device", "cpu", "--lengths", "full", "--data", "train.jsonl"], 2, "--lengths full"),
        (["--device", "cpu", "--length-column", "n"], 2, "--data"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(machine, capsys, arguments, code, says):
    assert run([*TRIAL, *arguments]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert machine.job is None
    assert captured.out == ""
