"""What the ranks of a trial do in tests; see `runner_bodies` for those of one process."""

import ctypes
import os
import signal
import time
from pathlib import Path

from runner_bodies import measurement, obey_clock
from waiting import wait_for, wait_until_gone

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Measurement
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import Report
from tuner.trial.ranks import run_ranks

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 15.00 GiB"
LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection closed by peer"


class RankBody:
    """Rank `guilty` does what the knob `act` names; the others lose their peer, or go on."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """See `TrialBody`."""
        obey_clock()

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """See `TrialBody`."""
        act, guilty = str(configuration["act"]), int(str(configuration["guilty"]))
        folder = Path(str(configuration["folder"]))

        def work(rank: int, store: str, report: Report) -> Measurement:
            (folder / f"pid{rank}").write_text(str(os.getpid()))
            report({"phase": "forward"})
            if rank == guilty:
                _do(act, report, folder)
            elif act not in ("good", "invalid"):
                # As a rank that waits for another's gradients: until its connection closes.
                pid = folder / f"pid{guilty}"
                wait_for(lambda: pid.exists() and pid.read_text())
                wait_until_gone([int(pid.read_text())])
                raise RuntimeError(LOST)
            elif act == "invalid":
                raise InputError("this cannot be built")
            return measurement()

        return run_ranks(int(str(configuration["ranks"])), work, report)


def _do(act: str, report: Report, folder: Path) -> None:
    report({"phase": "backward"})
    if act == "oom":
        raise RuntimeError(OOM)
    if act == "crash":
        raise ValueError("a bug of a library")
    if act == "invalid":
        raise InputError("this cannot be built")
    if act == "segfault":
        ctypes.string_at(0)
    if act == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "exit":
        os._exit(3)
    if act == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "hangs").touch()
        time.sleep(600)


RANKS = RankBody()
