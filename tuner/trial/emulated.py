"""Trials on an emulated GPU: the real training runs in processes that see an emulated device.

Everything is as in a real trial (`tuner.trial.isolated`): the same child, the same allocator, the
same errors. Memory is the allocator's own; times are estimates, and carry their interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tuner.core.records import Configuration, Outcome, Source, Status
from tuner.cost.calibrate import STEP, prior_intervals
from tuner.emulator.session import Session
from tuner.trial.base import PLAIN, Instructions, MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner, Progress

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
            preflight=_is_free,
            answers=_always,
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
        unknown = self._unknown_calls()
        own = [a for a in self._session.accounts() if a.pid not in before]
        if outcome.emulation is not None:
            # Only the machine counts managed memory.
            paged_bytes = max((account.managed_peak_bytes for account in own), default=0)
            memory = replace(outcome.emulation.memory, paged_bytes=paged_bytes)
            outcome = outcome.with_ran(replace(outcome.emulation, memory=memory))
        return noted(outcome, unknown)

    def _unknown_calls(self) -> Counter[str]:
        """Calls of functions that the emulator does not know, since the last time."""
        now = Counter(self._session.unknown_calls())
        new, self._counted = now - self._counted, now
        return new


def _is_free(options: MeasureOptions, within: object) -> bool:
    """An emulated device is always free: no other process can use it."""
    return True


def _always(options: MeasureOptions) -> None:
    """An emulated device is never lost."""


def noted(outcome: Outcome, unknown: Counter[str]) -> Outcome:
    """`outcome` with the intervals of its times, and the calls that the emulator doesn't know."""
    emulation, text = outcome.emulation, _unknown_text(unknown)
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


def _unknown_text(unknown: Counter[str]) -> str:
    """The names of unknown functions, with the number of their calls."""
    named = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(MOST_NAMED))
    more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
    return f"called and not known to the emulator: {named}{more}"
