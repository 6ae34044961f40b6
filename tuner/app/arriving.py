"""Checks, before values are written, that they take effect in the training."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.app.applying import UserProgram
from tuner.app.device import is_cpu
from tuner.app.program_oracle import ignored
from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue
from tuner.core.setup.common import QUANTIZED
from tuner.core.supervised import Tail
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.emulator.ending import Ended
from tuner.program.edit.place import is_wanted
from tuner.program.edit.plan import FileEdit
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import PYTHON, SourceFile, read_places
from tuner.program.launch import runnable, unread_files
from tuner.program.linked import Literal
from tuner.program.names import Script
from tuner.program.program import Program
from tuner.program.setting import Setting
from tuner.program.settings import find_settings, scripts_of

LONGEST_RUN_S = 900.0
"""The time limit for the program's first step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One value that is wanted, and the one that the training gets; None if that is unknown.

    `seen` is "emulated" by a run, or "read" in the files.
    """

    knob: str
    wanted: KnobValue
    arrived: KnobValue | None = None
    seen: str = ""
    where: str = ""
    remedy: str = ""

    @property
    def is_lost(self) -> bool:
        """True if the training is known to get another value."""
        return self.arrived is not None and self.arrived != self.wanted


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The check of each value, and notes on values that could not be checked."""

    values: tuple[Arrival, ...]
    notes: tuple[str, ...]

    def require(self) -> None:
        """Raise one `InputError` with every value that does not arrive."""
        lost = [value for value in self.values if value.is_lost]
        if not lost:
            return
        count = "1 value doesn't" if len(lost) == 1 else f"{len(lost)} values don't"
        raise InputError(
            f"nothing written: {count} take effect",
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
    """Check that the `wanted` values take effect in the program once `edits` are written.

    It runs one step on the emulated GPU if possible, and reads files for the rest. Of `WAYS`,
    "emulate" raises `UnavailableError` if nothing can be emulated, and "read" does not run it.
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
    texts = {edit.path.resolve(): edit.after for edit in edits}
    files = {}
    for word, source in program.files.items():
        data = texts.get(source.path.resolve(), source.data)
        files[word] = SourceFile(source.path, data, read_places(data, source.path))
    return dataclasses.replace(program, files=files)


def _run(program: Program, after: Program, gpu: Gpu) -> tuple[Emulation | None, str]:
    if is_cpu(gpu):
        return None, "not run: there is nothing to emulate for a processor"
    unread = unread_files(after, program)
    if unread:
        return None, f"not run: the command does not show that it reads {', '.join(unread)}"
    with runnable(after, program) as command:
        found = Machine(gpu).run(
            command, steps=1, timeout_s=LONGEST_RUN_S, output=Tail(), cwd=program.folder
        )
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
    is_quantized = wanted.get("precision", "nf4") in QUANTIZED
    for call in checkpoint_calls(program.sources):
        if call.prepares and not is_quantized:
            continue  # peft does so for quantised models only
        remedy = f"it is turned on here; write {call.remedy}"
        return Arrival(knob, False, True, "read", f"{call.where} {call.line}", remedy)
    return None


def _read_back(program: Program, knob: str, value: KnobValue, setting: Setting | None) -> Arrival:
    if setting is None or setting.problem is not None or setting.value is None:
        return Arrival(knob, value)
    if not is_taken(program, setting):
        return Arrival(knob, value)
    if is_wanted(setting.value, value):
        return Arrival(knob, value, value, "read")
    return Arrival(knob, value, setting.value, "read", remedy=_line(setting))


def _line(setting: Setting) -> str:
    """The line that sets it, to be changed by hand; empty on the command line."""
    if setting.word is not None or setting.source is None or setting.location is None:
        return ""
    return setting.source.line(setting.location)


_PREPARES = "prepare_model_for_kbit_training"
_ENABLES = ("gradient_checkpointing_enable", "activation_checkpointing_enable")


@dataclass(frozen=True, slots=True)
class CheckpointCall:
    """A call that turns checkpointing on: its function, "train.py:12", and its line."""

    name: str
    where: str
    line: str

    @property
    def prepares(self) -> bool:
        """True for k-bit preparation, which checkpoints quantised models only."""
        return self.name == _PREPARES

    @property
    def remedy(self) -> str:
        """The text to write so that the call leaves checkpointing off."""
        if self.prepares:
            return f"{self.name}(model, use_gradient_checkpointing=False)"
        return f"no call of {self.name}"


def checkpoint_calls(sources: Iterable[SourceFile]) -> list[CheckpointCall]:
    """The calls in Python files and notebooks that certainly turn checkpointing on."""
    return [
        call
        for source in sources
        if source.path.suffix in PYTHON
        for call in _calls(Script(source))
    ]


def _calls(script: Script) -> Iterator[CheckpointCall]:
    for call in script.calls:
        name = last_name(call.func) or ""
        if name != _PREPARES and name not in _ENABLES:
            continue
        if name == _PREPARES and not _is_on(script, call):
            continue
        if script.is_conditional(call):
            continue
        place = script.place_of(call)
        where = place.where(script.source.path)
        yield CheckpointCall(name, where, script.source.line(place))


def _is_on(script: Script, call: ast.Call) -> bool:
    given = [k.value for k in call.keywords if k.arg in ("use_gradient_checkpointing", None)]
    given += call.args[1:2]
    return not given or _value(script, given[0]) is True


def _value(script: Script, node: ast.expr) -> object:
    ends = script.ends(node)
    if len(ends) != 1 or not isinstance(ends[0], Literal):
        return None
    return getattr(ends[0].node, "value", None)


def is_taken(program: Program, setting: Setting) -> bool:
    """True if a call gets the value, or the scripts read its name."""
    place, scripts = setting.location, scripts_of(program)
    if setting.word is not None or setting.source is None or place is None or not scripts:
        return True
    own = next((s for s in scripts if s.source is setting.source), None)
    if own is not None:
        node = own.node_at(place)
        if node is None or own.keyword_of(node) is not None:
            return True
    key, owner = (str(step) for step in ("", "", *place.path)[-1:-3:-1])
    return any(_reads(script, key, owner, own is not None) for script in scripts)


def _reads(script: Script, key: str, owner: str, is_name: bool) -> bool:
    """True if a script reads `key`, or passes on all of `owner`.

    A name alone counts only if `is_name`; values in settings files have keys.
    """
    for node, parent in script.parents.items():
        read = _read_key(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and is_name:
            read = node.id
        if read and read == key:
            return True
        is_whole = not isinstance(parent, ast.Attribute | ast.Subscript)
        if read and read == owner and is_whole:
            return True
    return False


def _read_key(node: ast.AST) -> object:
    """The key of `x.key`, `x["key"]` and `x.get("key")`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return getattr(node.slice, "value", None)
    if isinstance(node, ast.Call) and last_name(node.func) == "get" and node.args:
        return getattr(node.args[0], "value", None)
    return None
