"""Real trials, each in a process of its own, so that none can take the search down.

This side supervises and imports no torch. A warm process, started once, has imported
everything and forks one child for each trial (`tuner.trial.warm`). The exit of the child gives
back all its memory. docs/notebook/trials.md says which process ends which.
"""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Self

from tuner.core.environment import joined, masked, search_path, secret_values, your_python
from tuner.core.errors import UnavailableError
from tuner.core.nvml import DeviceLostError, UnknownDeviceError
from tuner.core.outcome import Ending, classify, signal_name, unavailable
from tuner.core.processes import end_marked, oom_kills, oom_kills_since
from tuner.core.records import Configuration, Outcome, Source, Status
from tuner.core.supervised import Helper
from tuner.trial.base import PLAIN, Instructions, MeasureOptions, TrialJob
from tuner.trial.messages import Run, Start
from tuner.trial.preflight import require_answer, wait_for_device
from tuner.trial.stop_rule import Deadline

START_WITHIN_S = 900.0
"""Importing libraries takes seconds; from a cold disk beside other work 300 were too few."""
ANSWER_WITHIN_S = 60.0
"""After a trial's time is up, the warm process has this long to end it and report that."""
FREE_WITHIN_S = 60.0
"""Memory of a killed trial may stay in use for this long, without another process to blame."""
STARTS = 2
"""A warm process that was killed while it imported is started once more: it is not the cause."""
_CLOSE_WITHIN_S = 30.0
_LOG_TAIL_BYTES = 4000

MARK = "TUNER_RUNNER"
"""Environment variable that identifies all processes of one runner."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's and scipy's linear algebra would start threads while it is imported."""

Progress = Callable[[Mapping[str, Any]], None]
Preflight = Callable[[MeasureOptions, Callable[[float], bool]], bool]


