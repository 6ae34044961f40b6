"""What the processes of a runner do in tests: fail in the ways that a trial can.

`PLAIN` needs no torch, so that its warm process is there at once; each of its trials does what
the knob `act` names. It reports and returns as a real body does.

No test waits for a time limit: a trial's time is up when the test, or the trial, makes the file
that `CLOCK` names. A trial waits with what must not come too early for the file of the knob
`heard`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

from tuner.core import processes
from tuner.core.errors import InputError
from tuner.core.records import Configuration, Measurement, Memory, Speed
from tuner.trial import command
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.command import _CommandTrial
from tuner.trial.messages import Report

MIB = 2**20

CLOCK = "TUNER_TEST_CLOCK"
"""Environment variable with the path of a file. While it exists, it is later by the seconds that
it holds; by an empty one, all time limits are over."""


def measurement() -> Measurement:
    memory = Memory(
        peak_allocated_bytes=3 * MIB,
        peak_reserved_bytes=4 * MIB,
        device_bytes=5 * MIB,
        loaded_bytes=2 * MIB,
        phase_peak_bytes={"load": 2 * MIB, "backward": 3 * MIB},
        peak_phase="backward",
        breakdown={"weights": 5 * MIB},
    )
    speed = Speed(0.5, it_per_s=2.0, samples_per_s=4.0, tokens_per_s=128.0, mfu=None)
    return Measurement(
        memory=memory,
        speed=speed,
        trainable_params=10,
        total_params=100,
        device="cpu",
        steps=3,
        loss_finite=True,
    )


class JumpingClock:
    """Stands in for the module `time` of a process that supervises."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def monotonic(self) -> float:
        """Ahead while the file exists, by decades if it is empty."""
        try:
            ahead_s = float(self._file.read_text() or 1e9)
        except FileNotFoundError:
            ahead_s = 0.0
        return time.monotonic() + ahead_s

    def __getattr__(self, name: str) -> object:
        """All else is the module's."""
        return getattr(time, name)


def set_ahead(clock: Path, seconds: float) -> None:
    """Let it be later by so many seconds, in one step: an empty file would mean more."""
    new = clock.with_name("new clock")
    new.write_text(str(seconds))
    new.rename(clock)


def obey_clock() -> None:
    """In the warm process: its time limits are the test's to decide, where there is a `CLOCK`."""
    if CLOCK in os.environ:
        warm = sys.modules["__main__"]
        assert {"time", "_LOOK_AGAIN_S"} <= vars(warm).keys()
        vars(warm).update(time=JumpingClock(Path(os.environ[CLOCK])), _LOOK_AGAIN_S=0.05)


