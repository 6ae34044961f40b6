"""A trial of a command on an emulated device: run some steps, and report their cost.

The processes of the command are followed by the emulator (`tuner.emulator.inside.follow`): steps
are the updates of any optimizer, and the program ends after enough of them. Its output is only
read for the samples of a step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError, UnavailableError
from tuner.core.processes import become_subreaper
from tuner.core.records import Configuration, Measurement, Memory, Source, Speed
from tuner.emulator.ending import own_fault
from tuner.space.command import Command
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.command import (
    COMMAND_TRIAL,
    LAST_LINES_S,
    LOOK_EVERY_S,
    device_name,
    end_like,
    nothing_heard,
    started,
)
from tuner.trial.command_progress import CommandProgress
from tuner.trial.command_result import Streams, required
from tuner.trial.messages import Report

EVENTS_VARIABLE = "TUNER_EMULATOR_EVENTS"
"""Environment variable with the file for reports of emulated processes (`emulator.session`)."""

STEPS = 3
"""Updates of the optimizer: the first makes its state, the second finds it, the third shows that
nothing grows."""

FEW = 2
"""From this many micro-batches per step on, gradients of one are present while the next runs: more
micro-batches change neither the memory nor the time of one."""


class EmulatedCommand:
    """Runs the job's command on an emulated device; see `TrialBody`."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Check that the program exists. Raises `UnavailableError` if it doesn't."""
        COMMAND_TRIAL.prepare(job, options)
        if options.memory_limit_bytes is not None:
            raise InputError(
                "--memory-limit stops a command on a real device",
                hint="--gpu-memory says how much memory the emulated one has",
            )

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """Run the command until it has taken `STEPS` steps, or to its end.

        If the command fails, this process ends in the same way, as in `CommandTrial.measure`.
        """
        command = job.command
        assert command is not None
        become_subreaper()
        device = device_name(options)
        report({"device": device})
        rounds = configuration.get("grad_accum")
        repeats = 1.0
        if command.is_program and options.short_steps and isinstance(rounds, int) and rounds > FEW:
            short = Configuration({**configuration, "grad_accum": FEW})
            results, heard = _run(command, short, options)
            repeats = rounds / FEW
            if not _has_rounds(results, FEW):  # it is set, and nothing shows that it has an effect
                results, heard, repeats = *_run(command, configuration, options), 1.0
        else:
            results, heard = _run(command, configuration, options)
        samples = required(heard.samples_per_line or command.samples(configuration))
        return _measurement(
            results, job, samples=samples, device=device, heard=heard, repeats=repeats
        )


EMULATED_COMMAND = EmulatedCommand()


def _run(
    command: Command, configuration: Configuration, options: MeasureOptions
) -> tuple[list[dict[str, Any]], CommandProgress]:
    """The results of the command's processes, and the progress read from its output.

    If the command fails, this process ends in the same way.
    """
    events = Path(os.environ[EVENTS_VARIABLE])
    known_bytes = events.stat().st_size
    with started(command, configuration, options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        streams = Streams((process.stdout.fileno(), process.stderr.fileno()), log=1)
        heard = CommandProgress(options, command.progress)
        until_s = None
        while until_s is None or (streams.are_open and time.monotonic() < until_s):
            for stream, data, at_s in streams.read(LOOK_EVERY_S):
                heard.take(stream, data, at_s)
            if until_s is None and process.poll() is not None:
                until_s = time.monotonic() + LAST_LINES_S
        exit_code = process.returncode
    if exit_code != 0:
        end_like(exit_code)
    results = _results(events, known_bytes)
    if not any(result["steps"] for result in results):
        raise nothing_heard(streams.tail)
    return results, heard


def _has_rounds(results: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """True if each step had `rounds` micro-batches, by the trainer's setting or the inputs seen."""
    first = results[0]
    passes = {len(shapes) for shapes in first["inputs"].values()}
    return bool(first["settings"].get("grad_accum", max(passes, default=0)) == rounds)


def _results(events: Path, known_bytes: int) -> list[dict[str, Any]]:
    """The final results of this trial's processes, in the order of their ranks.

    Raises `UnavailableError` if tuner itself failed in one of them.
    """
    with events.open("rb") as file:
        file.seek(known_bytes)
        told = [json.loads(line) for line in file.read().splitlines()]
    fault = own_fault(told)
    if fault is not None:
        raise UnavailableError(str(fault), hint="report it; the program itself went on")
    found = [event for event in told if event["event"] == "result"]
    return sorted(found, key=lambda result: int(result["rank"]))


def _measurement(
    results: Sequence[Mapping[str, Any]],
    job: TrialJob,
    *,
    samples: float,
    device: str,
    heard: CommandProgress,
    repeats: float,
) -> Measurement:
    """The emulated numbers of a command whose whole step has `repeats` times the micro-batches run.

    Raises `UnavailableError` if no time was recorded.
    """
    from tuner.emulator.step_time import step_time  # numpy, which no command needs to wait for

    uses = [use for result in results for use in result["devices"]]
    largest = max(uses, key=lambda use: int(use["peak_reserved_bytes"]))
    work = next((result["work"] for result in results if result["work"]), None)
    timed = None if work is None else step_time(work, job.gpu, profile=job.profile, repeats=repeats)
    if timed is None:
        raise UnavailableError(
            "the environment of the command lacks numpy, with which the emulator prices steps",
            hint="install numpy there",
        )
    reserved = int(largest["peak_reserved_bytes"])
    return Measurement(
        memory=Memory(
            peak_allocated_bytes=int(largest["peak_allocated_bytes"]),
            peak_reserved_bytes=reserved,
            device_bytes=reserved + job.gpu.context_bytes,
            loaded_bytes=int(largest["loaded_bytes"]),
            phase_peak_bytes=dict(largest["phase_peak_bytes"]),
            peak_phase=str(largest["peak_phase"]),
            breakdown={},
        ),
        speed=Speed(
            step_s=timed.step_s,
            it_per_s=1 / timed.step_s,
            samples_per_s=samples / timed.step_s,
            tokens_per_s=0.0,
            mfu=timed.mfu,
            breakdown_s=dict(timed.breakdown_s),
        ),
        trainable_params=int(largest["trainable_params"]),
        total_params=heard.told.get("total_params", 0),
        device=device,
        steps=max(int(result["steps"]) for result in results),
        loss_finite=True,
        source=Source.EMULATED,
        num_alloc_retries=int(largest["alloc_retries"]),
        notes=(
            "steps are updates of the optimizer",
            *([f"{FEW} micro-batches ran, and the time is that of all"] if repeats > 1 else []),
            *timed.notes,
        ),
        intervals={"step_s": timed.interval_s},
    )