class IsolatedRunner:
    """Runs trials of one job for real; see `TrialRunner`. Not for several threads at once.

    Use it as a context manager, or close it: it keeps a warm process from the first trial on
    (or from `start`), and replaces it if it dies. Only `interrupt` may be called
    from another thread, or from a signal handler.

    `body` names what the processes do ("package.module:object", a `TrialBody`; by default the
    job says it), `preflight` is called before each trial
    (`tuner.trial.preflight.wait_for_device`) and `answers` after one that crashed: it raises
    if the device is lost. `environment` has variables for its processes in addition to those of
    this one (`tuner.core.environment`); its PYTHONPATH goes before that of this process.
    """

    source = Source.MEASURED

    def __init__(
        self,
        job: TrialJob,
        options: MeasureOptions,
        *,
        body: str | None = None,
        preflight: Preflight = wait_for_device,
        answers: Callable[[MeasureOptions], None] = require_answer,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = dict(environment or {})
        self._job = job
        self._options = options
        self._body = job.body if body is None else body
        self._preflight = preflight
        self._answers = answers
        self._warm: _Warm | None = None
        self._killed_s = -math.inf
        self._interrupted, self._interrupt = Pipe(duplex=False)
        self.last_log = ""
        """The last 64 KiB that the latest trial and its helpers wrote to stdout and stderr."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def warm_pid(self) -> int | None:
        """Process id of the warm process; None while there is none."""
        return self._warm.process.pid if self._warm is not None and self._warm.is_alive else None

    def start(self) -> None:
        """Start the warm process, if there is none, and wait until it has imported everything.

        If it is killed meanwhile, it is replaced once. Raises `TunerError` if no trial of the job
        can run here.
        """
        for left in reversed(range(STARTS)):
            try:
                self._await_warm()
                return
            except _WarmKilledError:
                if not left:
                    raise

    def _await_warm(self) -> None:
        if self._warm is not None and not self._warm.is_alive:
            self._drop_warm()
        if self._warm is None:
            paths = self._environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")
            path = joined(*paths) if any(paths) else None
            start = Start(self._job, self._options, self._body, path)
            self._warm = _Warm(start, self._environment)
        try:
            self._warm.await_ready()
        except BaseException:
            self._drop_warm()
            raise

    def run(
        self,
        configuration: Configuration,
        instructions: Instructions = PLAIN,
        *,
        on_progress: Progress | None = None,
    ) -> Outcome:
        """The outcome of a trial, however it ended; see `TrialRunner.run`.

        `on_progress` gets the facts that the trial reports, soon after each report. Raises
        `UnavailableError` if others use the device, or if the machine lacks something. An
        exception that is raised meanwhile (Ctrl-C) ends the trial and is passed on.
        """
        while self._interrupted.poll():  # it was of an earlier trial
            self._interrupted.recv_bytes()
        self.last_log = ""
        if not self._is_free():
            return classify(Ending(device=self._options.device, given_up=True))
        self.start()
        assert self._warm is not None
        try:
            ending = self._warm.run(
                Run(configuration.to_dict(), instructions),
                self._interrupted,
                self._options,
                (lambda facts: None) if on_progress is None else on_progress,
            )
        except BaseException:
            self._drop_warm()
            self._killed_s = time.monotonic()
            raise
        if ending.starter_died:
            self._drop_warm()
        if ending.exit_code in (None, -signal.SIGKILL):
            self._killed_s = time.monotonic()
        ending = ending.masked(secrets_of(self._job, configuration, self._environment))
        self.last_log = ending.log_tail
        problem = unavailable(ending)
        if problem is not None:
            raise UnavailableError(problem)
        outcome = classify(ending)
        if outcome.status in (Status.CRASHED, Status.TIMEOUT):
            self._answers(self._options)
        return outcome

    def _is_free(self) -> bool:
        """As the preflight; what may be in use by a trial that was killed is waited for."""
        while True:
            try:
                return self._preflight(
                    self._options, lambda seconds: bool(wait([self._interrupted], seconds))
                )
            except (DeviceLostError, UnknownDeviceError):
                raise
            except UnavailableError:
                if time.monotonic() > self._killed_s + FREE_WITHIN_S:
                    raise

    def interrupt(self) -> None:
        """Give up the running trial, which then ends as `interrupted`."""
        self._interrupt.send_bytes(b"x")

    def close(self) -> None:
        """End the warm process and all that it started. A later trial starts a new one."""
        self._drop_warm()

    def _drop_warm(self) -> None:
        warm, self._warm = self._warm, None
        if warm is not None:
            warm.end()


def secrets_of(
    job: TrialJob, configuration: Configuration, environment: Mapping[str, str]
) -> frozenset[str]:
    """The tokens and passwords known to a trial, which must not appear in its record."""
    own = {} if job.command is None else job.command.environment(configuration)
    return secret_values({**os.environ, **environment, **own})


class _WarmKilledError(UnavailableError):
    """A signal ended the warm process before it could run a trial."""


class _Warm(Helper):
    """The warm process as seen from here: its socket, its log, its end."""

    def __init__(self, start: Start, environment: Mapping[str, str]) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._log = os.memfd_create("tuner-warm-log")  # in memory: a disk may be full
        # A command gets the user's own environment, and imports nothing here.
        threads = {} if start.job.command is not None else ONE_THREAD
        super().__init__(
            your_python("tuner.trial.warm"),
            start,
            self._log,
            environment={
                **os.environ,
                **environment,
                "PYTHONPATH": joined(environment.get("PYTHONPATH"), search_path()),
                name: value,
                **threads,
            },
        )
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended yet."""
        return self.process.poll() is None

    def await_ready(self) -> None:
        """Wait until trials can be run. Raises `TunerError` when none can."""
        if self._is_ready:
            return
        try:
            is_late = not self.connection.poll(START_WITHIN_S)
            error = None if is_late else self.connection.recv()
        except (EOFError, ConnectionError):
            code = self.process.wait(_CLOSE_WITHIN_S)
            said = self._log_tail() or "it said nothing"
            if code < 0:
                raise _WarmKilledError(
                    f"{signal_name(-code)} ended the process that starts trials while it imported "
                    f"libraries, {STARTS} times: {said}",
                    hint="see whether memory ran out (`dmesg`); the same command goes on",
                ) from None
            raise UnavailableError(
                f"the process that starts trials ended with code {code}: {said}"
            ) from None
        if error is not None:
            raise error
        if is_late:
            raise UnavailableError(
                f"the process that starts trials was not ready after {START_WITHIN_S:g} s"
            )
        self._is_ready = True

    def run(
        self,
        trial: Run,
        interrupted: Connection[Any, Any],
        options: MeasureOptions,
        on_progress: Progress,
    ) -> Ending:
        """Run one trial; it also ends if the warm process dies or stops answering."""
        kills_before, started_s = oom_kills(), time.monotonic()
        facts: dict[str, Any] = {}
        deadline = Deadline(options.timeout_s, started_s)

        def note(new: Mapping[str, Any]) -> None:
            facts.update(new)
            deadline.hear(new, time.monotonic())
            on_progress(new)

        is_silent = False
        try:
            self.connection.send(trial)
            ending = self._listen(interrupted, deadline, note)
            if ending is not None:
                return ending
            is_silent = True
        except (EOFError, ConnectionError):
            pass  # it has ended, or is about to
        self.process.kill()
        self.process.wait()
        return Ending(
            device=options.device,
            facts=facts,
            log_tail=self._log_tail(),
            timed_out_after_s=deadline.limit_s if is_silent else None,
            starter_died=True,
            oom_kills=oom_kills_since(kills_before),
            duration_s=time.monotonic() - started_s,
        )

    def _listen(
        self, interrupted: Connection[Any, Any], deadline: Deadline, note: Progress
    ) -> Ending | None:
        """The trial's ending; None if the warm process doesn't answer in time."""
        sources = [self.connection, interrupted]
        while ready := wait(sources, max(0.0, deadline.left_s(time.monotonic()) + ANSWER_WITHIN_S)):
            if interrupted in ready:
                sources.remove(interrupted)
                self.connection.send(None)
            if self.connection in ready:
                message = self.connection.recv()
                if isinstance(message, Ending):
                    return message
                note(message)
        return None

    def end(self) -> None:
        """End the warm process and all that it started; it does so when this socket closes."""
        if self.close(_CLOSE_WITHIN_S) != 0:
            end_marked(self._mark, deadline_s=_CLOSE_WITHIN_S)
        os.close(self._log)

    def _log_tail(self) -> str:
        size = os.fstat(self._log).st_size
        data = os.pread(self._log, _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return masked(data.decode(errors="replace").strip(), secret_values(os.environ))
