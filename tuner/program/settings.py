"""The settings of a program as they reach its training, and all else that reaches it.

The place of each setting is found by trial.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import TunerError
from tuner.core.records import KnobValue
from tuner.program.arguments import WITHOUT_MEMORY, Argument, ProgramTraining, Undecided
from tuner.program.edit.place import is_same
from tuner.program.edit.source import PYTHON, opened
from tuner.program.edit.trying import COMMAND, Seen, Trial, Way, listed
from tuner.program.places import made
from tuner.program.program import Program, starts_of
from tuner.program.recorded import SEEDS, record
from tuner.program.trainer import MALFORMED, reading_of
from tuner.program.training import read_loops, read_trainings

_GROUPS = (
    "arguments", "trainer", "lora", "model", "enabled", "preparation", "quantization", "loader",
)  # fmt: skip
"""The calls of a training, those first whose arguments decide."""

_OF_LORA = ("r", "rank")
"""Names that mean the rank in a call for LoRA only."""


def see(program: Program, is_whole: bool = True) -> Seen:
    """The settings of `program`, by all answers or by one. Raises `TunerError` if it can't read."""
    seeds = SEEDS if is_whole else 1
    return _joined([seen for one in starts_of(program) for seen in _of_start(one, seeds)])


def whole(program: Program) -> Program:
    """`program` with the files that its code opens and imports."""
    files = dict(program.files)
    own = {source.path.resolve() for source in program.sources}
    with contextlib.suppress(TunerError):
        for one in starts_of(program):
            for path in map(Path, record(one).files if one.main else ()):
                source = opened(path)
                if source is not None and path.resolve() not in own:
                    own.add(path.resolve())
                    # As the script itself is named: relative or not.
                    main = one.files[one.main].path
                    near = os.path.relpath(path, main.resolve().parent)
                    shown = os.path.normpath(main.parent / near)
                    files[shown] = replace(source, path=Path(shown))
    return replace(program, files=files, mentioned=frozenset(files.keys() - program.files.keys()))


def _of_start(program: Program, seeds: int) -> Iterator[Seen]:
    found = read_trainings(program, seeds=seeds)
    loops = read_loops(program, seeds=seeds) if program.main and not found else []
    calls = list(_calls(program, seeds)) if program.main and found else []
    for training in (*found, *loops):
        seen = _of_training(training)
        if loops and (training.is_split or not training.has("loader")):
            knobs, why = ["micro_batch"], "has no DataLoader that says it"
            if training.is_split:
                knobs, why = [*knobs, "grad_accum"], "has several backward passes of one batch"
            text = f"isn't read: the loop at {training.where} {why}"
            values = {knob: one for knob, one in seen.values.items() if knob not in knobs}
            unknown = {**dict.fromkeys(knobs, text), **seen.unknown}
            seen = replace(seen, values=values, unknown=unknown)
        yield replace(seen, given=None) if loops else replace(seen, calls=calls)


def _of_training(training: ProgramTraining) -> Seen:
    planned = _planned(training)
    said, flat = dict[str, Argument](), dict[str, Argument]()
    for group in (g for g in _GROUPS if training.has(g)):
        call = training[group]
        said |= {f"{group}.{name}": argument for name, argument in call.values.items()}
        flat |= {f"{group}.{name}": Argument(value, "") for name, value in call.defaults.items()}
    flat |= said
    flat |= {f"length.{n}.max_length": one for n, one in enumerate(training.lengths)}
    values: dict[str, KnobValue] = {}
    raw: dict[str, object] = {}
    where, unknown = dict[str, str](), dict[str, str]()
    for knob in PROGRAM_NAMES:
        name = _name_of(knob, flat)
        if name is not None:
            where[knob] = flat[name].where
            if flat[name].problem is not None:
                unknown[knob] = str(flat[name].problem)
        own = flat[name].value if name is not None else None
        if name is not None or (training.accumulation and knob == "grad_accum"):
            raw[knob] = planned.get(knob) if name is None else own
        plan = planned.get(knob)
        # The program's own word, where it means what the trainer's reader makes of it.
        chosen = own if plan is None or is_same(own, plan) else plan
        if isinstance(chosen, bool | int | float | str) and knob not in unknown:
            values[knob] = chosen
    for problem in training.found.problems:
        if isinstance(problem, Undecided) and problem.knob in values and problem.knob not in where:
            values.pop(problem.knob)
            unknown[problem.knob] = problem.message.partition(": --set ")[0]
    names = {
        name.rpartition(".")[2]
        for name, argument in said.items()
        if argument.value is not None or argument.problem or name.count(".") == 1
    }
    ours = {name for names in PROGRAM_NAMES.values() for name in names}
    outer = {name.rpartition(".")[0] for name in flat}
    mild = (*WITHOUT_MEMORY[""], "lora_alpha")  # the batch of the evaluation, the name of the run
    rest = {
        name: argument.value
        for name, argument in flat.items()
        if (last := name.rpartition(".")[2]) not in ours
        and name not in outer
        and not last.startswith(mild)
    }
    return Seen(values, raw, where, unknown, frozenset(names), (), rest)


