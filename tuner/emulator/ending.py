"""The ending of an emulated program, found from its processes' events and its devices' accounts.

The verdict does not depend on how a program reports its errors. If the device refuses a request
and the process takes no further step, it ran out of memory, even if the program caught or hid the
error or exited with status 0.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.core.outcome import is_out_of_memory
from tuner.emulator.here import TIMEOUT
from tuner.emulator.session import Account

OUT_OF_MEMORY = "torch.OutOfMemoryError"
"""The error type of every run that ran out of memory, whatever the program raised."""

LEFT = "the program left the emulator: Python's options -I and -E ignore it; start it without"
"""A process loaded PyTorch's CUDA libraries without the emulator's (device/start.c)."""

ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)
"""PyTorch ends a program so, itself or in a shell, if a thread runs on after the interpreter."""

Event = Mapping[str, Any]
"""An event that a process of the program sent (`tuner.emulator.inside.failing.send`)."""


class Ended(enum.StrEnum):
    """The ways in which the run of a program can end."""

    STEPS = "steps"
    """It took the requested number of steps and was stopped."""
    END = "end"
    """It ended by itself with exit status 0."""
    TIMEOUT = "timeout"
    """It was stopped by `--timeout`."""
    OOM = "oom"
    """The device refused memory, and the program trained no further."""
    ERROR = "error"
    """It raised an exception, or ended with another exit status."""
    CRASH = "crash"
    """A signal ended it."""
    UNSUPPORTED = "unsupported"
    """It read a value that the emulator can neither compute nor replace."""
    FAULT = "fault"
    """tuner's own code failed inside the program."""


@dataclass(frozen=True, slots=True)
class ProgramError:
    """The exception that the program raised: its type, its text and the program's line."""

    type: str
    message: str
    line: str | None


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of a run; `refused_bytes` is the request that ran out of memory, or 0.

    `refused_in` is the phase of the run in which it did, as far as it is known. `later` is a
    failure after the first steps of a whole run, which did not end it for the verdict.
    """

    ended: Ended
    error: ProgramError | None = None
    refused_bytes: int = 0
    refused_in: str = ""
    later: ProgramError | None = None


def of_first_steps(ending: Ending, steps: int, wanted: int) -> Ending:
    """The ending of a whole run for its verdict, after `steps` steps, of which `wanted` were asked.

    What fails once they are done fails on made-up values, and says nothing about memory.
    """
    failed = ending.ended in {Ended.ERROR, Ended.UNSUPPORTED, Ended.CRASH}
    if not wanted or steps < wanted or not failed:
        return ending
    later = ending.error or ProgramError(str(ending.ended), "the program ended", None)
    return Ending(Ended.STEPS, later=later)


def find_ending(
    events: Sequence[Event], accounts: Iterable[Account], status: int, *, timed_out: bool = False
) -> Ending:
    """The ending of a run with the exit status `status`, as in `subprocess`."""
    if any(event["event"] == "fault" for event in events):
        return Ending(Ended.FAULT)
    steps = _Steps(events)
    if (unsupported := _unsupported(events, trained=steps.any)) is not None:
        return Ending(Ended.UNSUPPORTED, unsupported)
    timed_out = timed_out or TIMEOUT in steps.stops
    # Errors after tuner stopped the program are not failures of the program.
    error = _error(events, steps, failed=status != 0 and not (timed_out or steps.stops))
    refusal = _refusal(events, accounts, steps)
    if refusal is not None:
        line, size, phase = refusal
        if error is None or _is_memory(error):
            line = str(error["line"]) if error and error["line"] else line
            text = str(error["message"]) if error and _is_memory(error, causes=False) else ""
            return Ending(Ended.OOM, ProgramError(OUT_OF_MEMORY, text, line), size, phase)
        return Ending(Ended.OOM, _program_error(error), size, phase)
    if error is not None:
        ended = Ended.OOM if _is_memory(error, causes=False) else Ended.ERROR
        return Ending(ended, _program_error(error))
    return Ending(Ended.TIMEOUT if timed_out else _without_error(steps, status))


def _unsupported(events: Sequence[Event], *, trained: bool) -> ProgramError | None:
    """The first thing that can't be emulated; None if everything could be."""
    for event in events:
        if event["event"] == "unsupported":
            text = f"{event['operator']} {event['why']}, which is not emulated"
            return ProgramError("unsupported", text, event["line"])
    left = not trained and any(event["event"] == "left" for event in events)
    return ProgramError("unsupported", LEFT, None) if left else None


