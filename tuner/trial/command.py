"""A trial of a command: run it, read its output, stop it after enough steps.

The process of the trial does this instead of training by itself. It needs no torch. The command
has its own session and process group; processes left when the trial ends are ended like all
helpers of a trial (docs/notebook/trials.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.core import nvml
from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import InputError, UnavailableError
from tuner.core.host import TreeMemory, cpu_name, find_program
from tuner.core.outcome import is_out_of_memory
from tuner.core.processes import become_subreaper, die_with, end_like, read_pipe
from tuner.core.records import Configuration, Measurement, Memory, Speed
from tuner.core.supervised import Tail
from tuner.core.units import format_gib
from tuner.program.changes import change
from tuner.program.launch import runnable
from tuner.program.program import read_program
from tuner.program.settings import settings_of
from tuner.space.command import Command
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.command_progress import CommandProgress
from tuner.trial.messages import Report
from tuner.trial.stop_rule import NEEDED_S


@dataclass(frozen=True, slots=True)
class _Rate:
    """The speed, a note on its source, and the other results of the timed steps."""

    step_s: float
    samples_per_s: float
    tokens_per_s: float = 0.0
    interval: tuple[float, float] | None = None
    steps: int = 0
    note: str = ""


def measurement_of(
    heard: CommandProgress,
    memory: TreeMemory,
    *,
    device: str,
    options: MeasureOptions,
    samples_per_step: float | None,
) -> Measurement:
    """The measurement, with notes on the differences from tuner's own trials.

    Unknown parameter counts are 0, and so is an unknown token rate. Raises `UnavailableError` if
    the number of samples in a step is unknown.
    """
    rate = _rate(heard, samples_per_step)
    allocated = heard.told.get("allocated_bytes", 0) or memory.peak_bytes
    reserved = max(allocated, heard.told.get("reserved_bytes", 0) or memory.peak_bytes)
    notes = [rate.note, _memory_note(heard, memory, options)]
    return Measurement(
        memory=Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            device_bytes=max(memory.peak_bytes, reserved),
            loaded_bytes=0,
            phase_peak_bytes={},
            peak_phase="",
            breakdown={},
        ),
        speed=Speed(
            step_s=rate.step_s,
            it_per_s=1 / rate.step_s,
            samples_per_s=rate.samples_per_s,
            tokens_per_s=rate.tokens_per_s,
            mfu=None,
        ),
        trainable_params=heard.told.get("trainable_params", 0),
        total_params=heard.told.get("total_params", 0),
        device=device,
        steps=rate.steps,
        loss_finite=heard.loss_finite,
        warmup_steps=options.warmup_steps,
        samples_per_s_interval=rate.interval,
        stopped_by=heard.stopped_by or "end",
        nvml_process_bytes=None if options.device == "cpu" else memory.peak_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        notes=tuple(filter(None, notes)),
    )


def _rate(heard: CommandProgress, samples_per_step: float | None) -> _Rate:
    timer, summary = heard.timer, heard.summary
    if timer is not None:
        told = timer.samples / timer.steps if heard.is_tagged else None
        samples = told or required(samples_per_step)
        interval = timer.interval
        return _Rate(
            interval.mean_s,
            samples / interval.mean_s,
            timer.tokens / timer.total_s,
            interval.rates(samples),
            round(timer.steps),
            "" if heard.is_tagged else "steps are those of its progress bar",
        )
    if summary is not None and summary.steps_per_s > 0:
        note = "speed is the Trainer's own mean over the whole run, warm-up included"
        return _Rate(1 / summary.steps_per_s, summary.samples_per_s, note=note)
    assert heard.printed_rate is not None  # the caller has looked
    step_s = 1 / heard.printed_rate
    note = "speed is what its progress bar printed last, warm-up included"
    return _Rate(step_s, required(samples_per_step) / step_s, note=note)


def required(samples_per_step: float | None) -> float:
    """The samples of a step. Raises `UnavailableError` if their number is unknown."""
    if samples_per_step is None:
        raise UnavailableError(
            "the command's progress bar counts steps, but the samples in a step are unknown",
            hint="write samples_per_step into the space, such as samples_per_step: micro_batch, "
            'or have the command print tuner: {"samples": 8} after each step',
        )
    return samples_per_step


def _memory_note(heard: CommandProgress, memory: TreeMemory, options: MeasureOptions) -> str:
    if options.device == "cpu":
        return "memory is that of all processes of the command, libraries included"
    note = "" if "allocated_bytes" in heard.told else (
        "what PyTorch allocates is not known: device memory stands in"
    )  # fmt: skip
    if memory.is_of_device:
        text = "the driver does not name processes: memory is everything added to the GPU"
        return "; ".join(filter(None, (note, text)))
    return note


_TAIL_BYTES = 16 * 1024


class _Streams:
    """Several pipes read together; their data is also written to the descriptor `log`.

    `tail` is the end of all streams together.
    """

    def __init__(self, descriptors: tuple[int, ...], *, log: int) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        self.tail = Tail(most=_TAIL_BYTES)

    @property
    def are_open(self) -> bool:
        """True if at least one stream may still send data."""
        return bool(self._selector.get_map())

    def read(self, within_s: float) -> list[tuple[int, bytes, float]]:
        """The data that arrives within the time: (descriptor, bytes, monotonic time of arrival)."""
        if not self.are_open:
            time.sleep(within_s)
            return []
        chunks = []
        for key, _ in self._selector.select(within_s):
            data = read_pipe(key.fd)
            if not data:
                self._selector.unregister(key.fd)
                continue
            chunks.append((key.fd, data, time.monotonic()))
            self.tail.add(data)
            while data:
                data = data[os.write(self._log, data) :]
        return chunks


TRIAL = "TUNER_TRIAL"
"""Environment variable that tells a command that it runs in a trial: JSON of `trial_facts`."""

END_WITHIN_S = 3.0
"""From SIGTERM, which lets launchers end their workers, to SIGKILL."""
LOOK_EVERY_S = 0.05
"""Interval for reading a command's output and its memory."""
LAST_LINES_S = 0.5
"""The last output is read for this long: a process left by the command may keep it open."""
_LAST_LOG_CHARS = 3000


