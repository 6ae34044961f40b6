"""A program with other values: what changes in its files and on its command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import InputError, Problem
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.edit.place import Location, NotWritableError, is_same, is_wanted
from tuner.program.edit.source import TextEdit, diff_of
from tuner.program.edit.trying import Edit, Seen, edited, listed
from tuner.program.edit.write import replace_files
from tuner.program.program import Program
from tuner.program.settings import Settings


@dataclass(frozen=True, slots=True)
class Change:
    """A program and what it becomes."""

    before: Program = field(repr=False)
    after: Program = field(repr=False)
    values: Mapping[str, KnobValue]

    @property
    def difference(self) -> str:
        """A unified diff of the files; below it the command, where that changes."""
        texts = [
            diff_of(source.path, source.data, self.after.files[word].data, context=1)
            for word, source in self.before.files.items()
        ]
        if self.before.command != self.after.command:
            texts.append(f"-$ {shlex.join(self.before.command)}\n")
            texts.append(f"+$ {shlex.join(self.after.command)}\n")
        return "".join(texts)

    @property
    def files(self) -> dict[Path, tuple[bytes, bytes]]:
        """The files that change, with what they hold before and after."""
        pairs = zip(self.before.sources, self.after.sources, strict=True)
        return {o.path: (o.data, n.data) for o, n in pairs if o.data != n.data}

    def write(self) -> dict[Path, Path]:
        """Write the files; returns the dated copies of the old ones. See `replace_files`."""
        return replace_files(self.files)


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A place in a file that a space's own table names with `expression`, and its new value."""

    name: str
    expression: str
    word: str
    """The file, by its word in the program."""
    place: Location
    value: KnobValue
    problem: str | None = None

    @property
    def edits(self) -> Sequence[Edit]:
        """The change of the file; none where it says the value."""
        if is_wanted(self.place.value, self.value):
            return []
        text = self.place.written(self.place.render(self.value))
        return [(self.word, TextEdit(self.place.start, self.place.end, text))]

    def obstacle(self, program: Program, beside: Sequence[Edit] = ()) -> Problem | None:
        """The obstacle to writing the value, `beside` other changes."""
        named = f"{self.place.where(program.files[self.word].path)} {self.name}"
        if is_wanted(self.place.value, self.value):
            return None
        if self.problem is not None:
            return Problem(f"{self.problem}: set it to {show(self.value)} by hand", named)
        return _obstacle(program, beside, lambda: self.edits, named)


def change(
    settings: Settings, values: Mapping[str, KnobValue], table: Sequence[FileSetting] = ()
) -> Change:
    """The program with other values of parameters, read again to prove each of them.

    Raises one `InputError` with all values that cannot be written, each with the line to change.
    """
    program, before = settings.program, settings.trial.seen
    edits: list[Edit] = []
    problems: list[Problem] = []
    for one in table:
        if (problem := one.obstacle(program, edits)) is not None:
            problems.append(problem)
        else:
            edits += one.edits
    if not problems:
        _prove_table(program, edited(program, edits), table)
    lacking: list[Problem] = []
    for knob, value in values.items():
        if is_wanted(before.values.get(knob), value):
            continue
        way = settings.trial.way(knob)
        if way is None or knob in before.unknown:
            lacking.append(by_hand(settings, knob, value))
            continue
        ours, named = partial(way.edits, value), f"{way.where} {way.name}"
        if (problem := _obstacle(program, edits, ours, named)) is not None:
            problems.append(problem)
        else:
            edits += ours()
    # A value that is computed may follow from the others.
    if problems or (lacking and not edits):
        raise InputError("not every value can be written", problems=problems + lacking)
    after = edited(program, edits)
    wrong = list(_wrong(settings, settings.trial.reading(after), values)) if values else []
    if wrong:
        text = (
            "not every value can be written" if lacking else "the values cannot be written safely"
        )
        raise InputError(text, problems=lacking or wrong)
    return Change(program, after, dict(values))


def by_hand(settings: Settings, knob: str, value: KnobValue) -> Problem:
    """The line at which you can set what this can't."""
    found = settings.get(knob)
    if found is not None and (found.value is None or settings.trial.is_given(knob)):
        where = f"{found.where} {found.name}".strip()
        return Problem(f"{found.problem}: set it to {show(value)} by hand", where)
    beside = settings.get("micro_batch")
    near = f", beside micro_batch ({beside.where})" if beside is not None and beside.where else ""
    return Problem(f"nothing in the program sets {knob}: set it to {show(value)} by hand{near}")


def _obstacle(
    program: Program, edits: Sequence[Edit], ours: Callable[[], Sequence[Edit]], named: str
) -> Problem | None:
    """The obstacle to more changes beside `edits`."""
    try:
        edited(program, [*edits, *ours()])
    except NotWritableError as error:
        return Problem(f"{error}: change it by hand", named)
    except ValueError:
        return Problem("sets something else too, which is to get another value", named)
    return None


def _prove_table(program: Program, after: Program, table: Sequence[FileSetting]) -> None:
    """Every place of the table has its value, and every other place of its files has its own."""
    wrong = []
    for word in dict.fromkeys(one.word for one in table):
        source = program.files[word]
        wanted = {one.place.start: one.value for one in table if one.word == word}
        set_ = [p.path for p in source.places if p.start in wanted and p.path]
        old, new = (
            [p for p in places if p.path and not any(p.path[: len(n)] == n != p.path for n in set_)]
            for places in (source.places, after.files[word].places)
        )
        for was, now in zip(old, new, strict=len(old) == len(new)):
            is_right = was.path == now.path and (
                is_wanted(now.value, wanted[was.start]) if was.start in wanted
                else now.raw == was.raw or any(was.start <= start <= was.end for start in wanted)
            )  # fmt: skip
            if not is_right:
                wrong.append(Problem("would change too", source.at(was)))
    if wrong:
        raise InputError("the values cannot be written safely", problems=wrong)


def _wrong(settings: Settings, seen: Seen, values: Mapping[str, KnobValue]) -> Iterator[Problem]:
    """The values that do not arrive, and the settings that would change with them."""
    before = settings.trial.seen.values
    if not seen.values:
        yield Problem("the program could not be read with them")
        return
    differing = sorted(settings.trial.seen.differing(seen))
    others = [n for n in differing if n not in (*PROGRAM_NAMES, *before, *seen.values)]
    if others:
        yield Problem(f"{listed(others)} would change too")
    for knob in dict.fromkeys((*values, *differing)):
        if knob in others:
            continue
        read = seen.values.get(knob)
        wanted = values.get(knob, before.get(knob))
        if read == wanted or is_same(wanted, read) or (read is None and wanted is False):
            continue
        shown = "nothing" if read is None else show(read)
        text = "stay as it is" if knob not in values else f"be {show(wanted)}"
        yield Problem(f"{knob} is to {text}, and would read as {shown}")
