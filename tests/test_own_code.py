"""Code of the user's own, searched end to end on the processor; the examples of the documents."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.app.cli.main import run
from tuner.core.errors import InputError
from tuner.core.records import Source, Status
from tuner.predict.training import get_workload
from tuner.searches.journal import read_journal
from tuner.testing import WorkloadContract

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

PROGRAM = """
import time
from tqdm import tqdm

BATCH_SIZE = 2

def loader(batch_size):
    return range(100_000 // batch_size)

for _ in tqdm(loader(batch_size=BATCH_SIZE)):
    time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder; `python` is this one, and finds tuner."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def tuner(*arguments: str) -> str:
    command = [sys.executable, "-m", "tuner", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def search(space: str, trials: int) -> list:
    """Search on the processor; the records, all of which must be measurements."""
    text = tuner("search", "--space", space, "--gpu", "cpu", "--trials", str(trials))
    assert "without predictions" in text
    assert "Recommended (measured)" in text
    records = read_journal(next(Path("results").rglob("trials.jsonl"))).records
    # A workload's recommended configuration is run once more, to verify it.
    assert sum(not record.verification for record in records) == trials
    for record in records:
        assert record.outcome.status is Status.OK, record.outcome.message
        assert record.source is Source.MEASURED
        assert record.outcome.prediction is None
        assert record.outcome.measurement.speed.samples_per_s > 0
    return records


@pytest.mark.proof
def test_a_loop_that_knows_nothing_of_tuner_is_tuned(folder):
    shutil.copytree(EXAMPLES / "own_loop", folder, dirs_exist_ok=True)
    records = search("own_loop.yaml", 2)
    # Torch is imported by the command: its memory is part of it.
    assert all(r.outcome.measurement.memory.device_bytes > 50 * 2**20 for r in records)
    again = tuner("search", "--space", "own_loop.yaml", "--gpu", "cpu", "--trials", "2")
    assert "0 new trials" in again
    (folder / "train.py").write_text("raise SystemExit('another script')")
    assert run(["search", "--space", "own_loop.yaml", "--gpu", "cpu", "--trials", "1"]) == 1


@pytest.mark.proof
def test_the_settings_of_a_program_are_tuned_on_this_machine(folder, capsys):
    """`tuner tune --mode measure` runs copies of the program as it is, without an emulator."""
    (folder / "train.py").write_text(PROGRAM)
    tune = ["tune", "--gpu", "cpu", "--knob", "micro_batch=2,8", "--trials", "2", "train.py"]
    assert run(tune) == 2
    assert "--mode measure runs the trials on this one" in capsys.readouterr().err
    assert not (folder / "tune-train.yaml").exists()
    assert run([*tune, "--mode", "measure", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["source"] == "measured"
    assert best["configuration"]["micro_batch"] == 8  # a step sleeps, whatever its batch
    records = read_journal(folder / "results" / "tune-train" / "cpu" / "trials.jsonl").records
    assert [r.configuration["micro_batch"] for r in records] == [2, 8]  # its own value first
    assert (folder / "train.py").read_text() == PROGRAM


@pytest.mark.proof
def test_the_example_workload_is_searched(folder):
    shutil.copytree(EXAMPLES / "own_workload", folder, dirs_exist_ok=True)
    records = search("toy.yaml", 2)
    for record in records:
        assert record.outcome.measurement.total_params > 0
        assert set(record.outcome.measurement.memory.phase_peak_bytes) == {
            "load", "forward", "backward", "optimizer"}  # fmt: skip


class TestExampleWorkload(WorkloadContract):
    """The contract, inherited as the example does."""

    workload = "toy_workload:Toy"
    configuration = {"micro_batch": 4, "width": 16, "grad_accum": 2}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _beside_the_example(self, monkeypatch):
        monkeypatch.syspath_prepend(str(EXAMPLES / "own_workload"))


class TestContractFinds:
    """Each mistake that the contract is there for, in a workload that makes it."""

    MISTAKES = {  # noqa: RUF012
        "test_samples_are_counted": ("self.counts.samples += self.micro_batch", "pass"),
        "test_gradients_are_gone_after_a_step": (
            "self.optimizer.zero_grad(set_to_none=True)", "pass"),
        "test_a_step_changes_what_is_trained_and_nothing_else": ("self.optimizer.step()", "pass"),
        "test_session_has_what_it_says": (
            "self.trainable_params = self.total_params", "self.trainable_params = 7"),
        "test_phases_are_announced": ("environment.enter(Phase.BACKWARD, micro_step)", "device"),
        "test_loss_is_a_finite_number": ("loss.detach()", "loss.detach() / 0"),
        "test_optimizer_has_exactly_what_is_trained": (
            "AdamW(self.model.parameters()", "AdamW(list(self.model.parameters())[:1]"),
    }  # fmt: skip

    @pytest.mark.parametrize("name", MISTAKES)
    def test_a_mistake(self, tmp_path, monkeypatch, name):
        right, wrong = self.MISTAKES[name]
        text = (EXAMPLES / "own_workload" / "toy_workload.py").read_text()
        assert right in text
        module = f"mistaken_{name}"
        (tmp_path / f"{module}.py").write_text(text.replace(right, wrong))
        monkeypatch.syspath_prepend(str(tmp_path))

        class Contract(WorkloadContract):
            workload = f"{module}:Toy"
            configuration = {"micro_batch": 4, "width": 16, "grad_accum": 2}  # noqa: RUF012

        with pytest.raises(AssertionError):
            getattr(Contract(), name)()


def test_a_function_is_a_workload_too(tmp_path, monkeypatch):
    (tmp_path / "as_function.py").write_text(
        "def train(model_config, configuration, environment):\n"
        "    return (model_config, configuration, environment)\n"
        "NOTHING = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    workload = get_workload("as_function:train")
    assert workload.open(1, 2, 3) == (1, 2, 3)
    with pytest.raises(InputError, match="opens no session"):
        get_workload("as_function:NOTHING")


def test_commands_that_predict_say_that_they_cannot(folder, capsys):
    shutil.copytree(EXAMPLES / "own_loop", folder, dirs_exist_ok=True)
    assert run(["estimate", "--space", "own_loop.yaml", "--gpu", "a6000"]) == 2
    assert "cannot be predicted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("own_loop/own_loop.yaml", ""),
        ("own_workload/toy.yaml", ""),
        ("own_workload/toy_workload.py", "class ToySession"),
        ("own_workload/test_toy.py", "from tuner.testing"),
    ],
)
def test_the_document_shows_the_examples_as_they_are(file, after):
    text = (EXAMPLES / file).read_text()
    assert text[text.index(after) :].strip() in (ROOT / "docs/reference/own-code.md").read_text()
