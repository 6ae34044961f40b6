"""The public door of the emulator: a machine with emulated GPUs, which runs a program."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tuner.core.environment import this_python
from tuner.core.errors import InputError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.host import find_program
from tuner.core.records import MemoryBudget
from tuner.core.supervised import ProgramTask, Tail, run_supervised
from tuner.cost.speed.profile import DeviceProfile
from tuner.emulator.build import find_torch
from tuner.emulator.calls import Called, Value, call
from tuner.emulator.emulation import (
    Emulation,
    data_read,
    declared_engine,
    decode_loops,
    device_uses,
    host_use,
    unknown_values,
)
from tuner.emulator.ending import find_ending, of_first_steps, own_fault
from tuner.emulator.here import DEVICE_VARIABLE, TELL_SIGNAL
from tuner.emulator.rates import multiprocessor_of
from tuner.emulator.session import Session, apart
from tuner.emulator.step_time import EmulatedStepTime, step_time

ROOM = 8
"""A program that does not fit runs again on a GPU with this many times the memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`count` emulated GPUs of one type, on which CUDA programs run unchanged.

    - On several GPUs, one process stands for all ranks that a program starts, unless `all_ranks`.
    - `machines` is the number of machines, each with `count` GPUs, that the launcher reports.
    - `seed` seeds the values that the emulator makes up.
    - `margin_fraction` is the part of a GPU's memory that the verdict keeps free.
    - `profile` is the measured profile of the GPU; None prices operators by the catalogue's rates.

    Raises `UnavailableError` for the ranks of several machines, which can't all run on this one,
    and `InputError` for a GPU type that can't be emulated.
    """

    gpu: Gpu
    count: int = 1
    _: dataclasses.KW_ONLY
    machines: int = 1
    all_ranks: bool = False
    seed: int = 0
    margin_fraction: float | None = None
    profile: DeviceProfile | None = None

    def __post_init__(self) -> None:
        multiprocessor_of(self.gpu)
        if self.machines > 1 and self.all_ranks:
            raise UnavailableError(
                f"the ranks of {self.machines} machines cannot all run on this one",
                hint="leave --all-ranks out: rank 0 stands for all",
            )

    def run(  # noqa: PLR0913 - what a run of a program can be given
        self,
        command: Sequence[str],
        *,
        steps: int = 3,
        timeout_s: float | None = None,
        whole: bool = False,
        on_larger_gpu: bool = False,
        repeats: float = 1.0,
        host_memory_bytes: int | None = None,
        output: IO[Any] | Tail | None = None,
        stopped: Callable[[], bool] = lambda: False,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Emulation:
        """Run `command` until it ends or has taken `steps` optimizer steps (0: to its end).

        Its output goes to `output`, by default to this process's own, and its standard input is
        empty. `environment` has variables in addition to those of this process. The program is
        ended after `timeout_s`, and once `stopped` returns True; all its processes have ended when
        this returns or raises.

        - A `whole` run goes on after the steps: its data loaders serve the batches that decide its
          memory, so that it soon comes to its evaluation, its saving and its end
          (inside/shortening.py). The person's files stay as they are (device/files.c).
        - `on_larger_gpu` measures how much a program needs that does not fit: it runs with `ROOM`
          times the memory, and the verdict uses the real one.
        - `host_memory_bytes` is the memory of the host, by default this machine's; a `whole` run
          that takes more than is given does not fit.
        - `repeats` is the number of micro-batches in a whole step over the number that runs.

        Raises `InputError` for a command that does not exist, and `UnavailableError` if nothing
        can be emulated.
        """
        told = {**os.environ, **(environment or {})}
        program = _find(command[0], cwd, told.get("PATH"))
        torch = find_torch(interpreter_of(program, told.get("PATH")))
        settings: dict[str, Any] = {"steps": steps, "machines": self.machines, "whole": whole}
        room = settings["room"] = ROOM if on_larger_gpu else 1
        started = time.monotonic()
        if whole and _is_static(program):
            raise UnavailableError(
                f"your files can't be kept apart from {program}, which is linked statically",
                hint="give the command of the training itself, such as: python train.py",
            )
        with contextlib.ExitStack() as stack:
            folder = None
            if whole:
                folder, told = stack.enter_context(apart(told, Path(cwd or ".")))
            session = stack.enter_context(
                Session(
                    dataclasses.replace(self.gpu, memory_bytes=room * self.gpu.memory_bytes),
                    count=self.count,
                    torch=torch,
                    seed=self.seed,
                    one_rank=self.count * self.machines > 1 and not self.all_ranks,
                    settings=settings,
                    folder=folder,
                )
            )
            variables = session.environment(told)
            task = ProgramTask(
                command=(program, *command[1:]),
                environment=variables,
                mark=f"{DEVICE_VARIABLE}={variables[DEVICE_VARIABLE]}",
                cwd=None if cwd is None else str(cwd),
                timeout_s=timeout_s,
                tell_signal=TELL_SIGNAL,
            )
            end = run_supervised(task, output=output, stopped=stopped)
            events = list(session.events())
            accounts, peaks = session.accounts(), session.peaks()
            unknown = session.unknown_calls()
        results = sorted(
            (event for event in events if event["event"] == "result"), key=lambda one: one["rank"]
        )
        ending = find_ending(
            events, accounts, end.exit_status, timed_out=end.stopped_by == "timeout"
        )
        done = max((result["steps"] for result in results), default=0)
        if whole:
            ending = of_first_steps(ending, done, steps)
        run = next((event for event in events if event["event"] == "run"), {})
        horizons = [one for result in results if (one := result["horizon"])]
        time_of_step = self._slowest(results, repeats)
        return Emulation(
            command=tuple(command),
            gpu=self.gpu,
            gpus=self.count,
            torch=torch.version,
            cuda=".".join(map(str, torch.cuda)),
            ended=ending.ended,
            steps=done,
            steps_by=max((result["steps_by"] for result in results), default=""),
            margin_bytes=MemoryBudget.of(self.gpu.memory_bytes, self.margin_fraction).margin_bytes,
            exit_status=end.exit_status,
            devices=tuple(device_uses(results, accounts)),
            error=ending.error,
            peaks=tuple(peaks),
            refusals=ending.refusals,
            unknown_calls=unknown,
            unknown_values=unknown_values(results),
            duration_s=time.monotonic() - started,
            time=time_of_step,
            stands_for=max((r["stands_for"] for r in results), default=1),
            settings=results[0]["settings"] if results else {},
            compares=results[0]["compares"] if results else "",
            inputs=_inputs(results, time_of_step),
            asked=next((e["line"] or "" for e in events if e["event"] == "asked"), None),
            own_fault=own_fault(events),
            whole=whole,
            later_error=ending.later,
            data=tuple(data_read(events)),
            run_steps=run.get("steps"),
            run_evaluations=run.get("evaluations", 0),
            is_cut=bool(horizons),
            of_steps=max((one["of_steps"] or 0 for one in horizons), default=0) or None,
            unreached=tuple(dict.fromkeys(line for one in horizons for line in one["unreached"])),
            host=host_use(results, host_memory_bytes),
            decoding=decode_loops(events),
            engine=declared_engine(events),
        )

    def call(self, function: Callable[..., Value], *args: Any, **kwargs: Any) -> Called[Value]:
        """Call `function` in a process of its own on this machine.

        It is imported there by its module, so it stands at the top level of one; its arguments and
        its value are pickled. An exception that it raises, such as `torch.OutOfMemoryError`, is
        raised here, with a note of the other process's traceback.

        Raises `InputError` for a function that cannot be sent, and `UnavailableError` if nothing
        can be emulated or the process ended before the function did.
        """

        def run(command: Sequence[str], environment: Mapping[str, str]) -> Emulation:
            return self.run(command, steps=0, environment=environment)

        return call(run, function, *args, **kwargs)

    def _slowest(
        self, results: Sequence[Mapping[str, Any]], repeats: float
    ) -> EmulatedStepTime | None:
        """The step time of the slowest rank: the others wait for it."""
        times = [
            step_time(result["work"], self.gpu, profile=self.profile, repeats=repeats)
            for result in results
            if result["work"]
        ]
        return max(filter(None, times), key=lambda time: time.step_s, default=None)


def _find(name: str, cwd: Path | None, path: str | None) -> str:
    """The path of a program; one that names folders is looked for from `cwd` on.

    Raises `InputError` if there is none.
    """
    found = find_program(str(Path(cwd or "", name).absolute()) if os.sep in name else name, path)
    if found is None:
        raise InputError(f"there is no program {name!r}", hint="name one that is on PATH")
    return found


def _is_static(program: str) -> bool:
    """True for a program that no library can be loaded into."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with Path(program).open("rb") as file:
        try:
            parts = ELFFile(file).iter_segments()
            return not any(part.header.p_type == "PT_INTERP" for part in parts)
        except ELFError:  # a script, whose first line names its interpreter
            return False


def interpreter_of(program: str, path: str | None = None) -> str:
    """The Python that runs `program`: itself, the one on its first line, or tuner's own.

    `path` takes the place of PATH.
    """
    if Path(program).name.startswith("python"):
        return program
    with Path(program).open("rb") as file:
        first = file.readline(512)
    if first.startswith(b"#!"):
        words = first[2:].decode(errors="replace").split()
        if words and Path(words[0]).name == "env":
            words = [found for word in words[1:2] if (found := shutil.which(word, path=path))]
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
    return this_python()


def _inputs(
    results: list[dict[str, Any]], time_of_step: EmulatedStepTime | None
) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens of each) of the model's inputs in the timed step."""
    if not results or time_of_step is None:
        return ()
    # JSON turned the step's number into text.
    shapes = results[0]["inputs"].get(str(time_of_step.step), [])
    return tuple((int(rows), int(tokens)) for rows, tokens in shapes)
