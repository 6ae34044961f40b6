"""Runs a program on a GPU that is not there, and says what came of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tuner.emulator.here import DEVICE_VARIABLE, TELL_SIGNAL
from tuner.emulator.own_fault import OwnFault, own_fault
from tuner.emulator.session import Account, Session
from tuner.emulator.step_time import EmulatedStepTime, step_time
from tuner.emulator.toolchain import find_torch
from tuner.errors import (
    EXIT_BAD_INPUT,
    EXIT_UNAVAILABLE,
    InputError,
    UnavailableError,
    verdict_code,
)
from tuner.gpu import Gpu
from tuner.host import find_program
from tuner.records import MemoryBudget
from tuner.runner.emulated_ending import Ended, ProgramError, find_ending
from tuner.runner.supervised import (
    ProgramEnd,
    ProgramTask,
    Tail,
    run_supervised,
)

ROOM = 8
"""So many times the memory has the GPU on which the need of what does not fit is found out."""

_WITH_STATES = 2
_FAILED = (Ended.ERROR, Ended.CRASH, Ended.FAULT, Ended.UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class EmulatedAllocation:
    """What one line of code holds on the device at the peak.

    `where` is the innermost line outside of PyTorch, `line` the program's own; both may be empty.
    """

    kind: str
    where: str
    line: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class EmulatedDeviceUse:
    """What one process took of one emulated device.

    `device_bytes` is what the driver counts: reserved memory, context and what bypasses PyTorch.
    `managed_bytes` (paged optimizers) is in none of the others.
    """

    rank: int
    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    managed_bytes: int
    loaded_bytes: int
    phase_peak_bytes: Mapping[str, int]
    peak_phase: str
    breakdown: Mapping[str, int]
    allocations: tuple[EmulatedAllocation, ...]
    alloc_retries: int
    ooms: int
    trainable_params: int


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """Values that the emulator could not compute, and how often `operator` asked for them.

    `kind` says what took their place: "at most" (the size is the largest possible), "assumed"
    (choices spread evenly; floats that are finite), "made up" or "unknown" (no bound is known).
    They decided the size of a tensor if `decides_shape`; else the program read or lost them.
    """

    operator: str
    line: str | None
    kind: str
    decides_shape: bool
    times: int


@dataclass(frozen=True, slots=True)
class Emulation:
    """What came of a program on emulated GPUs; every number in it is *emulated*."""

    command: tuple[str, ...]
    gpu: Gpu
    gpus: int
    torch: str
    cuda: str
    ended: Ended
    steps: int
    margin_bytes: int
    exit_status: int
    devices: tuple[EmulatedDeviceUse, ...]
    """Of each rank and device, in their order."""
    error: ProgramError | None
    refused_bytes: int
    """The request that the program ran out of memory with; 0 where it did not."""
    unknown_calls: Mapping[str, int]
    """Functions of CUDA's libraries that the emulator does not know, with numbers of calls."""
    unknown_values: tuple[UnknownValues, ...]
    """Values that could not be computed and may matter, by operator and line."""
    duration_s: float
    time: EmulatedStepTime | None
    """The time of an optimizer step; None where none ended, or nothing could be priced."""
    stands_for: int
    """Ranks of the training that the one process stands for; 1 where each rank was run."""
    settings: Mapping[str, Any]
    """The settings of the training as they reached the trainer and the model, by knob."""
    inputs: tuple[tuple[int, int], ...]
    """Of the step that `time` is of, on one rank: (sequences, tokens of each), padding included,
    of each forward pass; empty where the model has no table of embeddings."""
    asked: str | None = None
    """The line of the program that read its standard input, which is empty; "" for an unknown one,
    None where none did."""
    own_fault: OwnFault | None = None
    """A fault of tuner, after which no number of the answer can be relied on."""

    @property
    def limiting(self) -> EmulatedDeviceUse | None:
        """The use of a device that takes most of it."""
        return max(self.devices, key=lambda use: use.device_bytes, default=None)

    @property
    def fits(self) -> bool | None:
        """Whether it fits with the margin; None where it failed, or did not come far enough.

        Sizes that are upper bounds show only that it fits, and made up ones show nothing.
        """
        fits = self._fits_as_it_ran
        bounded = self.sizes == "at most" and fits is False
        return None if bounded or self.sizes == "unknown" else fits

    @property
    def _fits_as_it_ran(self) -> bool | None:
        if self.ended is Ended.OOM:
            return False
        if self.ended in _FAILED or self.limiting is None:
            return None
        fits = MemoryBudget(self.gpu.memory_bytes, self.margin_bytes).fits(self.used_bytes)
        # The first step makes the optimizer's states, which the second finds. A program that
        # ends by itself needs no second one.
        enough = _WITH_STATES if self.ended is Ended.TIMEOUT else 1
        return fits if self.steps >= enough or (self.steps and not fits) else None

    @property
    def exit_code(self) -> int:
        """The status of `tuner.errors`: that of the verdict, else that of the ending."""
        if self.ended is Ended.ERROR and not self.unknown_calls:
            return EXIT_BAD_INPUT
        return EXIT_UNAVAILABLE if self.ended in _FAILED else verdict_code(self.fits)

    @property
    def sizes(self) -> str:
        """What the sizes of tensors rest on: see `sizes_rest_on`."""
        return sizes_rest_on(self.unknown_values)

    @property
    def sequences_per_s(self) -> float | None:
        """Sequences of one rank per second, in the step that `time` is of."""
        rows = sum(rows for rows, _ in self.inputs)
        return rows / self.time.step_s if rows and self.time is not None else None

    @property
    def used_bytes(self) -> int:
        """Of the device that holds most, by all processes on it."""
        used: Counter[int] = Counter()
        for use in self.devices:
            used[use.device] += use.device_bytes
        return max(used.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        data = dataclasses.asdict(self)
        data.update(
            source="emulated",
            gpu=self.gpu.id,
            gpu_memory_bytes=self.gpu.memory_bytes,
            fits=self.fits,
            command=list(self.command),
        )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateOptions:
    """How a program is run: on how many GPUs, for how many optimizer steps, with which seed.

    On several GPUs, one process stands for all ranks that the program starts, unless `all_ranks`.
    `gpus` are those of each of the `machines` that the program's launcher is told of.
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
    """Run `command` on emulated GPUs until it ends, or has taken enough optimizer steps.

    What the program prints goes to `output`, by default where this process prints; once `stopped`
    says so, it is ended. It can ask nobody: its standard input is empty. Nothing of it is left when
    this returns or raises. Raises `InputError` for a command that does not exist,
    `UnavailableError` where nothing can be emulated.
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
    """The same on a GPU with `ROOM` times the memory, judged beside the memory that it really has.

    For what a program needs that runs out of memory. `how` are further arguments of `emulate`.
    """
    larger = dataclasses.replace(gpu, memory_bytes=ROOM * gpu.memory_bytes)
    margin_bytes = MemoryBudget.of(gpu.memory_bytes, options.margin_fraction).margin_bytes
    found = emulate(command, larger, options, **how)
    return dataclasses.replace(found, gpu=gpu, margin_bytes=margin_bytes)


def interpreter_of(program: str) -> str:
    """The Python that runs `program`: itself, or the one that its first line names, else ours."""
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
    """How the program ended. Nothing that it started is left."""
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
    """The step time of the rank that takes longest: the others wait for it."""
    times = [step_time(r["work"], gpu) for r in results if r["work"]]
    return max(filter(None, times), key=lambda time: time.step_s, default=None)


def _inputs(
    results: list[dict[str, Any]], time_of_step: EmulatedStepTime | None
) -> tuple[tuple[int, int], ...]:
    """What the model got in the step that is timed; JSON has made text of the step's number."""
    if not results or time_of_step is None:
        return ()
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


def sizes_rest_on(values: Iterable[UnknownValues]) -> str:
    """What the sizes of a program's tensors rest on: "known", "at most" or "unknown".

    Memory is an upper bound if sizes are "at most" so large. Even loads of experts count as known:
    their sum is.
    """
    kinds = {one.kind for one in values if one.decides_shape}
    if kinds & {"made up", "unknown"}:
        return "unknown"
    return "at most" if "at most" in kinds else "known"


def unknown_values(results: list[dict[str, Any]]) -> tuple[UnknownValues, ...]:
    """Those of all ranks, the ones that decide sizes first."""
    times: Counter[tuple[str, str | None, str, bool]] = Counter()
    for row in (row for result in results for row in result["values_unknown"]):
        times[row["operator"], row["line"], row["kind"], row["decides_shape"]] += row["times"]
    rows = [UnknownValues(*key, number) for key, number in times.items()]
    return tuple(sorted(rows, key=lambda row: (not row.decides_shape, -row.times)))
