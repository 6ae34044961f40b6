"""Trials on an emulated GPU: the real training runs in processes that see an emulated device.

Everything is as in a real trial (`tuner.trial.isolated`): the same child, the same allocator, the
same errors. Memory is the allocator's own; times are estimates, and carry their interval.

Of a command, the emulator follows the processes (`tuner.emulator.inside.follow`): steps are the
updates of any optimizer, and the program ends after enough of them. Its output is only read for
the samples of a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError
from tuner.core.outcome import Ending, Raised, classify
from tuner.core.processes import oom_kills, oom_kills_since
from tuner.core.records import (
    Configuration,
    Exhausted,
    Measurement,
    Memory,
    Outcome,
    Source,
    Speed,
    Status,
)
from tuner.core.supervised import Tail
from tuner.cost.calibrate import STEP, prior_intervals
from tuner.emulator import Emulation, Machine
from tuner.emulator.emulation import FEW, STEPS
from tuner.emulator.ending import Ended
from tuner.emulator.session import Session
from tuner.trial import command
from tuner.trial.base import PLAIN, Instructions, MeasureOptions, TrialJob
from tuner.trial.command_progress import CommandProgress
from tuner.trial.isolated import IsolatedRunner, Progress, secrets_of
from tuner.trial.stop_rule import Deadline

ESTIMATED = (STEP, "tokens_per_s")
"""The estimated numbers of an emulated trial, by the names of their intervals."""

MOST_NAMED = 5
"""A note names at most this many functions."""


class EmulatedRunner(IsolatedRunner):
    """An `IsolatedRunner` whose processes have an emulated machine of their own.

    `gpus` is the number of GPUs of the machine: that of the largest trial. `environment` has
    variables for its processes in addition to those of this one. Raises `UnavailableError` if
    this machine can't emulate, and `InputError` for a GPU type that can't be emulated.
    """

    source = Source.EMULATED

    def __init__(
        self,
        job: TrialJob,
        options: MeasureOptions,
        *,
        gpus: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._session = Session(job.gpu, count=gpus)
        base = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), **(environment or {})}
        super().__init__(
            job,
            options,
            preflight=lambda options, within: True,  # no other process can use it
            answers=lambda options: None,  # it is never lost
            environment=self._session.environment(base),
        )
        self._counted: Counter[str] = Counter()

    def close(self) -> None:
        """End the warm process and all that it started, and then their machine."""
        super().close()
        self._session.close()

    def run(
        self,
        configuration: Configuration,
        instructions: Instructions = PLAIN,
        *,
        on_progress: Progress | None = None,
    ) -> Outcome:
        """See `IsolatedRunner.run`. Calls that the emulator does not know are noted."""
        before = {account.pid for account in self._session.accounts()}
        outcome = super().run(configuration, instructions, on_progress=on_progress)
        calls = Counter(self._session.unknown_calls())
        unknown, self._counted = calls - self._counted, calls
        own = [a for a in self._session.accounts() if a.pid not in before]
        if outcome.emulation is not None:
            # Only the machine counts managed memory.
            paged_bytes = max((account.managed_peak_bytes for account in own), default=0)
            memory = replace(outcome.emulation.memory, paged_bytes=paged_bytes)
            outcome = outcome.with_ran(replace(outcome.emulation, memory=memory))
        return noted(outcome, unknown)


def noted(outcome: Outcome, unknown: Counter[str]) -> Outcome:
    """`outcome` with the intervals of its times, and the calls that the emulator doesn't know."""
    emulation = outcome.emulation
    named = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(MOST_NAMED))
    more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
    text = f"called and not known to the emulator: {named}{more}"
    if emulation is None:
        if unknown and outcome.status is Status.CRASHED:
            return replace(outcome, message=f"{outcome.message}; {text}")
        return outcome
    # The times of operators are those of predictions without a profile of the device.
    prior = prior_intervals(emulation.memory, emulation.speed, method="")
    return outcome.with_ran(
        replace(
            emulation,
            intervals={**{name: prior[name] for name in ESTIMATED}, **emulation.intervals},
            notes=(*emulation.notes, text) if unknown else emulation.notes,
        )
    )


