"""Kills a search at random moments and runs it again: it ends as one that was left alone.

Each point is a `tuner search` of its own, with real trials of a model of two layers on this
machine's processor. SIGKILL goes to the driver,
to the worker that runs trials, or to Ray's raylet, in turn, at a moment drawn by the seed. Then
the same command runs again, undisturbed. At each point it is checked that

- the journal can be read at once, and that what it held before is still in it, in its order;
- no process of the search is left over, and the next one is not kept out by a lock;
- the second run ends well, with each configuration tried once, in the order and with the outcomes
  of a run that was never disturbed. What is measured differs from run to run and is not compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shared_cases.tiny_model import CONFIG
from tuner.core.records import TrialRecord
from tuner.searches.journal import read_journal

ROOT = Path(__file__).parents[2]
KINDS = ("driver", "worker", "raylet")
MARK = "TUNER_KILL_POINT"
"""Environment variable by which every process of one search is found, Ray's included."""
TRIALS = 5
WITHIN_S = 900.0
"""A search ends long before; one that has not by then hangs."""
GONE_WITHIN_S = 150.0
"""Ray's processes notice within seconds that the driver has ended; its dashboard agent then tries
for a minute to send its last logs to a control store that has gone too."""

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


@dataclass(slots=True)
class Search:
    """One results folder, and the command that is run in it as often as wanted."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        (self.folder / "model").mkdir(parents=True)
        (self.folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (self.folder / "small.yaml").write_text(SPACE)

    @property
    def results(self) -> Path:
        """Where its files are."""
        return self.folder / "results" / "small" / "cpu"

    @property
    def journal(self) -> Path:
        """The truth of it."""
        return self.results / "trials.jsonl"

    def start(self) -> subprocess.Popen[bytes]:
        """The command, in a session of its own."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tuner", *SEARCH],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ended(self) -> int:
        """Whole lines of the journal."""
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def records(self) -> tuple[TrialRecord, ...]:
        """All trials so far. Raises `InputError` where the journal is not valid."""
        return read_journal(self.journal).records

    def processes(self) -> dict[int, str]:
        """What lives of the search: the command lines by process id."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if wanted in (path / "environ").read_bytes().split(b"\0"):
                        text = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if text:  # a zombie has none
                            found[int(path.name)] = text
                except (OSError, UnicodeDecodeError):
                    continue  # it has ended meanwhile, or is another user's
        return found

    def said(self) -> str:
        """The last line that the command printed."""
        lines = (self.folder / "output").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@dataclass(slots=True)
class Point:
    """What came of one kill."""

    kind: str
    at_trial: int = 0
    killed: bool = False
    exit_code: int | None = None
    ended_s: float = 0.0
    left: int = 0
    second_code: int | None = None
    problems: list[str] = field(default_factory=list)


def wait_for(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def is_kind(command: str, kind: str) -> bool:
    """Whether a command line is that of the process that a kind of point kills."""
    program = command.partition(" ")[0]
    if kind == "raylet":
        return program.endswith("/raylet")
    return program.startswith("ray::") and "Trainable" in program


def kill_one(search: Search, process: subprocess.Popen[bytes], kind: str) -> bool:
    """SIGKILL to the driver, or to the first process of the kind, as soon as there is one."""
    if kind == "driver":
        process.kill()
        return True
    found: list[int] = []

    def look() -> bool:
        found[:] = [p for p, text in search.processes().items() if is_kind(text, kind)]
        return bool(found) or process.poll() is not None

    wait_for(look, WITHIN_S)
    if not found or process.poll() is not None:
        return False
    try:
        os.kill(found[0], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def run_point(search: Search, kind: str, rng: random.Random, undisturbed: Undisturbed) -> Point:
    """Kill once, wait for the end, look at what is left, run again and compare."""
    point = Point(kind)
    process = search.start()
    trials = len(undisturbed.records)
    # Before the first trial has ended, or at some time after any but the last two have.
    point.at_trial = rng.randrange(0, trials - 1)
    if point.at_trial == 0:
        pause_s = rng.uniform(0.0, undisturbed.first_s) if kind == "driver" else 0.0
    else:
        pause_s = rng.uniform(0.0, undisturbed.trial_s)
        wait_for(lambda: search.ended() >= point.at_trial or process.poll() is not None, WITHIN_S)
    time.sleep(pause_s)
    before = search.ended()
    point.killed = kill_one(search, process, kind) and process.poll() in (None, -signal.SIGKILL)
    started_s = time.monotonic()
    try:
        point.exit_code = process.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        point.problems.append("the command hangs")
        process.kill()
        process.wait()
    point.ended_s = time.monotonic() - started_s
    if not wait_for(lambda: not search.processes(), GONE_WITHIN_S):
        left = search.processes()
        point.left = len(left)
        point.problems.append(f"left over: {sorted(left.values())}"[:300])
    check_journal(search, before, point)
    again = search.start()
    point.second_code = again.wait(WITHIN_S)
    if point.second_code != 0:
        point.problems.append(f"the second run: {search.said()}"[:200])
    wait_for(lambda: not search.processes(), GONE_WITHIN_S)
    compare(search, undisturbed, point)
    return point


def check_journal(search: Search, before: int, point: Point) -> None:
    if not search.journal.exists():
        if before:
            point.problems.append("the journal is gone")
        return
    count = len(search.records())  # raises where it is not valid
    if count < before:
        point.problems.append(f"{before - count} of {before} records are gone")
    if b"Traceback" in (search.folder / "output").read_bytes() and point.kind != "driver":
        point.problems.append("a traceback was printed")


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run that nobody killed: what it found, and how long its parts took."""

    records: tuple[TrialRecord, ...]
    first_s: float
    trial_s: float


def undisturbed(search: Search) -> Undisturbed:
    process = search.start()
    started_s = time.monotonic()
    wait_for(lambda: search.ended() > 0 or process.poll() is not None, WITHIN_S)
    first_s = time.monotonic() - started_s
    if process.wait(WITHIN_S) != 0:
        raise SystemExit(f"the undisturbed search failed: {search.said()}")
    records = search.records()
    trial_s = (time.monotonic() - started_s - first_s) / len(records)
    return Undisturbed(records, first_s, trial_s)


def compare(search: Search, other: Undisturbed, point: Point) -> None:
    records = search.records()
    tried = [record.configuration.key for record in records]
    wanted = [record.configuration.key for record in other.records]
    ids = [record.trial_id for record in records]
    if len(set(ids)) != len(ids):
        point.problems.append("a trial is counted twice")
    if tried != wanted:
        point.problems.append(f"other trials: {len(tried)} of {len(wanted)}")
    elif [r.outcome.status for r in records] != [r.outcome.status for r in other.records]:
        point.problems.append("other outcomes")
    if not (search.results / "report.html").exists():
        point.problems.append("no report")