class _CommandTrial:
    """Runs the job's command; see `TrialBody`."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Check that the program exists. Raises `UnavailableError` if it doesn't."""
        command = _command(job)
        if not Path(command.cwd).is_dir():
            raise UnavailableError(f"there is no folder {command.cwd!r} to run the command in")
        program = command.argv[0]
        if command.is_program:
            read_program(command.argv, Path(command.cwd))
        elif "{" not in program and _program(program, command.cwd) is None:
            raise UnavailableError(
                f"there is no program {program!r} to run",
                hint="name one on the PATH, or by its path from the folder of the space file",
            )
        if options.weights != "synthetic":
            raise InputError("--weights is for models that tuner loads; here a command does")
        if options.lengths != "full":
            raise InputError("--lengths is for data that tuner makes; here a command reads its own")

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """Run the command until enough steps were timed, or to its end.

        If the command fails, this process ends in the same way, so that its ending is classified
        like that of any trial.
        """
        command = _command(job)
        become_subreaper()  # descendants whose parent has ended are still counted
        samples_per_step = command.samples(configuration)
        if options.gpu_index is None:
            device = cpu_name()
        elif (identity := nvml.device_identity(options.gpu_index)) is not None:
            device = identity.name
        else:
            raise UnavailableError(f"no NVIDIA driver works for {options.device}")
        report({"device": device})
        memory = TreeMemory(os.getpid(), options.gpu_index)
        with _started(command, configuration, options) as process:
            heard = CommandProgress(options, command.progress)
            listener = _Listener(process, heard, memory, options)
            exit_code = listener.listen(samples_per_step, report)
        if exit_code is not None and exit_code != 0:
            end_like(exit_code)
        if exit_code == 0 and not heard.has_rate:
            raise nothing_heard(listener.streams.tail.text)
        return measurement_of(
            heard, memory, device=device, options=options, samples_per_step=samples_per_step
        )


COMMAND_TRIAL = _CommandTrial()


class NoStepsError(Exception):
    """The command succeeded, but its output mentions no steps."""


def trial_facts(options: MeasureOptions) -> dict[str, float]:
    """The end conditions of a trial (`MeasureOptions`), for code that stops by itself."""
    return {
        "warmup_steps": options.warmup_steps,
        "min_steps": options.min_steps,
        "relative_error": options.relative_error,
        "budget_s": options.budget_s,
    }


