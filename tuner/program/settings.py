"""The settings in a program's files and on its command line, under the names of parameters.

A value is followed to its origin: `per_device_train_batch_size=BATCH_SIZE` to `BATCH_SIZE = 4`,
`args.batch` to its option. An ambiguous or unknown origin makes a setting with a problem.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tuner.program.candidates import Candidate, DataFile, in_data, in_python, is_collection
from tuner.program.edit.place import Location
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.linked import End, Environment, Literal, OptionValue, OutsideKeys
from tuner.program.names import Script
from tuner.program.parsed import Option
from tuner.program.program import Program
from tuner.program.setting import (
    NAMES,
    Setting,
    Switch,
    as_named,
    is_option,
    names_itself,
    of_word,
    word_at,
)
from tuner.space.apply import Path

_MOST_STEPS = 8
"""From one `${...}` to the next; more is a circle."""


def find_settings(program: Program) -> dict[str, Setting]:
    """The settings of `program`, by knob; what it leaves to its trainer's defaults is not there."""
    finder = _Finder(program)
    found = {}
    for knob, names in NAMES.items():
        setting = finder.find(knob, names)
        if setting is not None:
            value = setting.value
            value = None if value is None else as_named(setting.name, value)
            found[knob] = replace(setting, value=value)
    return found


def scripts_of(program: Program) -> list[Script]:
    """The Python files of `program`, with what its command line says of their options."""
    return _Finder(program).scripts


def _below(source: SourceFile, keys: Path) -> list[Location]:
    return [replace(place, path=(*keys, *place.path)) for place in source.places]


