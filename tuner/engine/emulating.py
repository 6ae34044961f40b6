"""Runs a program on a GPU that is not there, and says what came of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tuner.emulator.here import DEVICE_VARIABLE
from tuner.emulator.own_fault import OwnFault, own_fault
from tuner.emulator.session import Account, Session
from tuner.emulator.step_time import EmulatedStepTime, step_time
from tuner.emulator.toolchain import find_torch
from tuner.errors import InputError
from tuner.gpu import Gpu
from tuner.host import find_program
from tuner.records import MemoryBudget
from tuner.runner.outcome import is_out_of_memory
from tuner.runner.processes import end_marked

END_WITHIN_S = 10.0
"""What processes of a program get to disappear after they were killed."""

ROOM = 8
"""So many times the memory has the GPU on which the need of what does not fit is found out."""

_POLL_S = 0.05
_LOG_BYTES = 4000


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
class ProgramError:
    """What the program raised: the exception's type, its text, and the program's line."""

    type: str
    message: str
    line: str | None


@dataclass(frozen=True, slots=True)
class Emulation:
    """What came of a program on emulated GPUs; every number in it is *emulated*."""

    command: tuple[str, ...]
    gpu: Gpu
    gpus: int
    torch: str
    cuda: str
    ended: str
    """How it ended: "steps" (enough of them), "end" (by itself), "error", "oom" or "crash"."""
    steps: int
    margin_bytes: int
    exit_status: int
    devices: tuple[EmulatedDeviceUse, ...]
    """Of each rank and device, in their order."""
    error: ProgramError | None
    refused_bytes: int
    """The request that the device had no room for; 0 where it had for all."""
    unknown_calls: Mapping[str, int]
    """Functions of CUDA's libraries that the emulator does not know, with numbers of calls."""
    unknown_values: Mapping[str, int]
    """Operators whose values decide shapes and could not be computed."""
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
    own_fault: OwnFault | None = None
    """A fault of tuner, after which no number of the answer can be relied on."""

    @property
    def limiting(self) -> EmulatedDeviceUse | None:
        """The use of a device that takes most of it."""
        return max(self.devices, key=lambda use: use.device_bytes, default=None)

    @property
    def fits(self) -> bool | None:
        """Whether it fits with the margin; None where the program did not come far enough."""
        if self.ended == "oom":
            return False
        limiting = self.limiting
        if limiting is None or self.steps == 0:
            return None
        return MemoryBudget(self.gpu.memory_bytes, self.margin_bytes).fits(self.used_bytes)

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
    """

    gpus: int = 1
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
    output: IO[Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
) -> Emulation:
    """Run `command` on emulated GPUs until it ends, or has taken enough optimizer steps.

    What the program prints goes to `output`, by default where this process prints; once `stopped`
    says so, it is ended. Nothing of it is left when this returns or raises. Raises `InputError` for
    a command that does not exist, `UnavailableError` where nothing can be emulated.
    """
    program = find_program(command[0])
    if program is None:
        raise InputError(f"there is no program {command[0]!r}", hint="name one that is on PATH")
    torch = find_torch(interpreter_of(program))
    settings: dict[str, Any] = {"steps": options.steps}
    if options.snapshot is not None:
        settings["snapshot"] = str(options.snapshot.absolute())
    started = time.monotonic()
    with Session(
        gpu,
        count=options.gpus,
        torch=torch,
        seed=options.seed,
        one_rank=options.gpus > 1 and not options.all_ranks,
        settings=settings,
    ) as session:
        status = _run([program, *command[1:]], session, options, output, stopped, cwd)
        events = list(session.events())
        accounts = session.accounts()
        unknown = session.unknown_calls()
    results = [event for event in events if event["event"] == "result"]
    time_of_step = _slowest(results, gpu)
    error = next((ProgramError(**r["error"]) for r in results if r["error"]), None)
    return Emulation(
        command=tuple(command),
        gpu=gpu,
        gpus=options.gpus,
        torch=torch.version,
        cuda=".".join(map(str, torch.cuda)),
        ended=_ended(results, error, status),
        steps=max((r["steps"] for r in results), default=0),
        margin_bytes=MemoryBudget.of(gpu.memory_bytes, options.margin_fraction).margin_bytes,
        exit_status=status,
        devices=tuple(_uses(results, accounts)),
        error=error,
        refused_bytes=max((a.refused_bytes for a in accounts), default=0),
        unknown_calls=unknown,
        unknown_values=_sum(r["values_unknown"] for r in results),
        duration_s=time.monotonic() - started,
        time=time_of_step,
        stands_for=max((r["stands_for"] for r in results), default=1),
        settings=results[0]["settings"] if results else {},
        inputs=_inputs(results, time_of_step),
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


def log_tail(log: IO[bytes]) -> str:
    """The end of what a program printed."""
    log.seek(max(0, log.tell() - _LOG_BYTES))
    return log.read().decode(errors="replace")


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
    output: IO[Any] | None,
    stopped: Callable[[], bool],
    cwd: Path | None,
) -> int:
    """The exit status of the program, as in `subprocess`. Nothing that it started is left."""
    environment = session.environment(os.environ)
    process = subprocess.Popen(  # noqa: S603 - the user's own program
        command, env=environment, stdout=output, stderr=output, process_group=0, cwd=cwd
    )
    until = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    try:
        while process.poll() is None:
            if stopped() or (until is not None and time.monotonic() > until):
                break
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_marked(f"{DEVICE_VARIABLE}={environment[DEVICE_VARIABLE]}", deadline_s=END_WITHIN_S)
    return process.returncode


def _ended(results: list[dict[str, Any]], error: ProgramError | None, status: int) -> str:
    if error is not None:
        return "oom" if is_out_of_memory(f"{error.type}: {error.message}") else "error"
    if any(result["reason"] == "steps" for result in results):
        return "steps"
    return "crash" if status < 0 else "error" if status else "end"


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


def _sum(counters: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counters:
        total.update(one)
    return dict(total)