class Acts:
    """One method for each way in which a trial can go."""

    def __init__(self, configuration: Configuration, report: Report) -> None:
        self._configuration = configuration
        self._report = report

    def good(self) -> Measurement:
        return measurement()

    def talk(self) -> Measurement:
        for step in range(200):
            self._report({"phase": "forward", "step": step})
        print("x" * 100_000)
        print("the last line")
        return measurement()

    def raise_it(self) -> Measurement:
        raise RuntimeError(str(self._configuration["text"]))

    def killed(self) -> Measurement:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return measurement()

    def hang(self) -> Measurement:
        """Hang, deaf to polite signals, with a family; see `family`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._report({"phase": "forward", "pids": [os.getpid(), *family()]})
        time.sleep(600)
        return measurement()

    def sleep(self) -> Measurement:
        time.sleep(600)
        return measurement()

    def leave_family(self) -> Measurement:
        """End well, but leave processes behind."""
        self._report({"pids": family()})
        return measurement()

    def kill_parent(self) -> Measurement:
        self._report({"pids": [os.getpid(), *family()]})
        self._wait_until_heard()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
        return measurement()

    def stop_parent(self) -> Measurement:
        """The warm process falls silent; the trial goes on for ever."""
        self._report({"pids": [os.getpid()]})
        self._wait_until_heard()
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)
        return measurement()

    def _wait_until_heard(self) -> None:
        while not Path(str(self._configuration["heard"])).exists():
            time.sleep(0.01)

    def share_memory(self) -> Measurement:
        """A segment that somebody must remove: the tracker, a helper process, does."""
        segment = shared_memory.SharedMemory(create=True, size=MIB)
        self._report({"segment": segment.name})
        return self.killed() if self._configuration["killed"] else self.sleep()

    def leave_files(self) -> Measurement:
        """End well; a temporary folder and shared memory stay, of a helper that ended, too."""
        folder = tempfile.mkdtemp()
        mapped = Path("/dev/shm", f"tuner-test-{os.getpid()}")
        self._held = mapped.open("w")
        helper = os.fork()
        if helper == 0:
            Path("/dev/shm", f"torch_{os.getpid()}_1_0").touch()
            self._wait_until_heard()
            os._exit(0)
        self._report({"made": [folder, str(mapped), f"/dev/shm/torch_{helper}_1_0"]})
        os.waitpid(helper, 0)
        return measurement()

    def eat(self) -> Measurement:
        """Take memory without a limit of its own, until the kernel says no."""
        self._report({"phase": "load"})
        held = []
        while True:
            held.append(b"x" * MIB)

    def environment(self) -> Measurement:
        self._report({"environment": dict(os.environ), "session": os.getsid(0)})
        self._report({"adjustment": Path("/proc/self/oom_score_adj").read_text().strip()})
        self._report({"open": sorted(p.name for p in Path("/proc/self/fd").iterdir())})
        return measurement()


def family() -> list[int]:
    """A helper in the trial's own group, one in a session of its own, and a daemon."""
    code = "import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    helper = subprocess.Popen([sys.executable, "-c", code])
    escaped = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    read, write = os.pipe()
    if os.fork() == 0:  # the daemon's parent ends at once
        os.setsid()
        daemon = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        os.write(write, f"{daemon.pid}\n".encode())
        os._exit(0)
    daemon_pid = int(os.read(read, 100))
    return [helper.pid, escaped.pid, daemon_pid]


class SlowlyEnded(_CommandTrial):
    """A command is given two minutes to clean up."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        super().prepare(job, options)
        command.END_WITHIN_S = 120.0


class QuicklyEnded(_CommandTrial):
    """A command is given no time to clean up."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        super().prepare(job, options)
        command.END_WITHIN_S = 0.1


class Plain:
    """See the module."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        print("prepared")
        obey_clock()
        if job.model == "impossible":
            raise InputError("model 'impossible' is not one", hint="take another")
        if job.model == "dies":
            os.write(2, b"a library failed\n")
            os._exit(9)
        if job.model.startswith("killed:"):  # the first time, or each time
            mark = Path(job.model.removeprefix("killed:"))
            if not mark.is_file():
                if not mark.is_dir():
                    mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if job.model == "patient":  # helpers need more than a moment on a busy machine
            processes.GRACE_S = 120.0
        self.imported_in = os.getpid()
        if job.model == "native":  # a thread that Python did not start
            libc = ctypes.CDLL(None)
            pause = ctypes.cast(libc.pause, ctypes.c_void_p)
            assert libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, pause, None) == 0
        if job.model == "threads":
            threading.Thread(target=time.sleep, args=(600,), name="sleeper", daemon=True).start()

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        if "hangs_forked" in configuration:
            is_fork = os.getpid() != self.imported_in
            report({"is_fork": is_fork})
            if is_fork:
                set_ahead(Path(os.environ[CLOCK]), 30.0)
                time.sleep(600)
        act = getattr(Acts(configuration, report), str(configuration["act"]))
        result: Measurement = act()
        return result


PLAIN = Plain()
SLOWLY_ENDED, QUICKLY_ENDED = SlowlyEnded(), QuicklyEnded()