class _Finder:
    def __init__(self, program: Program) -> None:
        self.program = program
        python = [s for s in program.sources if s.path.suffix in PYTHON]
        self.scripts = [Script(source, program.roots) for source in python]
        by_path = {script.source.path.resolve(): script for script in self.scripts}
        for script in self.scripts:
            script.others = by_path
        self.data = [
            DataFile(
                source, word not in program.mentioned, _below(source, program.below.get(word, ()))
            )
            for word, source in program.files.items()
            if source.path.suffix not in PYTHON
        ]
        words = [n for n, word in enumerate(program.command) if word in program.files]
        self.first_word = min(words, default=0) + 1
        for script in self.scripts:
            script.given = dict(self._given(script))
            if program.main in program.command and script.source is program.files[program.main]:
                script.words = len(program.command) - program.command.index(program.main)

    def _given(self, script: Script) -> Iterator[tuple[str, str | int]]:
        """The options of a script that the command line sets, with the text that it gives them."""
        for option in script.options:
            if option.is_positional:
                continue
            setting = self._of_option("", option.dest, script, option)
            if setting.word is not None and setting.switch is None:
                word = self.program.command[setting.word]
                text = word.partition("=")[2] if names_itself(word) else word
                kinds = [k.value for k in option.call.keywords if k.arg == "type"]
                is_number = bool(kinds) and last_name(kinds[0]) == "int" and text.isdigit()
                yield option.dest, int(text) if is_number else text

    def find(self, knob: str, names: Sequence[str]) -> Setting | None:
        setting, is_argument = self._of_files(knob, names)
        if setting is not None and (setting.word is not None or setting.switch is not None):
            return setting
        # A trainer's own argument that is written out is what counts, whatever the words say.
        if not (setting is not None and is_argument and setting.location is not None):
            for name in names:
                word = word_at(self.program.command, (name,), knob)
                if word is not None:
                    return word
        return setting

    # -- candidates --------------------------------------------------------------------------

    def _of_files(self, knob: str, names: Sequence[str]) -> tuple[Setting | None, bool]:
        candidates = [*in_python(self.scripts, knob, names), *in_data(self.data, knob, names)]
        for strength in sorted({c.strength for c in candidates}):
            same = [c for c in candidates if c.strength == strength]
            same = [c for c in same if c.trains] or same
            pairs = [(c, self._followed(knob, c)) for c in same]
            # The name of a constant is a guess; a variable that holds some object is none.
            pairs = [(c, s) for c, s in pairs if c.strength[0] < 2 or s.problem is None]
            settings = _by_place(setting for _, setting in pairs)
            if not settings:
                continue
            if len(settings) == 1:
                written = any(
                    c.is_argument and s.location == c.place and s.problem is None for c, s in pairs
                )
                return settings[0], written
            where = _listed(s.where for s in settings)
            first = settings[0]
            several = f"is set in several places ({where})"
            return (
                Setting(knob, first.name, None, first.source, first.location, problem=several),
                False,
            )
        return None, False

    # -- following a value -------------------------------------------------------------------

    def _followed(self, knob: str, candidate: Candidate) -> Setting:
        name, script = candidate.name, candidate.script
        if script is None:
            return self._in_file(knob, name, candidate.source, candidate.place)
        if candidate.option is not None:
            return self._of_option(knob, name, script, candidate.option)
        assert candidate.node is not None
        return self._one(knob, candidate, script, script.ends(candidate.node))

    def _one(self, knob: str, at: Candidate, script: Script, ends: Sequence[End]) -> Setting:
        settings = _by_place(self._settled(knob, at, script, end) for end in ends)
        if len(settings) == 1:
            return settings[0]
        where = _listed(s.where for s in settings)
        shown = " ".join(at.place.raw.split())[:60]
        problem = f"is {shown}, which is set in several places ({where})"
        return Setting(knob, at.name, None, at.source, at.place, problem=problem)

    def _settled(self, knob: str, at: Candidate, script: Script, end: End) -> Setting:
        node = end.option.call if isinstance(end, OptionValue) else end.node
        script = script.home_of(node)
        if isinstance(end, Literal):
            if (
                end.option
                and (word := word_at(self.program.command, (end.option,), knob, at.name))
                is not None
            ):
                return word
            place = script.place_of(end.node)
            value = place.value
            if isinstance(value, float) and math.isnan(value):
                value = ast.literal_eval(end.node)  # 4_096
            return Setting(knob, at.name, value, script.source, place, problem=place.problem)
        if isinstance(end, OptionValue):
            return self._of_option(knob, at.name, script, end.option)
        shown = " ".join(at.place.raw.split())[:60]
        if isinstance(end, OutsideKeys):
            found = self._outside(knob, at, end)
            if found is not None:
                return found
            problem = f"is {shown}, which is set in none of the files that are named"
        elif isinstance(end, Environment):
            problem = f"is {shown}, which comes from the environment"
        elif end.node is at.node:
            problem = f"{end.why}: {shown}"
        else:
            place = script.place_of(end.node) if hasattr(end.node, "lineno") else at.place
            problem = f"is {shown}, which {end.why} ({place.spot})"
        return Setting(knob, at.name, None, at.source, at.place, problem=problem)

    def _outside(self, knob: str, at: Candidate, end: OutsideKeys) -> Setting | None:
        keys = end.keys
        if (word := word_at(self.program.command, keys, knob, at.name)) is not None:
            return word
        places = [(d.source, p) for d in self.data for p in d.places if not is_collection(p)]
        ending = [(s, p) for s, p in places if p.path[-len(keys) :] == keys]
        for found in ([(s, p) for s, p in ending if p.path == keys], ending):
            if len(found) == 1:
                return self._in_file(knob, at.name, *found[0])
            if found:
                where = _listed(p.where(s.path) for s, p in found)
                problem = f"is set in several places ({where})"
                return Setting(knob, at.name, None, at.source, at.place, problem=problem)
        options = [(s, o) for s in self.scripts for o in s.options if o.dest == keys[-1]]
        if len(options) == 1:
            return self._of_option(knob, at.name, *options[0])
        values = [(s, e) for s in self.scripts for e in s.class_values(str(keys[-1]))]
        if len(values) == 1:
            return self._settled(knob, at, *values[0])
        return None

    def _in_file(self, knob: str, name: str, source: SourceFile, place: Location) -> Setting:
        first = place
        for _ in range(_MOST_STEPS):
            word = word_at(self.program.command, place.path, knob, name)
            if word is not None:
                return word
            if not place.is_reference:
                return Setting(knob, name, place.value, source, place, problem=place.problem)
            inner = re.fullmatch(r"""["']?\$\{([\w.]+)\}["']?""", place.raw.strip())
            path = tuple(inner[1].split(".")) if inner else ()
            targets = [(d.source, p) for d in self.data for p in d.places if p.path == path]
            if not path or len(targets) != 1:
                break
            source, place = targets[0]
        problem = f"is {first.raw.strip()}, which is set in none of the files that are named"
        return Setting(knob, name, None, source, first, problem=problem)

    # -- the command line --------------------------------------------------------------------

    def _of_option(  # noqa: PLR0911 - one for each kind of option
        self, knob: str, name: str, script: Script, option: Option
    ) -> Setting:
        place = script.place_of(option.call)
        at = Candidate(name, (2, 0), script.source, place, script)
        number = None
        for index in range(self.first_word, len(self.program.command)):
            if is_option(script.options, option, self.program.command[index]):
                number = index
        command = self.program.command
        on = next((n for n in option.names if n.startswith("--")), option.names[0])
        if option.action == "BooleanOptionalAction" and number is not None:
            off = f"--no-{on.lstrip('-')}"
            value = not command[number].startswith("--no-")
            return Setting(knob, name, value, word=number, switch=Switch(on, off))
        if option.action == "store_true":
            switch = Switch(on)
            return Setting(
                knob, name, number is not None, script.source, place, number, None, switch
            )
        defaults = script.defaults_of(option)
        problem = None
        if option.is_positional:
            problem = "is an argument of the command without a name"
        elif option.action not in ("", "store", "BooleanOptionalAction"):
            problem = f"is an option with action={option.action!r}"
        elif number is not None:
            if "=" in command[number]:
                return of_word(command, number, knob, name)
            if number + 1 < len(command) and command[number] in option.names:
                return of_word(command, number + 1, knob, name)
            if number + 1 < len(command) and command[number].startswith("--"):
                return of_word(command, number + 1, knob, name)
            problem = f"is given as {command[number]} on the command line"
        elif not defaults:
            problem = f"is option {on}, which has no value"
        if problem is not None:
            return Setting(knob, name, None, script.source, place, problem=problem)
        return self._one(knob, at, script, [e for node in defaults for e in script.ends(node)])


def _by_place(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, one for each place."""
    found: dict[object, Setting] = {}
    for setting in settings:
        place = setting.location
        key = (setting.source and setting.source.path, place and place.start, setting.word)
        found.setdefault(key, setting)
    return list(found.values())


def _listed(places: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(places))