def _planned(training: ProgramTraining) -> Mapping[str, Any]:
    """The knobs as the trainer's reader makes them; none for a loop of one's own."""
    if training["trainer"].is_unknown("args"):
        return {}  # it may set everything
    with contextlib.suppress(*MALFORMED):
        if (reading := reading_of(training.trainer)) is not None:
            planned = reading.plan(training)
            size = int(str(planned.knobs.get("micro_batch"))) // planned.sequences
            return {**planned.knobs, "micro_batch": size}
    rounds = training.accumulation
    return {} if rounds is None else {"grad_accum": rounds}


def _name_of(knob: str, flat: Mapping[str, Argument]) -> str | None:
    """The argument that is the knob: the most certain name, in the call that decides."""
    for group in (*_GROUPS, *(["length"] if knob == "max_length" else [])):
        ours: dict[str, str] = {
            name.rpartition(".")[2]: name
            for name, argument in reversed(list(flat.items()))
            if name.startswith(f"{group}.") and (argument.value is not None or argument.problem)
        }
        for own in PROGRAM_NAMES[knob]:
            if own in ours and (own not in _OF_LORA or group == "lora"):
                return ours[own]
    return None


def _calls(program: Program, seeds: int) -> Iterator[tuple[str, int, int]]:
    """The calls that take arguments: file, by its word, line and column."""
    for row in record(program, seeds=seeds).trainings:
        for call in (made(row.get("arguments")), made(row.get("lora"))):
            where = call.get("where") if call else None
            if where is None:
                continue
            for word, source in program.files.items():
                if source.path.suffix not in PYTHON:
                    continue
                if str(source.path.resolve()) == where["file"]:
                    yield word, where["line"], where["column"]
                for first, number in source.python.cells.items():
                    if where["file"].endswith(f": cell {number}"):
                        yield word, first + where["line"] - 1, where["column"]


def _joined(seen: Sequence[Seen]) -> Seen:
    """One of several trainings: settings in which they differ are none that can be changed."""
    if len(seen) < 2:
        return seen[0] if seen else Seen()
    first, at = seen[0], [one.where for one in seen]
    differing = {
        knob: f"differs between trainings ({', '.join({p[knob]: 0 for p in at if p.get(knob)})})"
        for knob in PROGRAM_NAMES
        if any(one.values.get(knob) != first.values.get(knob) for one in seen)
    }
    values = {k: v for k, v in first.values.items() if k not in differing}
    return replace(first, values=values, unknown={**first.unknown, **differing})


@dataclass(frozen=True, slots=True)
class Setting:
    """One parameter of a program and its value, None where reading cannot tell it.

    Its place is looked for when it is asked for.
    """

    knob: str
    value: KnobValue | None
    trial: Trial

    @property
    def is_given(self) -> bool:
        """False for a value that the program leaves to its trainer."""
        return self.trial.is_given(self.knob) or self.trial.written(self.knob) is not None

    @property
    def is_word(self) -> bool:
        """True if it stands on the command line."""
        return self.way is not None and self.way.file == COMMAND and not self.way.is_added

    @property
    def way(self) -> Way | None:
        """The place that sets it; None where nothing can."""
        return self.trial.way(self.knob)

    @property
    def name(self) -> str:
        """The program's own name."""
        return self.way.name if self.way is not None else self.knob

    @property
    def where(self) -> str:
        """For people: "train.py:12", or "the command line"."""
        if self.way is not None and not self.way.is_added:
            return self.way.where
        return self.trial.seen.where.get(self.knob, "")

    @property
    def problem(self) -> str | None:
        """The reason why it can't be changed."""
        unknown = self.trial.seen.unknown.get(self.knob)
        if unknown is not None:
            return unknown
        if self.way is None:
            given = self.trial.is_given(self.knob)
            return "is computed" if given else "is the trainer's default"
        if self.way.also:
            return f"sets {listed(self.way.also)} too"
        return None


class Settings(dict[str, Setting]):
    """The settings of `program` by knob."""

    def __init__(self, program: Program) -> None:
        self.trial = Trial(program, see)
        seen = self.trial.seen
        super().__init__(
            (knob, Setting(knob, seen.values.get(knob), self.trial))
            for knob in PROGRAM_NAMES
            if knob in seen.values or knob in seen.unknown
        )

    @property
    def program(self) -> Program:
        """The program, with the files that its code reads."""
        return self.trial.program

    def can_change(self, knob: str) -> bool:
        """True if the program can be given another value of the parameter."""
        if knob in self:
            return self[knob].problem is None
        return knob in PROGRAM_NAMES and bool(self) and self.trial.way(knob) is not None


def settings_of(program: Program) -> Settings:
    """The settings of `program`, its trainer's defaults among them."""
    return Settings(whole(program))
