"""A search that is killed at a random moment and started again ends as one that was left alone.

Each is a `tuner search` with real trials of a model of two layers on the processor. Ray's
own losses are in test_local_ray.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from shared_cases.tiny_model import CONFIG
from waiting import wait_for

from tuner.core.processes import marked
from tuner.searches.journal import read_journal

ROOT = Path(__file__).parents[1]
MARK = "TUNER_KILL_POINT"
"""Environment variable by which every process of one search is found, Ray's included."""
TRIALS = 5
LONG_S = 900.0
"""A search ends long before; one that has not by then hangs."""

SPACE = """\
name: small
workload: causal_lm
model: ./model
knobs:
  micro_batch: [1, 2, 4]
  lora_rank: [4, 8]
  precision: [fp16, fp32]
  max_length: [16, 32, 64, 96, 128]
fixed: {effective_batch: 4}
derived: {grad_accum: effective_batch // micro_batch}
"""
SEARCH = (
    "search", "--space", "small.yaml", "--gpu", "cpu", "--set", "precision=fp32", "--mode",
    "measure", "--budget", "0.2s", "--searcher", "grid", "--no-verify", "--trials", str(TRIALS),
    "--seed", "7", "--workers", "1", "--quiet",
)  # fmt: skip


class Search:
    """One results folder, and the command that is run in it as often as wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.results = folder / "results" / "small" / "cpu"
        self.journal = self.results / "trials.jsonl"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "small.yaml").write_text(SPACE)

    def start(self) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self.mark}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tuner", *SEARCH],
                cwd=self.folder,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def ended(self) -> int:
        """Whole lines of the journal."""
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def tried(self) -> list[tuple[str, str]]:
        """Configurations and outcomes, in their order. Each trial is counted once."""
        records = read_journal(self.journal).records
        assert len({record.trial_id for record in records}) == len(records)
        return [(record.configuration.key, record.outcome.status) for record in records]

    def processes(self) -> dict[int, str]:
        """What lives of the search: the command lines by process id."""
        found = {}
        for pid in marked(f"{MARK}={self.mark}"):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # it has ended meanwhile
                text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found |= {pid: text} if text else {}  # a zombie has none
        return found

    def workers(self) -> list[int]:
        """The processes that run trials."""
        return [
            pid
            for pid, text in self.processes().items()
            if text.startswith("ray::")
            and any(word in text for word in ("TrialWorker", "./model on cpu", "#"))
        ]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Search:
    """The search that nobody kills."""
    search = Search(tmp_path_factory.mktemp("k") / "calm")
    assert search.start().wait(LONG_S) == 0, search.said()
    assert search.ended() == TRIALS
    return search


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["driver", "worker"])
def test_a_search_that_is_killed_ends_as_one_that_was_not(tmp_path, calm, kind):
    broken = Search(tmp_path / "broken")
    process = broken.start()
    wanted = random.Random(7).randrange(1, TRIALS - 1)
    wait_for(lambda: broken.ended() >= wanted or process.poll() is not None, LONG_S)
    if kind == "driver":
        process.kill()
    else:
        found: list[int] = []  # a worker has this name only while it trains
        wait_for(lambda: found.extend(broken.workers()) or bool(found), LONG_S)
        os.kill(found[0], signal.SIGKILL)
    before = broken.ended()
    assert process.wait(LONG_S) == (-signal.SIGKILL if kind == "driver" else 0), broken.said()
    assert "Traceback" not in broken.said() or kind == "driver"
    # Ray's dashboard agent tries for a minute to send its last logs to a store that has gone too.
    wait_for(lambda: not broken.processes(), LONG_S)
    assert len(broken.tried()) >= before
    assert broken.start().wait(LONG_S) == 0, broken.said()
    assert broken.tried() == calm.tried()
    assert (broken.results / "report.html").exists()
