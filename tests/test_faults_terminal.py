"""Terminals, pipes, encodings and folders that are not as they usually are, with real commands."""

import os
import pty
import pwd
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_samples import make_trial, write_samples
from waiting import wait_for

from tuner.app.cli import main
from tuner.core import files as scratch
from tuner.core.errors import UnavailableError
from tuner.core.processes import marked
from tuner.searches.interrupts import Interrupts
from tuner.searches.journal import JournalWriter, read_journal

ROOT = Path(__file__).parents[1]
SEARCH = (
    "search", "--space", "tiny.yaml", "--gpu", "a6000", "--where", "lora_rank >= 4",
    "--trials", "60", "--workers", "1",
)  # fmt: skip
BEST = ("best", "--space", "tiny.yaml", "--gpu", "a6000")
WITHIN_S = 240.0


@pytest.fixture
def folder(tmp_path):
    write_samples(tmp_path)
    return tmp_path


@pytest.fixture
def searched(folder):
    """With a journal of one trial."""
    with JournalWriter(folder / "results" / "tiny" / "a6000" / "trials.jsonl") as journal:
        journal.append(make_trial(folder, 8.0, 3000.0, micro_batch=2))
    return folder


def environment(**changes: str | None) -> dict[str, str]:
    """This one's; None leaves a variable out."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    return {name: value for name, value in known.items() if value is not None}


def run(folder: Path, *arguments: str, **changes: str | None):
    return subprocess.run(
        [sys.executable, "-m", "tuner", *arguments],
        cwd=folder, env=environment(**changes), capture_output=True, check=False,
    )  # fmt: skip


def trials(folder: Path) -> int:
    journal = folder / "results" / "tiny" / "a6000" / "trials.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.proof
def test_a_terminal_that_is_closed_ends_the_search_with_its_results(folder):
    """The window is closed: SIGHUP, to Ray's processes too, and whatever is printed fails."""
    ours, theirs = pty.openpty()
    mark = f"TUNER_TEST_FAMILY={folder}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", *SEARCH],
        cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(TUNER_TEST_FAMILY=str(folder), TERM="xterm"),
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        wait_for(lambda: trials(folder) >= 1 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGHUP)  # as a shell that ends does to its jobs
        assert process.wait(WITHIN_S) == 130
        wait_for(lambda: not marked(mark))
    finally:
        process.kill()
        process.wait()
    results = folder / "results" / "tiny" / "a6000"
    assert 1 <= len(read_journal(results / "trials.jsonl").records) < 60
    assert {"best.yaml", "pareto.csv", "report.html"} <= {p.name for p in results.iterdir()}


def _drain(descriptor: int) -> None:
    """Read until nothing comes any more."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        return


@pytest.mark.proof
def test_a_reader_that_goes_away_ends_the_search_quietly(folder):
    """`tuner search | head -1`"""
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", *SEARCH],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=environment(TUNER_TEST_FAMILY=str(folder)),
    )  # fmt: skip
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(WITHIN_S) == 141, said
    assert "Traceback" not in said
    wait_for(lambda: not marked(f"TUNER_TEST_FAMILY={folder}"))
    assert not (folder / "results").exists() or trials(folder) == len(
        read_journal(folder / "results" / "tiny" / "a6000" / "trials.jsonl").records
    )


class TestHangUp:
    def test_it_is_an_interruption(self, monkeypatch):
        seen = []
        interrupts = Interrupts(lambda: seen.append("first"))
        with interrupts.handled():
            os.kill(os.getpid(), signal.SIGHUP)
            assert seen == ["first"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL

    def test_under_nohup_it_stays_ignored(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            seen = []
            with Interrupts(lambda: seen.append("first")).handled():
                os.kill(os.getpid(), signal.SIGHUP)
            assert seen == []
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_what_is_started_meanwhile_never_gets_it(self):
        seen = []
        interrupts = Interrupts(lambda: seen.append("first"))
        with interrupts.handled():
            with interrupts.deferred():
                signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
                child = subprocess.Popen(["sleep", "60"])
                child.send_signal(signal.SIGHUP)
                assert seen == []  # it waits
            assert seen == ["first"]
        assert child.poll() is None
        child.kill()
        assert child.wait() == -signal.SIGKILL


@pytest.mark.proof
def test_no_home_and_nobodys_number(searched, monkeypatch, capsys):
    """As in a container that runs under a user id which has no entry."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.chdir(searched)
    for name in ("HOME", "XDG_CACHE_HOME", "TUNER_CACHE", "TUNER_PROFILES", "TUNER_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(RuntimeError):
        Path.home()
    for arguments in (BEST, ("show", *BEST[1:]), ("gpus",), ("search", *BEST[1:], "--trials", "1")):
        assert main.run(arguments) == 0, capsys.readouterr().err
    assert main.run(("calibrate",)) == 3
    assert "TUNER_PROFILES" in capsys.readouterr().err
    assert "HOME" not in os.environ


class TestTemporaryFolder:
    def test_one_that_cannot_be_made_is_an_answer(self, monkeypatch, tmp_path):
        monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
        monkeypatch.setattr(scratch, "SOCKET_ROOM", 0)
        with (
            pytest.raises(UnavailableError, match="temporary folder") as raised,
            scratch.scratch_folder(),
        ):
            pass
        assert "TMPDIR" in str(raised.value)
