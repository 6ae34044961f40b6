"""The settings in a program's files and on its command line, under the names of knobs.

A value that takes another's place is followed: `per_device_train_batch_size=BATCH_SIZE` is set
where `BATCH_SIZE = 4` stands, `args.batch` where its option has a default, or on the command line.
A value that may come from several places, or from none that is known, is a setting with a problem.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tuner.core.records import KnobValue
from tuner.program.edit.place import Location, Value
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.knob_names import (
    BOOLEANS,
    NAMES,
    SWITCHES,
    as_named,
    is_meant,
    is_other,
    is_trainers_call,
    typed,
    words_of,
)
from tuner.program.names import (
    End,
    Environment,
    Literal,
    OptionValue,
    OutsideKeys,
    Script,
)
from tuner.program.parsed import Option, last_name
from tuner.program.program import Program
from tuner.space.apply import Path

_MOST_STEPS = 8
"""From one `${...}` to the next; more is a circle."""


@dataclass(frozen=True, slots=True)
class Switch:
    """The words that turn an option on and off; without `off` it is off where it is not there."""

    on: str
    off: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One knob of a program: where its value is set, or why it cannot be changed there.

    `name` is what the program calls it. `word` is the number of the word of the command that sets
    it, where one does; else `source` and `location` say where it stands. `switch` is there where
    an option without a value sets it.
    """

    knob: str
    name: str
    value: Value = None
    source: SourceFile | None = None
    location: Location | None = None
    word: int | None = None
    problem: str | None = None
    switch: Switch | None = None

    @property
    def where(self) -> str:
        """For people: "train.py:12", or "the command line"."""
        if self.word is not None or self.source is None or self.location is None:
            return "the command line"
        return f"{self.source.path}:{self.location.line}"

    def written(self, value: KnobValue) -> KnobValue:
        """What the program is to say for a value of the knob."""
        return as_named(self.name, value)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A place that may be the one of a knob: `strength` is how surely, less is more."""

    name: str
    strength: tuple[int, int]
    source: SourceFile
    place: Location
    script: Script | None = None
    node: ast.expr | None = None
    option: Option | None = None
    trains: bool = False
    """It says itself that it is about the data of the training."""

    @property
    def is_argument(self) -> bool:
        return self.script is not None and self.strength[0] == 0


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


@dataclass(frozen=True, slots=True)
class _Data:
    """A file of settings, and every value in it by its whole path."""

    source: SourceFile
    is_named: bool
    """Whether people named it: what code only mentions it may also write."""
    places: Sequence[Location]


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
            _Data(
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
                text = word.partition("=")[2] if _names_itself(word) else word
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
                word = self._word((name,), knob)
                if word is not None:
                    return word
        return setting

    # -- candidates --------------------------------------------------------------------------

    def _of_files(self, knob: str, names: Sequence[str]) -> tuple[Setting | None, bool]:
        """The setting, and whether it is written out as the argument of a call."""
        candidates = [*self._in_python(knob, names), *self._in_data(knob, names)]
        for strength in sorted({c.strength for c in candidates}):
            same = [c for c in candidates if c.strength == strength]
            same = [c for c in same if c.trains] or same
            pairs = [(c, self._followed(knob, c)) for c in same]
            # The name of a constant is a guess; a variable that holds some object is none.
            pairs = [(c, s) for c, s in pairs if c.strength[0] < 2 or s.problem is None]
            ends: dict[object, Setting] = {}
            for _, setting in pairs:
                place = setting.location
                span = (setting.source and setting.source.path, place and place.start, setting.word)
                ends.setdefault(span, setting)
            if not ends:
                continue
            settings = list(ends.values())
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

    def _in_python(self, knob: str, names: Sequence[str]) -> Iterator[_Candidate]:
        for script in self.scripts:
            for place in script.source.places:
                own = str(place.path[-1]).lower() if place.path else ""
                node = script.node_at(place) if own in names else None
                if node is None or isinstance(node, ast.Dict | ast.List | ast.Tuple):
                    continue
                kind = _kind(script, place, node)
                around = [*map(str, place.path[:-1]), *script.around(node)]
                call = script.keyword_of(node)
                about = [*around, *_data_of(script, call)]
                if kind is None or is_other(about) or not is_meant(knob, own, around):
                    continue
                trains = any("train" in words_of(text) for text in about) or _shuffles(call)
                loader = call is not None and last_name(call.func) == "DataLoader"
                yield _Candidate(
                    str(place.path[-1]), (kind, names.index(own)), script.source, place, script,
                    node, trains=trains and loader,
                )  # fmt: skip
            for option in script.options:
                spelled = {option.dest.lower(), *(_plain(n) for n in option.names)}
                for own in [name for name in names if name in spelled and len(name) > 1][:1]:
                    place = script.place_of(option.call)
                    yield _Candidate(
                        own, (2, names.index(own)), script.source, place, script, option=option
                    )

    def _in_data(self, knob: str, names: Sequence[str]) -> Iterator[_Candidate]:
        for data in self.data:
            source = data.source
            is_deepspeed = any(p.path[:1] == ("zero_optimization",) for p in data.places)
            for place in data.places:
                own = str(place.path[-1]).lower() if place.path else ""
                if own not in names or place.value == "auto" or _is_collection(place):
                    continue
                if is_deepspeed and own == "train_batch_size":
                    continue  # of all GPUs and all micro-batches together
                above = [str(step) for step in place.path[:-1]]
                if not is_other(above) and is_meant(knob, own, above):
                    name = str(place.path[-1])
                    kind = 0 if data.is_named else 2
                    yield _Candidate(name, (kind, names.index(own)), source, place)

    # -- following a value -------------------------------------------------------------------

    def _followed(self, knob: str, candidate: _Candidate) -> Setting:
        name, script = candidate.name, candidate.script
        if script is None:
            return self._in_file(knob, name, candidate.source, candidate.place)
        if candidate.option is not None:
            return self._of_option(knob, name, script, candidate.option)
        assert candidate.node is not None
        return self._one(knob, candidate, script, script.ends(candidate.node))

    def _one(self, knob: str, at: _Candidate, script: Script, ends: Sequence[End]) -> Setting:
        """The one setting that `ends` lead to; with a problem where there is not one."""
        found: dict[object, Setting] = {}
        for end in ends:
            setting = self._settled(knob, at, script, end)
            place = setting.location
            key = (setting.source and setting.source.path, place and place.start, setting.word)
            found.setdefault(key, setting)
        settings = list(found.values())
        if len(settings) == 1:
            return settings[0]
        where = _listed(s.where for s in settings)
        shown = " ".join(at.place.raw.split())[:60]
        problem = f"is {shown}, which is set in several places ({where})"
        return Setting(knob, at.name, None, at.source, at.place, problem=problem)

    def _settled(self, knob: str, at: _Candidate, script: Script, end: End) -> Setting:
        node = end.option.call if isinstance(end, OptionValue) else end.node
        script = script.home_of(node)
        if isinstance(end, Literal):
            if end.option and (word := self._word((end.option,), knob, at.name)) is not None:
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
            line = script.place_of(end.node).line if hasattr(end.node, "lineno") else at.place.line
            problem = f"is {shown}, which {end.why} (line {line})"
        return Setting(knob, at.name, None, at.source, at.place, problem=problem)

    def _outside(self, knob: str, at: _Candidate, end: OutsideKeys) -> Setting | None:
        """What the keys of some object are set to: by a word, in a file, or by an option."""
        keys = end.keys
        if (word := self._word(keys, knob, at.name)) is not None:
            return word
        places = [(d.source, p) for d in self.data for p in d.places if not _is_collection(p)]
        ending = [(s, p) for s, p in places if p.path[-len(keys) :] == keys]
        for found in ([(s, p) for s, p in ending if p.path == keys], ending):
            if len(found) == 1:
                return self._in_file(knob, at.name, *found[0])
            if found:
                where = _listed(f"{s.path}:{p.line}" for s, p in found)
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
        """What stands in a file of settings, behind every `${...}`."""
        first = place
        for _ in range(_MOST_STEPS):
            word = self._word(place.path, knob, name)
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
        """What a script's own option is: by a word, or by its default."""
        place = script.place_of(option.call)
        at = _Candidate(name, (2, 0), script.source, place, script)
        number = None
        for index in range(self.first_word, len(self.program.command)):
            if self._is_option(script, option, self.program.command[index]):
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
                return _of_word(command, number, knob, name)
            if number + 1 < len(command) and command[number] in option.names:
                return _of_word(command, number + 1, knob, name)
            if number + 1 < len(command) and command[number].startswith("--"):
                return _of_word(command, number + 1, knob, name)
            problem = f"is given as {command[number]} on the command line"
        elif not defaults:
            problem = f"is option {on}, which has no value"
        if problem is not None:
            return Setting(knob, name, None, script.source, place, problem=problem)
        return self._one(knob, at, script, [e for node in defaults for e in script.ends(node)])

    def _is_option(self, script: Script, option: Option, word: str) -> bool:
        head = word.partition("=")[0]
        if head in option.names:
            return True
        if option.action == "BooleanOptionalAction" and head.startswith("--no-"):
            return f"--{head.removeprefix('--no-')}" in option.names
        if head.startswith("--"):
            others = {n for o in script.options for n in o.names}
            full = [n for n in others if n.startswith(head)]
            return head not in others and len(full) == 1 and full[0] in option.names
        short = [n for n in option.names if len(n) == 2 and n.startswith("-")]
        return any(head.startswith(n) and head[2:].isdigit() for n in short)

    def _word(self, path: Path, knob: str, name: str | None = None) -> Setting | None:
        """What the command sets at `path`: `--train.batch 4`, `train.batch=4`, `--batch=4`.

        A word may leave out the beginning of the path, and may have more before it.
        """
        command = self.program.command
        wanted = [_plain(str(step)) for step in path]
        found = None
        for number, word in enumerate(command[1:], 1):
            head, equals, _ = word.partition("=")
            parts = _plain(head).split(".")
            dashed = word.startswith("--")
            length = min(len(parts), len(wanted))
            if parts[-length:] != wanted[-length:] or not (dashed or equals):
                continue
            if len(parts) > len(wanted) and is_other(parts[:-length]):
                continue
            if name is None and not is_meant(knob, parts[-1], parts[:-1]):
                continue
            named = name or str(path[-1])
            following = command[number + 1] if number + 1 < len(command) else "--"
            if equals:
                found = _of_word(command, number, knob, named)
            elif knob in SWITCHES and following.lower() not in BOOLEANS:
                switch = Switch(word, f"{word}=false")
                found = Setting(knob, named, True, word=number, switch=switch)
            elif not following.startswith("--"):
                found = _of_word(command, number + 1, knob, named)
        return found