class EmulatedCommandRunner:
    """Runs the job's command on a machine with emulated GPUs; see `TrialRunner`.

    `gpus` and `environment` are as in `EmulatedRunner`. Only `interrupt` may be called from another
    thread, or from a signal handler. Raises `UnavailableError` if the program doesn't exist, and
    `InputError` for options of other trials, or a GPU type that can't be emulated.
    """

    source = Source.EMULATED

    def __init__(
        self,
        job: TrialJob,
        options: MeasureOptions,
        *,
        gpus: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command.COMMAND_TRIAL.prepare(job, options)
        if options.memory_limit_bytes is not None:
            raise InputError(
                "--memory-limit stops a command on a real device",
                hint="--gpu-memory says how much memory the emulated one has",
            )
        assert job.command is not None
        self._job, self._command, self._options = job, job.command, options
        self._machine = Machine(job.gpu, gpus, all_ranks=True, profile=job.profile)
        visible = ",".join(map(str, range(gpus)))
        self._environment = {"CUDA_VISIBLE_DEVICES": visible, **(environment or {})}
        self._interrupted = False
        self.last_log = ""
        """The last 64 KiB that the latest trial wrote to stdout and stderr."""

    def interrupt(self) -> None:
        """Give up the running trial, which then ends as `interrupted`."""
        self._interrupted = True

    def close(self) -> None:
        """End the command, if it still runs."""
        self._interrupted = True

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """See `TrialRunner.run`. Calls that the emulator does not know are noted."""
        self._interrupted = False
        started_s, kills_before = time.monotonic(), oom_kills()
        deadline = Deadline(self._options.timeout_s, started_s)
        log, found = Tail(), None
        ending = Ending(device=self._options.device)
        try:
            found, repeats = self._emulated(configuration, deadline, log)
            timed_out = found.ended is Ended.TIMEOUT
            ending = replace(
                ending,
                exit_code=found.exit_status,
                given_up=self._interrupted,
                timed_out_after_s=deadline.limit_s if timed_out else None,
            )
            if found.exit_status == 0 and not timed_out:
                measurement = self._measurement(found, configuration, log, repeats)
                ending = replace(ending, measurement=measurement.to_dict())
        except (InputError, command.NoStepsError) as error:  # the trial's own doing
            ending = replace(ending, raised=Raised.chain(error))
        ending = replace(
            ending,
            log_tail=log.text,
            oom_kills=oom_kills_since(kills_before),
            duration_s=time.monotonic() - started_s,
        )
        ending = ending.masked(secrets_of(self._job, configuration, self._environment))
        self.last_log = ending.log_tail
        outcome = classify(ending)
        return outcome if found is None else _with_findings(outcome, found)

    def _emulated(
        self, configuration: Configuration, deadline: Deadline, log: Tail
    ) -> tuple[Emulation, float]:
        """The run, and how many times its micro-batches a whole step has.

        Steps of many micro-batches are shortened, if the run shows that the setting has an effect.
        """
        rounds = configuration.get("grad_accum")
        if (
            self._command.is_program
            and self._options.short_steps
            and isinstance(rounds, int)
            and rounds > FEW
        ):
            short = Configuration({**configuration, "grad_accum": FEW})
            found = self._run(short, deadline, log, repeats=rounds / FEW)
            seen = found.settings.get("grad_accum", len(found.inputs))
            if found.generates:
                return self._run(configuration, deadline, log), 1.0
            if found.exit_status != 0 or found.steps == 0 or seen == FEW:
                return found, rounds / FEW
        return self._run(configuration, deadline, log), 1.0

    def _run(
        self, configuration: Configuration, deadline: Deadline, log: Tail, *, repeats: float = 1.0
    ) -> Emulation:
        told = command.told_variables(self._command, configuration, self._options)
        with command.words_of(self._command, configuration) as words:
            return self._machine.run(
                words,
                steps=STEPS,
                timeout_s=max(0.0, deadline.left_s(time.monotonic())),
                repeats=repeats,
                output=log,
                stopped=lambda: self._interrupted,
                cwd=Path(self._command.cwd),
                environment={**self._environment, **told},
            )

    def _measurement(
        self, found: Emulation, configuration: Configuration, log: Tail, repeats: float
    ) -> Measurement:
        """The emulated numbers of a command that ended well.

        Raises `NoStepsError` if it took no step, and `UnavailableError` if tuner itself failed in
        it, no time was recorded, or the samples of a step are unknown.
        """
        if found.own_fault is not None:
            raise UnavailableError(
                str(found.own_fault), hint="report it; the program itself went on"
            )
        if found.steps == 0:
            raise command.nothing_heard(log.text)
        if found.time is None:
            raise UnavailableError(
                "the environment of the command lacks numpy, with which the emulator prices steps",
                hint="install numpy there",
            )
        heard = CommandProgress(self._options, self._command.progress)
        heard.take(0, log.data)
        samples = command.required(heard.samples_per_line or self._command.samples(configuration))
        largest = max(found.devices, key=lambda use: use.peak_reserved_bytes)
        gpu, timed = self._job.gpu, found.time
        return Measurement(
            memory=Memory(
                peak_allocated_bytes=largest.peak_allocated_bytes,
                peak_reserved_bytes=largest.peak_reserved_bytes,
                device_bytes=found.used_bytes,
                loaded_bytes=largest.loaded_bytes,
                phase_peak_bytes=dict(largest.phase_peak_bytes),
                peak_phase=largest.peak_phase,
                breakdown={},
                paged_bytes=max(use.managed_bytes for use in found.devices),
            ),
            speed=Speed(
                step_s=timed.step_s,
                it_per_s=1 / timed.step_s,
                samples_per_s=samples / timed.step_s,
                tokens_per_s=0.0,
                mfu=timed.mfu,
                breakdown_s=dict(timed.breakdown_s),
            ),
            trainable_params=largest.trainable_params,
            total_params=heard.told.get("total_params", 0),
            device=gpu.device_names[0] if gpu.device_names else gpu.name,
            steps=found.steps,
            loss_finite=True,
            source=Source.EMULATED,
            num_alloc_retries=largest.alloc_retries,
            notes=(
                "steps are updates of the optimizer",
                *([f"{FEW} micro-batches ran, and the time is that of all"] if repeats > 1 else []),
                *timed.notes,
            ),
            intervals={"step_s": timed.interval_s},
        )


def _with_findings(outcome: Outcome, found: Emulation) -> Outcome:
    """`outcome` with the emulator's findings: memory that a command hid, calls it doesn't know."""
    if outcome.exhausted is Exhausted.DEVICE and found.ended is not Ended.OOM:
        # The log has the words, and no device refused anything for good.
        outcome = replace(outcome, status=Status.CRASHED, exhausted=None, requested_bytes=None)
    refused = found.refused
    if found.survived and outcome.status is Status.OK:
        refused = found.survived[-1]
        message = f"out of memory at {refused.line}; the command trained on without it"
    elif found.ended is Ended.OOM and outcome.status in (Status.OK, Status.CRASHED):
        where = f" at {found.error.line}" if found.error and found.error.line else ""
        message = f"out of memory{where}; the command does not show it"
    else:
        return noted(outcome, Counter(found.unknown_calls))
    return Outcome(
        Status.OOM,
        requested_bytes=refused.bytes if refused else None,
        message=message,
        duration_s=outcome.duration_s,
        exhausted=Exhausted.DEVICE,
    )
