"""The settings of a program, as reading finds them; the place of each is found by trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.records import KnobValue
from tuner.program.edit.trying import COMMAND, Trial, Way, listed
from tuner.program.program import Program
from tuner.program.seen import see, whole


@dataclass(frozen=True, slots=True)
class Setting:
    """One parameter of a program and its value, None where reading cannot tell it.

    Its place is looked for when it is asked for.
    """

    knob: str
    read: KnobValue | None
    trial: Trial

    @property
    def value(self) -> KnobValue | None:
        """Its value; of a loop's accumulation that does not divide its batches, what is written."""
        if isinstance(self.read, float) and self.way is not None and self.way.literal is not None:
            return self.way.literal.value
        return self.read

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


class Settings(Mapping[str, Setting]):
    """The settings of `program` by knob."""

    def __init__(self, program: Program) -> None:
        self.trial = Trial(program, see)
        seen = self.trial.seen
        self._settings = {
            knob: Setting(knob, seen.values.get(knob), self.trial)
            for knob in PROGRAM_NAMES
            if knob in seen.values or knob in seen.unknown
        }

    @property
    def program(self) -> Program:
        """The program, with the files that its code reads."""
        return self.trial.program

    def __getitem__(self, knob: str) -> Setting:
        return self._settings[knob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def can_change(self, knob: str) -> bool:
        """True if the program can be given another value of the parameter."""
        if knob in self:
            return self[knob].problem is None
        return knob in PROGRAM_NAMES and bool(self) and self.trial.way(knob) is not None


def settings_of(program: Program) -> Settings:
    """The settings of `program`, its trainer's defaults among them."""
    return Settings(whole(program))
