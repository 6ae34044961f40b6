"""Finds by trial where a setting is written: a literal is changed, and the program read again.

A place counts if the program, read with another value there, has that value in that setting and
every other setting as before. What is written nowhere is added beside something that is, and is
tried in the same way.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import InputError, TunerError
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.edit.literals import beside, call_at, in_call, literals_of, plain, rank
from tuner.program.edit.place import (
    Location,
    NotWritableError,
    in_words,
    is_same,
    read_number,
    truth,
)
from tuner.program.edit.source import PYTHON, SourceFile, TextEdit
from tuner.program.program import Program

COMMAND = ""
"""In place of a file: the words of the command, one in each of its parts between `_BETWEEN`."""
_BETWEEN = "\0"

_MOST_TRIES = 60
_MOST_SECONDS = 10.0
_MOST_UNNAMED = 20
"""The literals that are tried of those that nothing beside them names as the setting."""
_AT_ONCE = 2
_SIBLINGS = (
    "micro_batch", "grad_accum", "gradient_checkpointing", "optimizer", "max_length", "packing",
)  # fmt: skip
"""Settings that stand where others can be added."""
_PROBES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adafactor", "sgd"),
    "attention": ("eager", "sdpa"),
}

Read = Callable[[Program, bool], "Seen"]
"""Reads a program, with all answers of its unknown parts or, if false, with one."""

Edit = tuple[str, TextEdit]
"""A change of a file (its word in `Program.files`), or of the command."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A program as it was read: its settings in its own terms, by knob.

    `own` are those that its calls have, from which others of `values` may follow. `where` has for
    people the place of each in the call that takes it, `unknown` the reason for a value that
    reading can't tell, `given` the names that its calls were given (None: not known), `calls` the
    calls that arguments can be added to: file, line, column. `rest` is all else that reaches the
    training and may have an effect on its memory or time.
    """

    values: Mapping[str, KnobValue] = field(default_factory=dict)
    own: Mapping[str, object] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] | None = None
    calls: Sequence[tuple[str, int, int]] = ()
    rest: Mapping[str, object] = field(default_factory=dict)

    def differing(self, other: Seen) -> set[str]:
        """The settings that differ, and what else has an effect."""
        one, two = {**self.rest, **self.own}, {**other.rest, **other.own}
        return {n for n in one.keys() | two.keys() if one.get(n) != two.get(n)}


@dataclass(frozen=True, slots=True)
class Way:
    """A place that sets a parameter, under the program's `name` for it."""

    name: str
    where: str
    edits: Callable[[KnobValue], Sequence[Edit]]
    literal: Location | None = None
    file: str = COMMAND
    also: tuple[str, ...] = ()
    """Other parameters that the place sets too."""
    is_added: bool = False


class Trial:
    """A program, and the place of each of its settings; each is looked for once, when asked for."""

    def __init__(self, program: Program, read: Read) -> None:
        self.program = program
        self.read = read
        self.error: TunerError | None = None
        """The reason why the program as it is can't be read."""
        self.seen = self.reading(program)
        quick = self.reading(program, whole=False)
        self.is_whole = quick.values != self.seen.values
        self.base = self.seen if self.is_whole else quick
        self._written: dict[str, Way | None] = {}
        self._ways: dict[str, Way | None] = {}
        self._lock = threading.RLock()

    def reading(self, program: Program, *, whole: bool = True) -> Seen:
        """The settings of `program`, none where it can't be read; quicker if not `whole`."""
        try:
            return self.read(program, whole)
        except TunerError as error:
            if program is self.program:
                self.error = error
            return Seen()

    def way(self, knob: str) -> Way | None:
        """The place of a setting, or where it can be added; None if there is neither."""
        with self._lock:
            if knob not in self._ways:
                search = _Search(self, knob)
                way = self.written(knob, search)
                if way is None or way.also:
                    way = search.first(search.switches()) or way
                if way is None and knob in self.seen.values and self.seen.given is not None:
                    way = search.first(search.added())  # its trainer knows it
                self._ways[knob] = way
            return self._ways[knob]

    def written(self, knob: str, search: _Search | None = None) -> Way | None:
        """The literal of a setting, found by a `search`; None for one that is written nowhere."""
        with self._lock:
            if knob not in self._written:
                search = search or _Search(self, knob)
                self._written[knob] = search.first(search.literals()) or search.best
            return self._written[knob]

    def given_as(self, knob: str) -> list[str]:
        """The names by which the program's calls got the setting."""
        return [name for name in PROGRAM_NAMES[knob] if name in (self.seen.given or ())]

    def is_given(self, knob: str) -> bool:
        """False for what the program leaves to its trainer."""
        return self.seen.given is None or bool(self.given_as(knob))

    @cached_property
    def literals(self) -> list[tuple[str, Location]]:
        """The literals of the command and of all files, with the file."""
        words, script = list(self.program.command), self.program.shell or self.program.main
        number = words.index(script) if script in words else 0
        start = len(_BETWEEN.join(words[: number + 1]))  # behind the script, or the first word
        found = [(COMMAND, one) for one in in_words(command_text(self.program), start)]
        for word, source in self.program.files.items():
            found += [(word, one) for one in literals_of(source)]
        return found


