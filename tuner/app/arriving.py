"""Whether values that are to be written reach the training: looked at before they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.app.checking import ignored
from tuner.app.device import is_cpu
from tuner.app.user_program import UserProgram
from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue
from tuner.core.supervised import Tail
from tuner.emulator.emulating import EmulateOptions, emulate
from tuner.emulator.emulation import Emulation
from tuner.emulator.ending import Ended
from tuner.program.checkpointing import checkpoint_calls
from tuner.program.edit.plan import FileEdit
from tuner.program.edit.source import SourceFile, read_places
from tuner.program.program import Program
from tuner.program.running import runnable, unread_files
from tuner.program.settings import Setting, find_settings
from tuner.program.taken import is_taken

LONGEST_RUN_S = 900.0
"""What the program gets for its first step; it then counts as one that could not be run."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One value: as it is to be, and as the training gets it; None where nobody saw it.

    `seen` says how: "emulated" by a run, "read" in the files.
    """

    knob: str
    wanted: KnobValue
    arrived: KnobValue | None = None
    seen: str = ""
    where: str = ""
    remedy: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the training is known to get something else."""
        return self.arrived is not None and self.arrived != self.wanted


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What was seen of each value, and what kept more from being seen."""

    values: tuple[Arrival, ...]
    notes: tuple[str, ...]

    def require(self) -> None:
        """Raise one `InputError` with every value that does not arrive."""
        lost = [value for value in self.values if value.is_lost]
        if not lost:
            return
        count = "one value does" if len(lost) == 1 else f"{len(lost)} values do"
        raise InputError(
            f"nothing was written: {count} not arrive",
            problems=[_lost(value) for value in lost],
            hint="change these lines by hand first, leave a value out with --map KNOB=, or write "
            "all the same with --check none",
        )


def _lost(value: Arrival) -> Problem:
    text = f"{value.knob} is to be {show(value.wanted)}, and the training gets "
    text += f"{show(value.arrived)} ({value.seen})" if value.arrived is not None else "something"
    return Problem(f"{text}: {value.remedy}" if value.remedy else text, value.where)


def look(
    user: UserProgram,
    edits: Sequence[FileEdit],
    wanted: Mapping[str, KnobValue],
    gpu: Gpu,
    *,
    way: str | None = None,
) -> Arrivals:
    """How the `wanted` values of knobs arrive in the program once `edits` are written.

    It is run for one step on the emulated GPU where that can be; what no run showed is read in
    its files. Of the ways of `tuner.app.user_program.WAYS`, "emulate" raises
    `UnavailableError` where nothing can be emulated, and "read" does not run it.
    """
    notes = [user.note] if user.note else []
    if way == "emulate" and not user.may_run:
        raise InputError("the program to run is not known", hint=user.note)
    if user.program is None or way == "none" or not wanted:
        return Arrivals(tuple(Arrival(k, v) for k, v in wanted.items()), tuple(notes))
    after = _after(user.program, edits)
    settings = find_settings(after)
    found: Emulation | None = None
    if user.may_run and way != "read":
        try:
            found, problem = _run(user.program, after, gpu)
        except UnavailableError as error:
            if way == "emulate":
                raise
            problem = f"not run: {error.message}"
        if problem:
            notes.append(problem)
    values = []
    for knob, value in wanted.items():
        setting = settings.get(knob)
        read = _forced(knob, wanted, after) or _read_back(after, knob, value, setting)
        seen = _emulated(knob, value, found) if found is not None else None
        seen = read if seen is None else dataclasses.replace(seen, where=read.where)
        if setting is not None and not seen.where:
            seen = dataclasses.replace(seen, where=f"{setting.where} {setting.name}")
        if seen.is_lost and not seen.remedy:
            remedy = read.remedy or (_line(setting) if setting is not None else "")
            seen = dataclasses.replace(seen, remedy=remedy)
        values.append(seen)
    return Arrivals(tuple(values), tuple(notes))


def _after(program: Program, edits: Sequence[FileEdit]) -> Program:
    """The program with what the edits write."""
    texts = {edit.path.resolve(): edit.after for edit in edits}
    files = {}
    for word, source in program.files.items():
        data = texts.get(source.path.resolve(), source.data)
        files[word] = SourceFile(source.path, data, read_places(data, source.path))
    return dataclasses.replace(program, files=files)


def _run(program: Program, after: Program, gpu: Gpu) -> tuple[Emulation | None, str]:
    """One step of the program as it is to be; and what kept it from showing all values."""
    if is_cpu(gpu):
        return None, "not run: there is nothing to emulate for a processor"
    unread = unread_files(after, program)
    if unread:
        return None, f"not run: the command does not show that it reads {', '.join(unread)}"
    options = EmulateOptions(steps=1, timeout_s=LONGEST_RUN_S)
    with runnable(after, program) as command:
        found = emulate(command, gpu, options, output=Tail(), cwd=program.folder)
    if found.ended == "oom":
        return found, f"it runs out of memory on {gpu.name}: `tuner check` says what it needs"
    if found.steps > 0:
        return found, ""
    why = "it ended before its first step"
    if found.error is not None:
        line = f" ({found.error.line})" if found.error.line else ""
        message = found.error.message.splitlines()[:1]
        kind = found.error.type.removeprefix("builtins.")
        why = f"{kind}{line}: {' '.join(message)[:200]}"
    elif found.ended is Ended.TIMEOUT:
        why = f"its first step took more than {LONGEST_RUN_S:.0f} s"
    return found, f"the program could not be run to its first step: {why}"


def _emulated(knob: str, value: KnobValue, found: Emulation) -> Arrival | None:
    """What the run showed of a knob; None where it showed nothing."""
    if knob in found.settings:
        arrived = found.settings[knob]
        arrived = tuple(arrived) if isinstance(arrived, list) else arrived
        if isinstance(value, tuple):
            same = not isinstance(arrived, tuple) or set(arrived) == set(value)
            return Arrival(knob, value, value if same else arrived, "emulated")
        lost = ignored({knob: Setting(knob, knob, value)}, found)
        return Arrival(knob, value, arrived if lost else value, "emulated")
    if not found.inputs:
        return None
    if knob == "max_length" and isinstance(value, int):
        longest = max(tokens for _, tokens in found.inputs)
        if longest >= value:
            return Arrival(knob, value, longest, "emulated")
    shown = {"micro_batch": {rows for rows, _ in found.inputs}, "grad_accum": {len(found.inputs)}}
    # Another number may have its reason: several inputs for each example.
    return Arrival(knob, value, value, "emulated") if value in shown.get(knob, ()) else None


def _forced(knob: str, wanted: Mapping[str, KnobValue], program: Program) -> Arrival | None:
    """Checkpointing that a call turns on, whatever the trainer's argument says."""
    if knob != "gradient_checkpointing" or wanted[knob] is not False:
        return None
    is_quantized = wanted.get("precision", "nf4") in ("nf4", "int8")
    for call in checkpoint_calls(program.sources):
        if call.prepares and not is_quantized:
            continue  # peft does so for quantised models only
        remedy = f"it is turned on here; write {call.remedy}"
        return Arrival(knob, False, True, "read", f"{call.where} {call.line}", remedy)
    return None


def _read_back(program: Program, knob: str, value: KnobValue, setting: Setting | None) -> Arrival:
    """What the files say; of a value that nothing in them takes nobody knows."""
    if setting is None or setting.problem is not None or setting.value is None:
        return Arrival(knob, value)
    if not is_taken(program, setting):
        return Arrival(knob, value)
    if _agree(setting.value, value):
        return Arrival(knob, value, value, "read")
    return Arrival(knob, value, setting.value, "read", remedy=_line(setting))


def _line(setting: Setting) -> str:
    """The line that sets it, to be changed by hand; empty on the command line."""
    if setting.word is not None or setting.source is None or setting.location is None:
        return ""
    return setting.source.line(setting.location)


def _agree(one: object, other: object) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other
