"""Trials and searches on a GPU that is not there: the real path of the runner, on an emulator."""

from __future__ import annotations

import json
import re
import sys

import pytest
from emulating import TRAINING, needs_emulator

from tuner.app import measuring
from tuner.app.cli.main import run
from tuner.app.measuring import decide
from tuner.app.search import run as searching
from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration, Exhausted, Status
from tuner.searches.journal import read_journal
from tuner.searches.options import Mode, SearchOptions
from tuner.space.command import Command
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.factories import EmulatedFactory

TINY = ["--space", "qlora4b", "--gpu", "a6000", "--model", "tiny-llama-3m"]
ONE = [
    "precision=nf4",
    "attention=sdpa",
    "optimizer=paged_adamw_8bit",
    "gradient_checkpointing=true",
]
PINNED = [word for setting in ONE for word in ("--set", setting)]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def answer(capsys, *words: str) -> dict:
    assert run([*words, "--json"]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    data = json.loads(printed)
    assert '"source": "measured"' not in printed
    return data


class TestMode:
    def test_it_needs_what_the_emulator_needs(self, monkeypatch):
        monkeypatch.setattr(
            "tuner.app.measuring.unavailable", lambda: "there is no compiler: install one"
        )
        with pytest.raises(UnavailableError, match="cannot run here: there is no compiler"):
            decide(SearchOptions(mode=Mode.EMULATE), get_gpu("a6000"))

    def test_the_device_is_of_the_asked_type(self, monkeypatch):
        monkeypatch.setattr("tuner.app.measuring.unavailable", lambda: None)
        gpu = get_gpu("a6000", memory_bytes=24 << 30)
        found = decide(SearchOptions(mode=Mode.EMULATE), gpu, gpus_per_trial=2)
        assert (found.device, found.names) == ("cuda:0", ("NVIDIA RTX A6000",))
        assert (found.gpus, found.local, found.sizes_bytes) == (2, (), (24 << 30,))
        assert found.trial_device.emulated
        assert "GPU" not in found.resources
        assert found.text(gpu).startswith("emulated 2 x NVIDIA RTX A6000")

    def test_few_trials_run_at_once_where_memory_is_short(self, monkeypatch):
        monkeypatch.setattr("tuner.app.measuring.unavailable", lambda: None)
        monkeypatch.setattr("tuner.core.host.usable_cpus", lambda: 8)
        monkeypatch.setattr("tuner.core.host.usable_memory_bytes", lambda: 13 << 30)
        assert measuring.emulating(get_gpu("a6000")).resources == {"CPU": 4.0}

    def test_a_processor_is_not_emulated(self, capsys):
        assert run(["trial", "--space", "tiny_cpu", "--gpu", "cpu", "--mode", "emulate"]) == 2
        assert "needs a GPU type" in capsys.readouterr().err

    def test_a_local_device_is_another(self, capsys):
        words = ["trial", *TINY, "--device", "cuda:1", "--mode", "emulate"]
        assert run(words) == 2
        assert "--mode emulate makes its own" in capsys.readouterr().err


@needs_emulator
class TestEmulated:
    def test_a_trial_counts_memory_as_the_trace_does(self, capsys):
        data = answer(capsys, "trial", *TINY, *PINNED, "--mode", "emulate")
        assert (data["source"], data["status"], data["fits"]) == ("emulated", "ok", True)
        assert (data["measured"], data["device"]) == (None, None)
        assert data["emulated_device"] == "NVIDIA RTX A6000"
        emulated, predicted = data["emulated"], data["predicted"]
        assert emulated["memory"]["peak_allocated_bytes"] == pytest.approx(
            predicted["memory"]["peak_allocated_bytes"], rel=0.005
        )
        assert emulated["memory"]["device_bytes"] > emulated["memory"]["peak_reserved_bytes"]
        low, high = emulated["intervals"]["step_s"]
        assert low < emulated["step_s"] < high
        assert emulated["samples_per_s_interval"] is None

    @pytest.mark.proof
    def test_one_that_does_not_fit_runs_out_of_memory(self, capsys):
        words = ["trial", *TINY, *PINNED, "--set", "micro_batch=16", "--gpu-memory", "1GiB"]
        assert run([*words, "--mode", "emulate", "--json"]) == 1
        data = json.loads(capsys.readouterr().out)
        assert (data["source"], data["status"], data["fits"]) == ("emulated", "oom", False)
        assert data["exhausted"] == "device"
        assert data["requested_bytes"] > 0
        assert "CUDA out of memory" in data["message"]

    def test_a_search_of_emulated_trials_recommends_an_emulated_one(self, capsys, tmp_path):
        words = ["search", *TINY, *PINNED, "--trials", "1", "--results", "r"]
        data = answer(capsys, *words, "--mode", "emulate")
        assert data["source"] == "emulated"
        assert data["best"]["source"] == data["best"]["verified"] == "emulated"
        (journal,) = tmp_path.glob("r/*/a6000/trials.jsonl")
        records = read_journal(journal).records
        assert len(records) == 2  # a trial and a verification
        assert {str(record.source) for record in records} == {"emulated"}
        best = (journal.parent / "best.yaml").read_text()
        assert "EMULATED" in best
        assert "measured" not in best.lower()

    def test_what_a_predicted_search_recommends_is_verified(self, capsys, tmp_path, monkeypatch):
        monkeypatch.delenv(searching.SWITCH)
        words = ["search", *TINY, *PINNED, "--trials", "2", "--results", "r", "--mode", "predict"]
        data = answer(capsys, *words)
        assert (data["best"]["source"], data["best"]["verified"]) == ("predicted", "emulated")
        assert data["best"]["verification"].startswith("emulated: ")
        (journal,) = tmp_path.glob("r/*/a6000/trials.jsonl")
        assert [str(r.source) for r in read_journal(journal).records[2:]] == ["emulated"]
        # The same command finds it verified, and `best` says so.
        answer(capsys, *words)
        assert len(read_journal(journal).records) == 3
        words = ["best", *TINY, "--results", "r"]
        assert run(words) == 0
        assert re.search(r"verified +emulated: ", capsys.readouterr().out)


@needs_emulator
class TestCommand:
    """A user's own program, which knows nothing of trials."""

    def run(self, tmp_path, code: str, **gpu):
        (tmp_path / "train.py").write_text(code)
        command = Command(
            (sys.executable, "train.py"), str(tmp_path), samples_per_step="micro_batch"
        )
        job = TrialJob("command", None, get_gpu("t4", **gpu), command=command)
        runner = EmulatedFactory(job, MeasureOptions())()
        return runner.run(Configuration({"micro_batch": 256}))

    def test_it_is_followed_for_some_steps(self, tmp_path):
        outcome = self.run(tmp_path, TRAINING)
        assert (outcome.status, outcome.measurement) == (Status.OK, None)
        ran = outcome.emulation
        assert ran.device == "Tesla T4"
        assert ran.steps == 3
        # Weights, gradients and two states of AdamW, in fp32.
        parameters = 2 * 1024 * 4096 + 1024 + 4096
        assert ran.trainable_params == parameters
        assert ran.memory.peak_allocated_bytes > 4 * 4 * parameters
        assert ran.memory.device_bytes > ran.memory.peak_reserved_bytes
        assert ran.speed.samples_per_s == pytest.approx(256 / ran.speed.step_s)
        low, high = ran.intervals["step_s"]
        assert low < ran.speed.step_s < high

    def test_one_that_is_too_large_runs_out_of_memory(self, tmp_path):
        outcome = self.run(tmp_path, TRAINING.replace("4096", "40960"), memory_bytes=1 << 30)
        assert (outcome.status, outcome.exhausted) == (Status.OOM, Exhausted.DEVICE)

    def test_one_that_fails_is_no_emulation(self, tmp_path):
        outcome = self.run(tmp_path, "import torch; torch.zeros(1).cuda(); raise SystemExit(7)")
        assert (outcome.status, outcome.emulation) == (Status.CRASHED, None)
        assert "exit code 7" in outcome.message
