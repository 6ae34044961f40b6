"""The Optuna study that a search leaves: other tools of Optuna open it."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tune_fakes import GPU, FakeSpace, device_bytes, outcome_of, record_of, samples_per_s

from tuner.searches.candidates import Candidates
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge, open_mirror

TRIALS = 6
START_TIMEOUT_S = 300.0


@pytest.fixture
def study_path(tmp_path):
    """The study of a small search, in a file."""
    path = tmp_path / "study.log"
    space = FakeSpace()
    candidates = Candidates(list(space.configurations()), tuple(space.knobs))
    predictions = [outcome_of(c).prediction for c in candidates.configurations]
    adapter = Proposer(
        candidates,
        sampler="guided",
        seed=0,
        trials=TRIALS,
        mirror=open_mirror(path, f"fake-{GPU.id}"),
        knowledge=Knowledge(predictions),
    )
    for _ in range(TRIALS):
        configuration = adapter.propose()
        assert configuration is not None
        adapter.tell(record_of(configuration))
    return path


def test_optuna_reads_the_study(study_path):
    storage = JournalStorage(JournalFileBackend(str(study_path)))
    study = optuna.load_study(study_name=f"fake-{GPU.id}", storage=storage)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * TRIALS
    assert study.metric_names == ["samples_per_s", "device_bytes"]
    assert 1 <= len(study.best_trials) <= TRIALS
    first = study.trials[0]
    configuration = next(
        c
        for c in FakeSpace().configurations()
        if c.key.startswith(first.user_attrs["trial_id"][4:])
    )
    assert first.values == [samples_per_s(configuration), device_bytes(configuration)]


@pytest.mark.skipif(
    importlib.util.find_spec("optuna_dashboard") is None, reason="optuna-dashboard is not there"
)
def test_optuna_dashboard_opens_the_study(study_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The program beside this Python, as `pip install` puts it there.
    program = Path(sys.executable).with_name("optuna-dashboard")
    process = subprocess.Popen(
        [program, str(study_path), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        studies = get(f"http://127.0.0.1:{port}/api/studies", process)["study_summaries"]
        assert [s["study_name"] for s in studies] == [f"fake-{GPU.id}"]
        assert studies[0]["directions"] == ["maximize", "minimize"]
        number = studies[0]["study_id"]
        detail = get(f"http://127.0.0.1:{port}/api/studies/{number}?after=0", process)
        assert [trial["state"] for trial in detail["trials"]] == ["Complete"] * TRIALS
        assert detail["objective_names"] == ["samples_per_s", "device_bytes"]
        assert {"micro_batch", "lora_rank"} <= {p["name"] for p in detail["trials"][0]["params"]}
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode is not None


def get(url: str, process: subprocess.Popen[str]) -> dict:
    """The JSON at `url`, once the server answers."""
    # No proxy: a machine may have one for everything, which knows nothing of this server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with opener.open(url, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
