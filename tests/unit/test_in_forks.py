"""Processes that compute predictions end at once when nobody wants the predictions any more."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
from waiting import wait_for, wait_until_gone

from tuner.core.errors import UnavailableError
from tuner.predict.compiling import in_forks

FOREVER_S = 20.0


def compute(folder: Path, item: int) -> int:
    """Begins, and takes too long."""
    (folder / str(os.getpid())).touch()
    time.sleep(FOREVER_S)
    (folder / "done").touch()
    return item


def begun(folder: Path) -> list[int]:
    """The two processes, once both compute."""
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    return [int(path.name) for path in folder.iterdir()]


def test_an_interrupt_ends_the_processes_at_once(tmp_path):
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def interrupt_soon() -> None:
        begun(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=interrupt_soon)
    try:
        computed = in_forks(compute, [1, 2], tmp_path, workers=2, traces=False)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(computed)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert not any(Path(f"/proc/{path.name}").exists() for path in tmp_path.iterdir())
    assert not (tmp_path / "done").exists()


def end_itself(_: None, item: tuple[int, int]) -> int:
    """What `ray job stop` does to each process of a job, or the kernel without memory."""
    number, sent = item
    os.kill(os.getpid(), sent)
    return number


def test_sigterm_to_every_process_of_a_job_loses_no_work():
    items = [(1, int(signal.SIGTERM)), (2, int(signal.SIGINT))]
    found = in_forks(end_itself, items, None, workers=2, traces=False)
    assert sorted(result for _, result in found) == [1, 2]


def test_a_killed_process_is_said():
    items = [(1, int(signal.SIGKILL)), (2, 0)]
    with pytest.raises(UnavailableError, match="was killed, most likely for lack of memory"):
        list(in_forks(end_itself, items, None, workers=2, traces=False))


PARENT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_in_forks import compute
from tuner.predict.compiling import in_forks
folder = Path(sys.argv[1])
list(in_forks(compute, [1, 2], folder, workers=2, traces=False))
"""


def test_they_end_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), *sys.path])
    try:
        pids = begun(tmp_path)
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(pids)
