"""Plans changes to files, and checks them before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.expressions import show
from tuner.program.edit.assign import Assignment
from tuner.program.edit.place import Location, NotWritableError, is_wanted
from tuner.program.edit.source import PYTHON, Edit, SourceFile, diff_of, open_source, stale_comments
from tuner.space.apply import Path as KeySteps
from tuner.space.apply import show_path

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One file: what it holds, and what it is to hold. `kept` counts values that are right."""

    path: Path
    before: bytes
    after: bytes
    changes: tuple[Edit, ...]
    kept: int

    def diff(self) -> str:
        """The change as a unified diff; empty when there is none."""
        return diff_of(self.path, self.before, self.after)


@dataclass(frozen=True, slots=True)
class EditPlan:
    """The changes to write, with values whose key is `missing` in all files, or was `reached`.

    `notes` tell about side effects. `before` has the present values by expression.
    """

    files: tuple[FileEdit, ...]
    missing: tuple[Assignment, ...]
    reached: tuple[Assignment, ...] = ()
    notes: tuple[str, ...] = ()
    before: Mapping[str, object] = field(default_factory=dict)

    @property
    def changed(self) -> tuple[FileEdit, ...]:
        """The files that would not stay as they are."""
        return tuple(file for file in self.files if file.before != file.after)


@dataclass(frozen=True, slots=True)
class Following:
    """The program's view of its files.

    `set_at` follows a name in a Python file to its value. `used` gives the paths of the values in a
    file that the program reads.
    """

    set_at: Callable[[SourceFile, Location], Location | None] = lambda source, place: None
    used: Callable[[SourceFile], Collection[KeySteps]] = lambda source: ()


def make_plan(
    paths: Sequence[Path], assignments: Sequence[Assignment], following: Following | None = None
) -> EditPlan:
    """Plan `assignments` in the files at `paths`, without writing anything.

    A value goes to every file that has its key, or to those that the assignment names. Raises one
    `InputError` with everything that cannot be done safely.
    """
    planner = _Planner(following or Following())
    sources = planner.open(paths)
    for assignment in assignments:
        for source in sources:
            if assignment.is_for(source.path):
                planner.assign(source, assignment)
    planner.note_entries()
    missing = planner.missing(assignments)
    planner.note_required(missing, sources)
    if not planner.problems and not planner.met:
        raise _nothing_found(sources, assignments)
    edits = [] if planner.problems else [planner.edit(source) for source in sources]
    if planner.problems:
        count = len(planner.problems)
        raise InputError(
            f"nothing written: {count} problem{'s' if count > 1 else ''}",
            problems=planner.problems,
            hint="name another key with --map KNOB=KEY, or leave a value out with --map KNOB=",
        )
    reached = tuple(a for a in assignments if id(a) in planner.met)
    notes = [note for source in sources for note in planner.notes(source)]
    return EditPlan(tuple(edits), tuple(missing), reached, tuple(notes), planner.before)


