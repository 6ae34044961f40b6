"""Runs a program on an emulated GPU with other values of its settings, several side by side."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tuner.core.errors import InputError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue
from tuner.core.supervised import Tail
from tuner.emulator.emulating import EmulateOptions, emulate, emulate_roomy
from tuner.emulator.emulation import Emulation
from tuner.program.changes import change
from tuner.program.launch import read_launch, runnable
from tuner.program.program import Program
from tuner.program.setting import Setting
from tuner.program.settings import find_settings
from tuner.trial.emulated_command import STEPS

AT_ONCE = 2
"""Programs that run side by side; each keeps about one processor busy."""


@dataclass(slots=True)
class ProgramRuns:
    """Runs of one program on one GPU type; a context manager that ends what still runs.

    `gpus` are those of the machine, None for one for each process that the program's launcher
    starts. A run is stopped after `timeout_s`, if it is set. `count` is how many runs there were,
    `log_tail` what the last printed at its end.
    """

    program: Program
    gpu: Gpu
    gpus: int | None = None
    margin_fraction: float | None = None
    seed: int = 0
    timeout_s: float | None = None
    count: int = 0
    log_tail: str = ""
    settings: Mapping[str, Setting] = dataclasses.field(init=False)
    _stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.settings = find_settings(self.program)

    def __enter__(self) -> ProgramRuns:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def as_it_is(self, *, roomy: bool = False) -> Emulation:
        """The program as it is; `roomy` gives it a GPU with more memory."""
        return self._emulate(self.program, roomy=roomy)

    def with_values(
        self, wanted: Sequence[Mapping[str, KnobValue]], *, roomy: bool
    ) -> list[Emulation | InputError]:
        """The program with each of these changes of its settings, side by side.

        In place of a run that cannot be made stands the reason.
        """

        def run(values: Mapping[str, KnobValue]) -> Emulation | InputError:
            try:
                changed = change(self.program, self.settings, values).after
            except InputError as error:
                return error
            return self._emulate(changed, roomy=roomy)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(run, values) for values in wanted]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stop.set()
                raise

    def _emulate(self, program: Program, *, roomy: bool) -> Emulation:
        """One run, judged beside the memory that the GPU really has."""
        self.count += 1
        launch = read_launch(program)
        if launch.machines > 1:
            raise UnavailableError(
                f"it starts on {launch.machines} machines, and changes are tried on one",
                hint="`tuner emulate` runs it as it is: rank 0 stands for all",
            )
        options = EmulateOptions(
            gpus=self.gpus or launch.processes or 1,
            steps=STEPS,
            seed=self.seed,
            margin_fraction=self.margin_fraction,
            timeout_s=self.timeout_s,
        )
        run = emulate_roomy if roomy else emulate
        tail = Tail()
        with runnable(program, self.program) as command:
            found = run(
                command,
                self.gpu,
                options,
                output=tail,
                stopped=self._stop.is_set,
                cwd=program.folder,
            )
        self.log_tail = tail.text
        return dataclasses.replace(found, command=tuple(program.command))