class _Listener:
    """Reads what the command prints and watches its memory, until it ends or is ended."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        heard: CommandProgress,
        memory: TreeMemory,
        options: MeasureOptions,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._heard, self._memory = process, heard, memory
        self._limit_bytes = options.memory_limit_bytes if options.device != "cpu" else None
        self.streams = _Streams((process.stdout.fileno(), process.stderr.fileno()), log=1)

    def listen(self, samples_per_step: float | None, report: Report) -> int | None:
        """The exit code of the command; None if it was stopped after enough steps.

        After the first timed step, it reports how long timing may take.
        """
        told_pace = False
        while self._process.poll() is None:
            self._read(LOOK_EVERY_S)
            used_bytes = self._memory.look()
            if self._limit_bytes is not None and used_bytes > self._limit_bytes:
                self._stop()
                raise MemoryError(
                    f"GPU out of memory: the command holds {format_gib(used_bytes)}, and may use "
                    f"{format_gib(self._limit_bytes)}"
                )
            needed_s = self._heard.needed_s
            if needed_s is not None and not told_pace:
                report({NEEDED_S: needed_s})
                told_pace = True
            self._heard.judge(self._memory.peak_bytes, samples_per_step)
            if self._heard.stopped_by is not None:
                self._memory.look(now=True)
                self._stop()
                return None
        until_s = time.monotonic() + LAST_LINES_S
        while self.streams.are_open and time.monotonic() < until_s:
            if not self._read(LOOK_EVERY_S):
                break
        return self._process.returncode

    def _read(self, within_s: float) -> bool:
        """Read the output that arrives within the time; True if there was any."""
        chunks = self.streams.read(within_s)
        for stream, data, at_s in chunks:
            self._heard.take(stream, data, at_s)
        return bool(chunks)

    def _stop(self) -> None:
        """End the group of the command, kindly first; what it prints meanwhile goes to the log."""
        until_s = time.monotonic() + END_WITHIN_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < until_s:
            self.streams.read(LOOK_EVERY_S)
        if self._process.poll() is None:
            # Not reaped: the id still means the command, and its group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def _started(
    command: Command, configuration: Configuration, options: MeasureOptions
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, running in a session of its own; it ends with this process.

    Raises `UnavailableError` if it can't be run.
    """
    parent = os.getpid()

    def settle() -> None:
        die_with(parent)
        if options.device == "cpu" and options.memory_limit_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (options.memory_limit_bytes, hard))

    with words_of(command, configuration) as arguments:
        environment = {**os.environ, **told_variables(command, configuration, options)}
        program = _program(arguments[0], command.cwd, environment.get("PATH"))
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
                [program or arguments[0], *arguments[1:]],
                cwd=command.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=settle,  # noqa: PLW1509 - this process has one thread
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UnavailableError(f"{arguments[0]!r} cannot be run: {error.strerror}") from error
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def words_of(command: Command, configuration: Configuration) -> Iterator[list[str]]:
    """The words that start the command with the values of `configuration`.

    A program gets them in copies of its own settings, which are gone when the block ends.
    """
    if not command.is_program:
        yield command.arguments(configuration)
        return
    program = read_program(command.argv, Path(command.cwd))
    settings = settings_of(program)
    values = {name: value for name, value in configuration.items() if name in PROGRAM_NAMES}
    with runnable(change(settings, values).after) as words:
        yield words


def told_variables(
    command: Command, configuration: Configuration, options: MeasureOptions
) -> dict[str, str]:
    """The environment variables of a trial's command; some make its output arrive at once."""
    return {
        TRIAL: json.dumps(trial_facts(options)),
        "PYTHONUNBUFFERED": "1",
        # Its own default. This program is quieter, and Trainer shows no progress bar then.
        "TRANSFORMERS_VERBOSITY": "warning",
        **command.environment(configuration),
    }


def nothing_heard(log_tail: str) -> Exception:
    """The exception for a command that exited with 0 before it reported a step."""
    end = log_tail[-_LAST_LOG_CHARS:]
    if is_out_of_memory(end):
        return NoStepsError(f"the command ended, and its log says: {end}")
    lines = " | ".join(line.strip() for line in end.splitlines()[-5:] if line.strip())
    text = (
        "the command ended without reporting enough steps: print a line "
        'such as tuner: {"samples": 8} after each, or show a tqdm bar, and train longer'
    )
    return NoStepsError(f"{text}; its log ends: {lines}" if lines else text)


def _command(job: TrialJob) -> Command:
    assert job.command is not None
    return job.command


def _program(name: str, cwd: str, path: str | None = None) -> str | None:
    return find_program(str(Path(cwd, name)) if "/" in name else name, path)