class _Search:
    """Searches for the place of one setting, with `_MOST_TRIES` and for `_MOST_SECONDS`."""

    def __init__(self, trial: Trial, knob: str) -> None:
        self.trial, self.knob = trial, knob
        self.names = PROGRAM_NAMES[knob]
        self.old = trial.seen.values.get(knob)
        self.tries = 0
        self.ends = time.monotonic() + _MOST_SECONDS
        self.best: Way | None = None

    def first(self, ways: Iterable[Way]) -> Way | None:
        """The first of `ways` that sets this and nothing else, tried two at a time."""
        waiting = iter(ways)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while self.tries < _MOST_TRIES and time.monotonic() < self.ends:
                some = list(itertools.islice(waiting, _AT_ONCE))
                if not some:
                    break
                self.tries += len(some)
                for way in filter(None, pool.map(self._tried, some)):
                    if not way.also:
                        return way
                    self.best = self.best or way
        return None

    def _tried(self, way: Way) -> Way | None:
        """A place with what it sets beside this; None if it does not set this."""
        for probe in self._probes():
            try:
                program = edited(self.trial.program, way.edits(probe))
            except (NotWritableError, ValueError, InputError):
                continue
            seen = self.trial.reading(program, whole=self.trial.is_whole)
            if not seen.values:
                continue  # it ends with an error: perhaps of this value
            if not is_same(probe, seen.values.get(self.knob)):
                return None
            also = self.trial.base.differing(seen) - {self.knob}
            return replace(way, also=tuple(sorted(also)))
        return None

    def _probes(self) -> Sequence[KnobValue]:
        old = self.old
        if isinstance(old, bool):
            return [not old]
        if isinstance(old, int):
            return [old * 2, old // 2 if old > 1 else old + 2] if old else [8]
        if old is None:
            return {"micro_batch": [2, 4], "grad_accum": [2, 4], "lora_rank": [8]}.get(
                self.knob, [True]
            )
        return [word for word in _PROBES.get(self.knob, ()) if not is_same(word, old)][:1]

    # -- what is written -----------------------------------------------------------------------

    def literals(self) -> Iterator[Way]:
        """Literals that equal the value, those with the names of the setting first."""
        if self.old is None:
            return
        found = []
        for number, (file, one) in enumerate(self.trial.literals):
            near = rank(one.names, self.names)
            inverse = self._equals(one, near)
            if inverse is not None:
                found.append(((near, file != COMMAND, number), self._at(file, one, inverse)))
        found.sort(key=lambda pair: pair[0])
        unnamed = _MOST_UNNAMED if self.trial.is_given(self.knob) else 0
        count = 0
        for (near, *_), way in found:
            count += near > 2
            if near <= 2 or (count <= unnamed and self.best is None):
                yield way

    def _equals(self, one: Location, near: int) -> bool | None:
        """False for a literal with the value, True for one with the opposite, else None."""
        value, old = one.value, self.old
        if value is None:
            return False if near == 0 else None
        said = truth(value)
        if said is not None and isinstance(old, bool):
            # Python has many numbers that are 1 or 0.
            is_likely = isinstance(value, bool | str) or one.language != "python"
            return said is not old if near <= 2 or (is_likely and said is old) else None
        if is_same(value, old) and not isinstance(value, bool):
            return False
        is_text = isinstance(value, str) and isinstance(old, str)
        return False if is_text and near == 0 and self.knob in _PROBES else None

    def _at(self, file: str, one: Location, inverse: bool) -> Way:
        old = one.value
        says_number = isinstance(old, str) and read_number(old) is not None

        def edits(value: KnobValue) -> Sequence[Edit]:
            new = not value if inverse else value
            # A number in quotes stays there. A value of another kind is tried as the program's own.
            is_number = isinstance(new, int | float) and not isinstance(new, bool)
            keeps = is_number and (isinstance(old, float) or says_number)
            text = one.written(replace(one, value=old if keeps else None).render(new))
            return [(file, TextEdit(one.start, one.end, text))]

        named = [name for name in one.names if plain(name) in self.names]
        if not named and rank(one.names, self.names) < 3:
            named = list(one.names)
        name = next(iter(named or self.trial.given_as(self.knob)), self.knob).lstrip("-")
        return Way(name, self._where(file, one), edits, one, file)

    def _where(self, file: str, one: Location) -> str:
        if file == COMMAND:
            return "the command line"
        return one.where(self.trial.program.files[file].path)

    # -- options without a value -----------------------------------------------------------------

    def switches(self) -> Iterator[Way]:
        """Options that are on where their word stands: `--packing`, `--no-packing`."""
        if not isinstance(self.old, bool):
            return
        text = command_text(self.trial.program)
        farthest = 3 if self.trial.is_given(self.knob) else 2
        words = [
            (near, one)
            for file, one in self.trial.literals
            if file == COMMAND and one.raw[0] == "-" and text[one.start - 1] == _BETWEEN
            if (near := rank([one.raw], self.names)) <= farthest
        ]
        for _, place in sorted(words, key=lambda pair: pair[0]):
            yield self._words(place.raw, TextEdit(place.start - 1, place.end, ""))
            other = f"--no-{place.raw.lstrip('-').removeprefix('no-')}"
            yield self._words(place.raw, TextEdit(place.start, place.end, other))
            no = f"{place.raw}{_BETWEEN}{show(not self.old)}"
            yield self._words(place.raw, TextEdit(place.start, place.end, no))
        options = {
            (near, str(one.value))
            for _, one in self.trial.literals
            if re.fullmatch(r"--[A-Za-z][\w-]*(/--[\w-]+)?", str(one.value))
            if (near := rank([str(one.value)], self.names)) <= farthest
        }
        for near, option in sorted(options)[:_MOST_UNNAMED]:
            for word in (*option.split("/"), *([f"--no-{option[2:]}"] if near <= 2 else [])):
                if word not in self.trial.program.command:
                    yield self._words(word, TextEdit(len(text), len(text), _BETWEEN + word))

    def _words(self, word: str, edit: TextEdit) -> Way:
        def edits(value: KnobValue) -> Sequence[Edit]:
            return [] if value == self.old else [(COMMAND, edit)]

        return Way(plain(word), "the command line", edits)

    # -- what is written nowhere -------------------------------------------------------------------

    def added(self) -> Iterator[Way]:
        """The setting beside another, in a call that takes it, and behind the command.

        What a call gets already can only be a word, which its parser takes in place of a default.
        """
        program = self.trial.program
        siblings = [n for n in _SIBLINGS if n != self.knob and n in self.trial.seen.values]
        ways = [self.trial.written(n) for n in siblings if self.trial.is_given(n)]
        holders = [w for w in ways if w is not None and w.literal is not None and w.file != COMMAND]
        done: set[object] = set()
        is_given = bool(self.trial.given_as(self.knob))
        for way in holders if not is_given else ():
            assert way.literal is not None
            source, spot = program.files[way.file], (way.file, way.literal.names[1:])
            if source.path.suffix not in PYTHON and way.literal.names and spot not in done:
                done.add(spot)
                where = self._where(way.file, way.literal)
                yield from self._added(where, way.file, partial(beside, source, way.literal))
        for file, line, column in self.trial.seen.calls if not is_given else ():
            held = program.files.get(file)
            call = call_at(held, line, column) if held is not None else None
            if held is not None and call is not None:
                yield from self._added(f"{held.path}:{line}", file, partial(in_call, held, call))
        text = command_text(program)
        ends = [w.literal.end for w in ways if w and w.literal and w.file == COMMAND]
        end = ends[0] if ends and text[ends[0] : ends[0] + 1] in ("", _BETWEEN) else len(text)

        def word(name: str, value: KnobValue) -> list[TextEdit]:
            return [TextEdit(end, end, f"{_BETWEEN}--{name}{_BETWEEN}{show(value)}")]

        yield from self._added("the command line", COMMAND, word)

    def _added(
        self, where: str, file: str, text: Callable[[str, KnobValue], Sequence[TextEdit]]
    ) -> Iterator[Way]:
        """The setting under each of its names, as `text` writes it into a file."""
        for name in self.names:
            if len(name) < 3:
                continue

            def edits(value: KnobValue, name: str = name) -> Sequence[Edit]:
                is_off = isinstance(value, bool) and name.startswith("disable_")
                return [(file, edit) for edit in text(name, not value if is_off else value)]

            yield Way(name, where, edits, is_added=True)


def listed(names: Sequence[str]) -> str:
    """The names for people, the first three of them."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3]) if more else ' and '.join(names)}{more}"


def command_text(program: Program) -> str:
    """The command as one text, whose words a zero parts."""
    return _BETWEEN.join(program.command)


def edited(program: Program, edits: Sequence[Edit]) -> Program:
    """`program` with other texts; `ValueError` where two edits change the same characters."""
    by_file: dict[str, list[TextEdit]] = {}
    for file, edit in edits:
        ours = by_file.setdefault(file, [])
        clash = [o for o in ours if max(o.start, edit.start) < min(o.end, edit.end)]
        if any(other != edit for other in clash):
            raise ValueError("two values for one place")
        follows = edit.text[:1].isalpha() and any(o.start == edit.start == o.end for o in ours)
        if not clash:
            ours.append(replace(edit, text=f", {edit.text}") if follows else edit)
    files = dict(program.files)
    command = program.command
    for file, ours in by_file.items():
        if file == COMMAND:
            text = SourceFile(Path(), command_text(program).encode()).edited(ours)
            command = tuple(text.decode().split(_BETWEEN))
        else:
            files[file] = replace(files[file], data=files[file].edited(ours))
    return replace(program, files=files, command=command)