@dataclass(slots=True)
class _Planner:
    """Collects changes by file, and all problems.

    `met` are the assignments whose key exists; `deferred` are keys that take their value from
    another place, which is fine if that is written.
    """

    following: Following
    problems: list[Problem] = field(default_factory=list)
    wanted: dict[Path, dict[Span, Edit]] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    written: set[object] = field(default_factory=set)
    deferred: list[tuple[Assignment, Problem]] = field(default_factory=list)
    entries: dict[_Entries, list[tuple[Assignment, list[Location]]]] = field(default_factory=dict)
    before: dict[str, object] = field(default_factory=dict)

    def open(self, paths: Sequence[Path]) -> list[SourceFile]:
        seen: set[Path] = set()
        sources: list[SourceFile] = []
        for path in paths:
            if path.resolve() in seen:
                self.problems.append(Problem("this file is given twice", str(path)))
                continue
            seen.add(path.resolve())
            try:
                sources.append(open_source(path))
            except InputError as error:
                self.problems.append(Problem(error.message))
        self.wanted = {source.path: {} for source in sources}
        return sources

    def assign(self, source: SourceFile, assignment: Assignment) -> None:
        places = source.find(assignment.key)
        if not places:
            return
        self.met.add(id(assignment))
        # `Trainer(batch=config["batch"])` beside `config = {"batch": 4}`: the value stands there.
        places = [p for p in places if not p.is_reference] or self._followed(source, places)
        place = places[0]
        if len(places) > 1:
            entries = _Entries.of(source, places)
            self.entries.setdefault(entries, []).append((assignment, places))
        elif place.is_reference and not assignment.required:
            self.deferred.append((assignment, _refusal(source, place, assignment)))
        else:
            self._change(source, place, assignment)

    def _followed(self, source: SourceFile, places: list[Location]) -> list[Location]:
        """The places where references get their values; the references themselves if unknown."""
        if source.path.suffix not in PYTHON:
            return places
        targets = [self.following.set_at(source, place) for place in places]
        found = {target.start: target for target in targets if target is not None}
        return list(found.values()) if found and None not in targets else places

    def note_entries(self) -> None:
        """Settle keys that occur several times, by the entry that the program uses.

        An open choice is one problem, whatever the number of keys below it.
        """
        for entries, waiting in self.entries.items():
            used = entries.used(self.following.used(entries.source))
            for assignment, places in waiting:
                if used is not None:
                    [place] = [p for p in places if entries.name_in(p) == used]
                    self._change(entries.source, place, assignment)
            if used is None:
                self.problems.append(entries.problem(waiting))
                self.written.update(_meaning(a) for a, _ in waiting)  # that is said once

    def notes(self, source: SourceFile) -> Iterator[str]:
        """Aliases that change with a value, and comments that name the old one."""
        edits = [e for e in self.wanted[source.path].values() if e.text != e.place.raw]
        for edit in edits:
            span = (edit.place.start, edit.place.end)
            for place in source.places if edit.place.language == "yaml" else ():
                if (place.start, place.end) == span and place.path != edit.place.path:
                    yield (
                        f"{source.path}: {show_path(place.path)} is an alias of "
                        f"{show_path(edit.place.path)}, and becomes {show(edit.value)} too"
                    )
        yield from stale_comments(source, edits)

    def _change(self, source: SourceFile, place: Location, assignment: Assignment) -> None:
        self.written.add(_meaning(assignment))
        if assignment.stage is None:
            self.before.setdefault(assignment.expression, place.value)
        value = assignment.value
        if is_wanted(place.value, value):
            change = Edit(place, value, place.raw)
        elif place.problem is not None:
            self.problems.append(_refusal(source, place, assignment))
            return
        else:
            try:
                change = Edit(place, value, place.render(value))
            except NotWritableError as error:
                self.problems.append(Problem(str(error), source.at(place)))
                return
        other = self.wanted[source.path].setdefault((place.start, place.end), change)
        if other.text != change.text:
            text = f"would become {show(other.value)} and also {show(value)}"
            self.problems.append(Problem(text, source.at(place)))

    def missing(self, assignments: Sequence[Assignment]) -> list[Assignment]:
        """The assignments whose key no file has, one for each value."""
        reached = {_meaning(a) for a in assignments if id(a) in self.met}
        asked = {_asked(a) for a in assignments if a.required and id(a) in self.met}
        found: dict[object, Assignment] = {}
        for assignment in assignments:
            if id(assignment) in self.met:
                continue
            if assignment.required and _asked(assignment) not in asked:
                found[_asked(assignment)] = assignment
            elif _meaning(assignment) not in reached:
                optional = dataclasses.replace(assignment, required=False)
                found.setdefault(_meaning(assignment), optional)
        return list(found.values())

    def note_required(self, missing: Sequence[Assignment], sources: Sequence[SourceFile]) -> None:
        """Note what the user asked for and is not there, and values taken over from nowhere."""
        self.problems += [p for a, p in self.deferred if _meaning(a) not in self.written]
        # Where no file could be read, that has been said, and nothing is known of their keys.
        self.problems += [_not_there(a, sources) for a in missing if a.required and sources]

    def edit(self, source: SourceFile) -> FileEdit:
        """The file with its changes, read again to see that nothing else became different."""
        wanted = self.wanted[source.path].values()
        changes = sorted(
            (c for c in wanted if c.text != c.place.raw), key=lambda change: change.place.start
        )
        after = source.changed(changes)
        if changes and not source.reads_as_wanted(after, changes):
            lines = ", ".join(change.place.spot for change in changes)
            text = f"cannot be changed safely in {lines}: it would read back as something else"
            self.problems.append(Problem(text, str(source.path)))
        return FileEdit(source.path, source.data, after, tuple(changes), len(wanted) - len(changes))


