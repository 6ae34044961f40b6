"""`tuner estimate`: trials of a space that ran correct its predictions, and no others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from device_fakes import measurement_of
from tune_fakes import record_of

from tuner.app.cli.main import run
from tuner.app.estimate import Estimate, corrected, estimate_configuration, one_configuration
from tuner.core.records import Outcome, Status, TrialRecord
from tuner.searches.journal import JournalWriter
from tuner.searches.store import ResultsFolder
from tuner.space.gpus import get_gpu

A6000 = get_gpu("a6000")
SLOWER, LARGER = 1.5, 1.1


@pytest.fixture(scope="module")
def predicted() -> Estimate:
    space, configuration = one_configuration("tiny_cpu", None, {})
    return estimate_configuration(space, configuration, A6000)


def ran(predicted: Estimate, number: int, **fields: object) -> TrialRecord:
    """A trial that took more memory and time than it was predicted to take."""
    found = predicted.prediction
    speed = replace(found.speed, step_s=found.speed.step_s * SLOWER)
    took = measurement_of(found, device=A6000.name, factor=LARGER)
    outcome = Outcome(Status.OK, prediction=found, measurement=replace(took, speed=speed))
    configuration = predicted.configuration.replace(seed=number)
    record = record_of(configuration, outcome, space=predicted.space.name, gpu=A6000)
    return replace(record, **{"trial_id": f"t-{number}", "device": A6000.name, **fields})


def write(root: Path, *records: TrialRecord) -> Path:
    with JournalWriter(ResultsFolder(root, "tiny_cpu", A6000.id).journal) as journal:
        for record in records:
            journal.append(record)
    return root


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_memory_bytes": A6000.memory_bytes // 2},
        {"device": "NVIDIA A100-SXM4-80GB", "memory_limit_bytes": A6000.memory_bytes},
        {"space": "tiny_cpu-other"},
    ],
    ids=["another memory", "a larger GPU that stood in", "another model"],
)
def test_trials_of_something_else_correct_nothing(predicted, tmp_path, fields):
    assert corrected(predicted, write(tmp_path, ran(predicted, 1, **fields))) is predicted


def test_predictions_and_no_results_correct_nothing(predicted, tmp_path):
    assert corrected(predicted, tmp_path) is predicted
    record = ran(predicted, 1)
    simulated = replace(record, device=None, outcome=replace(record.outcome, measurement=None))
    assert corrected(predicted, write(tmp_path, simulated)) is predicted


def test_the_command_says_what_corrected_it(predicted, tmp_path, capsys):
    write(tmp_path, *(ran(predicted, n) for n in range(3)))
    command = ["estimate", "--space", "tiny_cpu", "--results", str(tmp_path)]

    def asked(gpu: str, *more: str) -> dict[str, object]:
        assert run([*command, "--gpu", gpu, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain, fixed = asked("a6000", "--results", "none"), asked("a6000")
    assert (plain["corrected_by"], fixed["corrected_by"]) == (0, 3)
    assert fixed["step_s"] > plain["step_s"]
    assert asked("rtx4090")["corrected_by"] == 0
    assert run([*command, "--gpu", "a6000"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "corrected by 3 trials of this space on this GPU: device memory x 1.0" in text
