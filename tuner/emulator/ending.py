"""The ending of an emulated program, found from its processes' events and its devices' accounts.

The verdict does not depend on how a program reports its errors, nor on words in their texts. A
request that the device refused was recovered if the same line got less later; it was survived if
its process trained on without; else it ended that process, even if the program caught or hid the
error or exited with status 0.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    HOST = "host"
    """This machine had too little memory for the rest of the run; the device had not."""
    LATER = "later"
    """A program that began after another had trained failed: it may have needed what that made."""


@dataclass(frozen=True, slots=True)
class ProgramError:
    """The exception that the program raised: its type, its text and the program's line."""

    type: str
    message: str
    line: str | None

    @property
    def is_of_host(self) -> bool:
        """True if the processor's memory was refused, by Python, NumPy or PyTorch (c10)."""
        name = self.type.rpartition(".")[2]
        return name in ("MemoryError", "_ArrayMemoryError") or _HOST_ALLOCATOR in self.message


_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""Names itself in its errors, which have no type of their own (c10/core/impl/alloc_cpu.cpp)."""


class Afterwards(enum.StrEnum):
    """The ways in which a process goes on after a refused request."""

    RECOVERED = "recovered"
    """The same line got as much or less later: a search for the batch size."""
    SURVIVED = "survived"
    """It trained on, without what was refused."""
    FATAL = "fatal"
    """It trained no further."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request for memory that a device refused: its process, thread and line of the program.

    `line` is None where it is not known, `thread` empty for the main one, `phase` that of the run.
    """

    pid: int
    bytes: int
    afterwards: Afterwards
    line: str | None = None
    thread: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of a run, with the requests that its devices refused.

    `later` is a failure after the first steps of a whole run, which did not end it for the verdict.
    """

    ended: Ended
    error: ProgramError | None = None
    refusals: tuple[Refusal, ...] = ()
    later: ProgramError | None = None


def last_fatal(refusals: Sequence[Refusal]) -> Refusal | None:
    """The last refusal that ended a process; None if none did."""
    return next((r for r in reversed(refusals) if r.afterwards is Afterwards.FATAL), None)


def of_first_steps(ending: Ending, steps: int, wanted: int) -> Ending:
    """The ending of a whole run for its verdict, after `steps` steps, of which `wanted` were asked.

    What fails once they are done fails on made-up values, and says nothing about memory.
    """
    failed = ending.ended in {Ended.ERROR, Ended.UNSUPPORTED, Ended.CRASH}
    if not wanted or steps < wanted or not failed:
        return ending
    later = ending.error or ProgramError(str(ending.ended), "the program ended", None)
    if later.is_of_host:  # no made-up value asks for memory
        return dataclasses.replace(ending, ended=Ended.HOST)
    return dataclasses.replace(ending, ended=Ended.STEPS, error=None, later=later)


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
    refusals = tuple(_refusals(events, accounts, steps))
    fatal = last_fatal(refusals)
    if fatal is not None:
        return Ending(Ended.OOM, _refused_error(fatal, error), refusals)
    if error is not None:
        ended = Ended.LATER if steps.were_before(error) else Ended.ERROR
        return Ending(ended, _program_error(error), refusals)
    later = _later_program(events, steps) if status != 0 else None
    if later is not None:
        return Ending(Ended.LATER, _program_error(later), refusals)
    if timed_out:
        ended = Ended.TIMEOUT
    elif steps.stops:
        ended = Ended.STEPS
    elif status == 0 or (steps.has_ended and status in ABORTED):
        ended = Ended.END
    else:
        ended = Ended.CRASH if status < 0 else Ended.ERROR
    return Ending(ended, refusals=refusals)


def _refused_error(fatal: Refusal, error: Event | None) -> ProgramError:
    """The exception of a run that ran out of memory: one of another type hid the refusal."""
    if error is not None and not _is_out_of_memory(error, *error["causes"]):
        return _program_error(error)
    line = str(error["line"]) if error and error["line"] else fatal.line
    text = str(error["message"]) if error and _is_out_of_memory(error) else ""
    return ProgramError(OUT_OF_MEMORY, text, line)


def _is_out_of_memory(error: Event, *causes: str) -> bool:
    """True for PyTorch's exception, or one with it among `causes` ("type: text")."""
    types = (error["type"], *(cause.partition(":")[0] for cause in causes))
    return any(one.endswith(".OutOfMemoryError") for one in types)


def _unsupported(events: Sequence[Event], *, trained: bool) -> ProgramError | None:
    """The first thing that can't be emulated; None if everything could be."""
    for event in events:
        if event["event"] == "unsupported":
            text = f"{event['operator']} {event['why']}, which is not emulated"
            return ProgramError("unsupported", text, event["line"])
    left = not trained and any(event["event"] == "left" for event in events)
    return ProgramError("unsupported", LEFT, None) if left else None


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

    def were_before(self, error: Event) -> bool:
        """True if the program that failed began after all steps, which others took."""
        last = max((steps[-1] for steps in self._at_ns.values()), default=None)
        return last is not None and error.get("born_ns", 0) > last

    def afterwards(self, pid: int, at_ns: int) -> Afterwards:
        """The way in which this process went on after `at_ns`, if the refusal wasn't met."""
        trained = (steps[-1] > at_ns for (one, _), steps in self._at_ns.items() if one == pid)
        return Afterwards.SURVIVED if any(trained) else Afterwards.FATAL

    def went_on(self, pid: int, at_ns: int) -> bool:
        """True if this process, or a later one of the same rank, trained after `at_ns`."""
        rank = self._ranks.get(pid, "0")
        return any(
            steps[-1] > at_ns if other == pid else other_rank == rank and steps[0] > at_ns
            for (other, other_rank), steps in self._at_ns.items()
        )


def _refusals(
    events: Sequence[Event], accounts: Iterable[Account], steps: _Steps
) -> Iterator[Refusal]:
    """The refused requests in their order, those of libraries beside PyTorch last.

    PyTorch's allocator reports its own requests. The device's account has the last one of every
    library; for an expandable segment only the chunk that was refused.
    """
    recovered = {
        (event["pid"], number)
        for event in events
        if event["event"] == "result"
        for number in event.get("recovered", ())
    }
    told: dict[int, int] = {}
    for event in events:
        if event["event"] == "out_of_memory":
            pid, at_ns = event["pid"], event["at_ns"]
            told[pid] = at_ns
            is_met = (pid, event.get("number")) in recovered
            yield Refusal(
                pid,
                int(event["requested_bytes"]),
                Afterwards.RECOVERED if is_met else steps.afterwards(pid, at_ns),
                event["line"],
                event.get("thread", ""),
                event.get("phase", ""),
            )
    for one in accounts:
        if one.refused_bytes and told.get(one.pid, -1) < one.refused_ns:
            yield Refusal(one.pid, one.refused_bytes, steps.afterwards(one.pid, one.refused_ns))


def _later_program(events: Sequence[Event], steps: _Steps) -> Event | None:
    """The exception of a program that began after tuner had stopped another one."""
    stopped_ns = min(steps.stops.values(), default=None)
    if stopped_ns is None:
        return None
    errors = (e for e in events if e["event"] == "error" and e["how"] != "shown")
    return next((e for e in errors if e.get("born_ns", 0) > stopped_ns), None)


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