def _kind(script: Script, place: Location, node: ast.expr) -> int | None:
    """How surely a place of a Python file is a setting: 0, 1 or 2; None where it is none."""
    call = script.keyword_of(node)
    if call is None:
        owner = str(place.path[-2]) if len(place.path) > 1 else ""
        return 1 if is_trainers_call(owner) else 2
    called = last_name(call.func) or ""
    if called in ("add_argument", "option", "set_defaults", "field", "Field", "Option"):
        return None  # the option and the attribute are looked at themselves
    if is_trainers_call(called):
        return 0
    is_method = isinstance(call.func, ast.Attribute) and called[:1].islower()
    if is_method and called != "update" and "token" not in called:
        return None  # data.map(..., batch_size=1000)
    return 2


def arguments_of_trainers(source: SourceFile, places: Sequence[Location]) -> list[Location]:
    """Those of `places` that are arguments of a trainer's call, to which more can be added."""
    script = Script(source)
    found = []
    for place in places:
        node = script.node_at(place)
        call = script.keyword_of(node) if node is not None else None
        if call is None or not is_trainers_call(last_name(call.func) or ""):
            continue
        if all(keyword.arg is not None for keyword in call.keywords):
            found.append(place)
    return found


def _data_of(script: Script, call: ast.Call | None) -> list[str]:
    """The data that a loader is given, as it is written."""
    if call is None or last_name(call.func) != "DataLoader":
        return []
    given = call.args[:1] or [k.value for k in call.keywords if k.arg == "dataset"]
    return [script.shown(node) for node in given]


def _shuffles(call: ast.Call | None) -> bool:
    return call is not None and any(
        k.arg == "shuffle" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def _is_collection(place: Location) -> bool:
    return place.is_list or place.raw[:1] in ("{", "[") or (place.problem or "").startswith("is a ")


def _listed(places: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(places))


def _plain(option: str) -> str:
    return option.lstrip("-+").replace("-", "_").lower()


def _of_word(command: Sequence[str], number: int, knob: str, name: str) -> Setting:
    word = command[number]
    text = word.partition("=")[2] if _names_itself(word) else word
    return Setting(knob, name, typed(text, knob), word=number)


def _names_itself(word: str) -> bool:
    return bool(re.match(r"[-+]*[A-Za-z_][\w.-]*=", word))
