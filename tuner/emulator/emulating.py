"""Runs a program on emulated GPUs and returns the result."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tuner.core.errors import InputError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.host import find_program
from tuner.core.records import MemoryBudget
from tuner.core.supervised import (
    ProgramEnd,
    ProgramTask,
    Tail,
    run_supervised,
)
from tuner.emulator.emulation import (
    EmulatedAllocation,
    EmulatedDeviceUse,
    Emulation,
    unknown_values,
)
from tuner.emulator.ending import find_ending, own_fault
from tuner.emulator.here import DEVICE_VARIABLE, TELL_SIGNAL
from tuner.emulator.session import Account, Session
from tuner.emulator.step_time import EmulatedStepTime, step_time
from tuner.emulator.toolchain import find_torch

ROOM = 8
"""A program that does not fit runs again on a GPU with this many times the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateOptions:
    """Options of an emulated run, such as the number of GPUs and of optimizer steps.

    On several GPUs, one process stands for all ranks that the program starts, unless `all_ranks`.
    `gpus` counts the GPUs of each machine, `machines` the machines that the launcher reports.
    """

    gpus: int = 1
    machines: int = 1
    all_ranks: bool = False
    steps: int = 3
    seed: int = 0
    margin_fraction: float | None = None
    snapshot: Path | None = None
    timeout_s: float | None = None


def emulate(
    command: Sequence[str],
    gpu: Gpu,
    options: EmulateOptions,
    *,
    output: IO[Any] | Tail | None = None,
    stopped: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
) -> Emulation:
    """Run `command` on emulated GPUs until it ends or has taken enough optimizer steps.

    The program's output goes to `output`, by default to this process's own output. Its standard
    input is empty. It is ended once `stopped` returns True, and all its processes have ended when
    this returns or raises. Raises `InputError` for a command that does not exist, and
    `UnavailableError` if nothing can be emulated.
    """
    program = find_program(command[0])
    if program is None:
        raise InputError(f"there is no program {command[0]!r}", hint="name one that is on PATH")
    torch = find_torch(interpreter_of(program))
    settings: dict[str, Any] = {"steps": options.steps, "machines": options.machines}
    if options.machines > 1 and options.all_ranks:
        raise UnavailableError(
            f"the ranks of {options.machines} machines cannot all run on this one",
            hint="leave --all-ranks out: rank 0 stands for all",
        )
    if options.snapshot is not None:
        settings["snapshot"] = str(options.snapshot.absolute())
    started = time.monotonic()
    with Session(
        gpu,
        count=options.gpus,
        torch=torch,
        seed=options.seed,
        one_rank=options.gpus * options.machines > 1 and not options.all_ranks,
        settings=settings,
    ) as session:
        end = _run([program, *command[1:]], session, options, output, stopped, cwd)
        events = list(session.events())
        accounts = session.accounts()
        unknown = session.unknown_calls()
    results = [event for event in events if event["event"] == "result"]
    time_of_step = _slowest(results, gpu)
    ending = find_ending(events, accounts, end.exit_status, timed_out=end.stopped_by == "timeout")
    return Emulation(
        command=tuple(command),
        gpu=gpu,
        gpus=options.gpus,
        torch=torch.version,
        cuda=".".join(map(str, torch.cuda)),
        ended=ending.ended,
        steps=max((r["steps"] for r in results), default=0),
        margin_bytes=MemoryBudget.of(gpu.memory_bytes, options.margin_fraction).margin_bytes,
        exit_status=end.exit_status,
        devices=tuple(_uses(results, accounts)),
        error=ending.error,
        refused_bytes=ending.refused_bytes,
        unknown_calls=unknown,
        unknown_values=unknown_values(results),
        duration_s=time.monotonic() - started,
        time=time_of_step,
        stands_for=max((r["stands_for"] for r in results), default=1),
        settings=results[0]["settings"] if results else {},
        inputs=_inputs(results, time_of_step),
        asked=next((e["line"] or "" for e in events if e["event"] == "asked"), None),
        own_fault=own_fault(events),
    )


def emulate_roomy(
    command: Sequence[str], gpu: Gpu, options: EmulateOptions, **how: Any
) -> Emulation:
    """Measure how much a program needs that runs out of memory.

    It runs on a GPU with `ROOM` times the memory, and the verdict uses the real memory of `gpu`.
    `how` are further arguments of `emulate`.
    """
    larger = dataclasses.replace(gpu, memory_bytes=ROOM * gpu.memory_bytes)
    margin_bytes = MemoryBudget.of(gpu.memory_bytes, options.margin_fraction).margin_bytes
    found = emulate(command, larger, options, **how)
    return dataclasses.replace(found, gpu=gpu, margin_bytes=margin_bytes)


def interpreter_of(program: str) -> str:
    """The Python that runs `program`: itself, the one on its first line, or tuner's own."""
    if Path(program).name.startswith("python"):
        return program
    with Path(program).open("rb") as file:
        first = file.readline(512)
    if first.startswith(b"#!"):
        words = first[2:].decode(errors="replace").split()
        if words and Path(words[0]).name == "env":
            words = [found for word in words[1:2] if (found := shutil.which(word))]
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
    return sys.executable


def _run(
    command: list[str],
    session: Session,
    options: EmulateOptions,
    output: IO[Any] | Tail | None,
    stopped: Callable[[], bool],
    cwd: Path | None,
) -> ProgramEnd:
    """Run the program until all its processes have ended."""
    environment = session.environment(os.environ)
    task = ProgramTask(
        command=tuple(command),
        environment=environment,
        mark=f"{DEVICE_VARIABLE}={environment[DEVICE_VARIABLE]}",
        cwd=None if cwd is None else str(cwd),
        is_quiet=isinstance(output, Tail),
        timeout_s=options.timeout_s,
        tell_signal=TELL_SIGNAL,
    )
    if not isinstance(output, Tail):
        return run_supervised(task, output=output, stopped=stopped)
    end = run_supervised(task, stopped=stopped)
    output.data = end.tail
    return end


def _slowest(results: list[dict[str, Any]], gpu: Gpu) -> EmulatedStepTime | None:
    """The step time of the slowest rank: the others wait for it."""
    times = [step_time(r["work"], gpu) for r in results if r["work"]]
    return max(filter(None, times), key=lambda time: time.step_s, default=None)


def _inputs(
    results: list[dict[str, Any]], time_of_step: EmulatedStepTime | None
) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens of each) of the model's inputs in the timed step."""
    if not results or time_of_step is None:
        return ()
    # JSON turned the step's number into text.
    shapes = results[0]["inputs"].get(str(time_of_step.step), [])
    return tuple((int(rows), int(tokens)) for rows, tokens in shapes)


def _uses(results: list[dict[str, Any]], accounts: list[Account]) -> list[EmulatedDeviceUse]:
    by_place = {(account.pid, account.device): account for account in accounts}
    found = []
    for result in sorted(results, key=lambda one: one["rank"]):
        for one in result["devices"]:
            account = by_place.get((result["pid"], one["physical"]))
            if account is None:
                continue
            found.append(
                EmulatedDeviceUse(
                    rank=result["rank"],
                    device=one["physical"],
                    device_bytes=account.peak_bytes,
                    managed_bytes=account.managed_peak_bytes,
                    allocations=tuple(EmulatedAllocation(**row) for row in one["allocations"]),
                    **{
                        field.name: one[field.name]
                        for field in dataclasses.fields(EmulatedDeviceUse)
                        if field.name in one and field.name not in ("device", "allocations")
                    },
                )
            )
    return found