def _meaning(assignment: Assignment) -> object:
    """Two keys of one meaning are two names for it: one of them is enough."""
    return assignment.expression, assignment.stage


def _asked(assignment: Assignment) -> object:
    return assignment.key, assignment.expression, assignment.only


def _refusal(source: SourceFile, place: Location, assignment: Assignment) -> Problem:
    text = f"{place.problem}; it is to become {show(assignment.value)}"
    return Problem(f"{text}: {source.line(place)}", source.at(place))


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of one mapping (`MODELS["7b"]`, `MODELS["27b"]`) that have the same key.

    `prefix` is the path of the mapping, `names` are the entries; empty if they are no such entries.
    """

    path: Path
    prefix: KeySteps
    names: tuple[str | int, ...]
    source: SourceFile = field(compare=False)

    @classmethod
    def of(cls, source: SourceFile, places: Sequence[Location]) -> _Entries:
        paths = [place.path for place in places]
        depth = next(
            (n for n, steps in enumerate(zip(*paths, strict=False)) if len(set(steps)) > 1), 0
        )
        names = tuple(path[depth] if depth < len(path) else "" for path in paths)
        own = names if len(set(names)) == len(names) else ()
        return cls(source.path, paths[0][:depth], own, source)

    def name_in(self, place: Location) -> str | int:
        return place.path[len(self.prefix)]

    def used(self, paths: Collection[KeySteps]) -> str | int | None:
        """The only entry that the values at `paths` stand in; None where there is not one."""
        depth = len(self.prefix)
        found = {
            path[depth]
            for path in paths
            if path[:depth] == self.prefix and len(path) > depth and path[depth] in self.names
        }
        return found.pop() if len(found) == 1 else None

    def problem(self, waiting: Sequence[tuple[Assignment, list[Location]]]) -> Problem:
        """The open choice, with the lines to change by hand."""
        assignment, places = waiting[0]
        where = ", ".join(f"{p.spot} ({show_path(p.path)})" for p in places)
        if len(waiting) == 1:
            text = f"{assignment.key} is there {len(places)} times: {where}"
            return Problem(text, str(self.source.path))
        values = ", ".join(f"{a.key} = {show(a.value)}" for a, _ in waiting)
        text = (
            f"{len(waiting)} keys are there {len(places)} times, {assignment.key} in {where}: name "
            "the program that is trained, with its arguments, after --, or change those of its "
            f"entry by hand: {values}"
        )
        return Problem(text, str(self.source.path))


def _not_there(assignment: Assignment, sources: Sequence[SourceFile]) -> Problem:
    meant = [source for source in sources if assignment.is_for(source.path)]
    paths = {show_path(p.path) for s in meant for p in s.places if p.path}
    close = nearest(str(assignment.key).lstrip("."), paths)
    hint = f" (did you mean {close!r}?)" if close else ""
    if not meant:
        wanted = repr(assignment.only) if assignment.only else "of a stage, and the stages differ"
        return Problem(f"none of the files is {wanted}", f"--map {assignment.key}")
    return Problem(f"there is no {assignment.key}{hint}", ", ".join(str(s.path) for s in meant))


def _nothing_found(sources: Sequence[SourceFile], assignments: Sequence[Assignment]) -> InputError:
    tried = ", ".join(dict.fromkeys(str(assignment.key) for assignment in assignments))
    return InputError(
        f"none of the keys that are known for this space is in "
        f"{', '.join(str(source.path) for source in sources)}",
        hint=f"{f'looked for {tried}; ' if tried else ''}say where a value belongs with "
        "--map KNOB=KEY",
    )