def _without_error(steps: _Steps, status: int) -> Ended:
    if steps.stops:
        return Ended.STEPS
    if steps.has_ended and status in ABORTED:
        return Ended.END
    return Ended.CRASH if status < 0 else Ended.ERROR if status else Ended.END


class _Steps:
    """The times of each process's optimizer steps, and when and why tuner stopped the program."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.stops = {
            event["reason"]: event["at_ns"]
            for event in reversed(events)
            if event["event"] == "result" and event["reason"] in (Ended.STEPS, TIMEOUT)
        }
        self.has_ended = any(
            event["event"] == "result" and event["reason"] == Ended.END for event in events
        )
        """True if a process came to its own end, after which only the interpreter's follows."""
        self._at_ns: dict[tuple[int, str], list[int]] = {}
        self._ranks = {event["pid"]: str(event["rank"]) for event in events}
        for event in events:
            if event["event"] == "step":
                process = event["pid"], self._ranks[event["pid"]]
                self._at_ns.setdefault(process, []).append(event["at_ns"])

    @property
    def any(self) -> bool:
        """True if any process trained."""
        return bool(self._at_ns)

    def went_on(self, pid: int, at_ns: int) -> bool:
        """True if this process, or a later one of the same rank, trained after `at_ns`."""
        rank = self._ranks.get(pid, "0")
        return any(
            steps[-1] > at_ns if other == pid else other_rank == rank and steps[0] > at_ns
            for (other, other_rank), steps in self._at_ns.items()
        )


def _refusal(
    events: Sequence[Event], accounts: Iterable[Account], steps: _Steps
) -> tuple[str | None, int, str] | None:
    """The line, the size and the phase of the last request that ended the run; None if none did.

    PyTorch's allocator reports its own requests. The device's account has the requests of every
    library, but for an expandable segment only the chunk that was refused.
    """
    told = [
        (event["line"], int(event["requested_bytes"]), str(event.get("phase", "")))
        for event in events
        if event["event"] == "out_of_memory" and not steps.went_on(event["pid"], event["at_ns"])
    ]
    refused = [
        one.refused_bytes
        for one in accounts
        if one.refused_bytes and not steps.went_on(one.pid, one.refused_ns)
    ]
    if told:
        return told[-1]
    return (None, max(refused), "") if refused else None


def _error(events: Sequence[Event], steps: _Steps, *, failed: bool) -> Event | None:
    """The exception that ended the training, if any.

    Processes that use the device come before their launchers, and the first failure before the
    failures that follow from it. If a program failed and no other exception is known, one that was
    only printed counts.
    """
    errors = [
        event
        for event in events
        if event["event"] == "error"
        and not any(event["at_ns"] > at_ns for at_ns in steps.stops.values())
        and not steps.went_on(event["pid"], event["at_ns"])
    ]
    ended = [event for event in errors if event["how"] != "shown"]
    if not failed:
        ended = [event for event in ended if event["on_device"]]
        errors = []
    return min(
        ended or errors, key=lambda event: (not event["on_device"], event["at_ns"]), default=None
    )


def _program_error(event: Event) -> ProgramError:
    return ProgramError(event["type"], event["message"], event["line"])


def _is_memory(event: Event, *, causes: bool = True) -> bool:
    texts = [f"{event['type']}: {event['message']}", *(event["causes"] if causes else ())]
    return any(map(is_out_of_memory, texts))


@dataclass(frozen=True, slots=True)
class OwnFault:
    """A failure of tuner's own code while `reading` something; the program ran on without it.

    `type` and `message` describe the exception, and `line` is a line of tuner.
    """

    type: str
    message: str
    line: str | None
    reading: str

    def __str__(self) -> str:
        where = f" at tuner's {self.line}" if self.line else ""
        return f"tuner itself failed{where}, reading {self.reading}: {self.type}: {self.message}"


def own_fault(events: Iterable[Mapping[str, Any]]) -> OwnFault | None:
    """The first fault among the events of a session, or None."""
    names = [field.name for field in dataclasses.fields(OwnFault)]
    faults = (event for event in events if event["event"] == "fault")
    return next((OwnFault(**{name: one[name] for name in names}) for one in faults), None)
