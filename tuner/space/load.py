"""Finds search spaces by name or file, and reads them, with every problem by its line."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from tuner.core.errors import InputError, unknown
from tuner.core.expressions import settings_text
from tuner.core.files import shipped_places
from tuner.core.records import KnobValue
from tuner.core.setup.schemas import SCHEMAS, KnobSchema
from tuner.space import document, rules
from tuner.space.apply import ApplyTarget, check_apply, read_apply
from tuner.space.command import COMMAND, PROGRAM, read_command
from tuner.space.data import DataFacts, read_data
from tuner.space.knobs import Knob, read_knob, read_order, read_value
from tuner.space.knobs import own_terms as terms_of_own_code
from tuner.space.searchspace import (
    DEFAULT_OBJECTIVES,
    METRICS,
    ObjectiveName,
    SearchSpace,
    complete_space,
)
from tuner.space.settings import configure

KEYS = (
    "name", "description", "workload", "model", "gpus", "knobs", "fixed", "derived", "constraints",
    "floors", "data", "objectives", "stages", "baseline", "apply", "command", "program", "cwd",
    "env", "samples_per_step", "progress", "memory",
)  # fmt: skip
REQUIRED = ("name", "workload", "model", "knobs")
_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
"""A workload of the user's own: package.module:object."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_ITEMS = 100
_STAGE_TERMS = {
    "examples": KnobSchema(
        "examples", "int", "training examples of the stage", default=1, minimum=1
    ),
    "epochs": KnobSchema("epochs", "float", "epochs of the stage", default=1.0, minimum=1e-6),
}


def read_space(text: str, file: str, *, path: Path | None = None) -> SearchSpace:
    """The search space that `text` describes; `file` names it in messages.

    Raises one `InputError` with everything that is wrong, each with its line.
    """
    problems = document.Problems(file)
    root = document.Place(problems, document.compose(text, file), "")
    entries = root.mapping(allowed=KEYS)
    space = _Reader(entries, problems).space(path)
    # Code of the user's own brings its model itself, and a command is a workload.
    optional = {"workload": space.command, "model": not space.predictable}
    for name in REQUIRED:
        if name not in entries and not optional.get(name):
            root.add(f"{name} is missing")
    check_expressions(space, problems)
    problems.check()
    check_meaning(space, problems)
    problems.check()
    return space


class _Reader:
    """Reads each part of a space, and keeps where it came from ("constraints[0]")."""

    def __init__(self, entries: Mapping[str, document.Entry], problems: document.Problems) -> None:
        self.entries = entries
        self.problems = problems
        for entry in entries.values():
            entry.keep(entry.at)
        self.terms: Mapping[str, KnobSchema] = {}
        self.owners: dict[str, str] = {}

    def space(self, path: Path | None) -> SearchSpace:
        """The space with what could be read; the problems say what could not."""
        workload = self._workload()
        own = workload not in SCHEMAS
        own_terms = self.terms = (
            terms_of_own_code(self.entries, self.problems) if own else SCHEMAS[workload].terms
        )
        knobs, fixed = self._knobs(), self._values("fixed")
        entries = [e for e in self._named("derived").values() if self._own(e, "derived")]
        texts = {e.name: e.scalar() for e in entries}
        derived = {name: text.strip() for name, text in texts.items() if text is not None}
        stages, stage_knobs = self._stages()
        knobs |= stage_knobs
        self.terms = {**self.terms, **rules.stage_terms(stages, self.terms)}
        return complete_space(
            SearchSpace(
                name=self._name(path),
                workload=workload,
                description=self._text("description") or "",
                model=self._text("model"),
                gpus=self._words("gpus"),
                knobs=knobs,
                fixed=fixed,
                derived=derived,
                constraints=self._expressions("constraints"),
                floors=self._expressions("floors"),
                data=self._data(),
                objectives=self._objectives(),
                stages=stages,
                baseline=self._values("baseline") if "baseline" in self.entries else None,
                apply=self._apply(),
                path=path,
                command=read_command(self.entries, frozenset(own_terms), self.problems, path),
                own_terms=own_terms if own else {},
                memory=self._memory(knobs, own=own),
            )
        )

    def _workload(self) -> str:
        """The workload's name; that of a space with a command need not be written."""
        entry = self.entries.get("workload")
        text = entry.node.value if entry and isinstance(entry.node, ScalarNode) else ""
        if COMMAND in self.entries or PROGRAM in self.entries:
            if entry and text != COMMAND:
                hint = f"leave one of them out, or write workload: {COMMAND}"
                entry.add("there is also a command", hint=hint)
            return COMMAND
        if _OBJECT.fullmatch(text):
            return text
        if entry and ":" in text:
            entry.add(f"{text[:60]!r} names no object", hint="write package.module:object")
            return "causal_lm"
        return self._word("workload", allowed=SCHEMAS) or "causal_lm"

    def _text(self, name: str) -> str | None:
        entry = self.entries.get(name)
        text = document.text_of(entry)
        if entry and text is not None and not text.strip():
            entry.add("is empty")
        return text.strip() if text else None

    def _word(self, name: str, *, allowed: Mapping[str, object]) -> str | None:
        text = self._text(name)
        if text is not None and text not in allowed:
            hint = document.suggestion(text, allowed.keys())
            self.entries[name].add(f"unknown {name} {text[:60]!r}", hint=hint)
            return None
        return text

    def _name(self, path: Path | None) -> str:
        name = self._text("name") or ""
        if name and not _NAME.fullmatch(name):
            hint = "letters, digits, _, - and . (it names the folder of the results)"
            self.entries["name"].add(f"{name[:60]!r} is not a name", hint=hint)
        elif name and path is not None and name != path.stem:
            text = f"the name {name!r} differs from that of the file, {path.stem!r}"
            hint = "two spaces with one name would mix their results"
            self.entries["name"].add(text, hint=hint)
        return name

    def _items(self, name: str) -> list[document.Place]:
        """The items of the list `name`, each kept by its number."""
        entry = self.entries.get(name)
        items = (entry.sequence() or []) if entry else []
        if len(items) > _MAX_ITEMS:
            items[_MAX_ITEMS].add(f"{len(items)} items; at most {_MAX_ITEMS} are allowed")
        for index, item in enumerate(items[:_MAX_ITEMS]):
            item.keep(f"{name}[{index}]")
        return items[:_MAX_ITEMS]

    def _words(self, name: str) -> tuple[str, ...]:
        texts = [item.scalar() for item in self._items(name)]
        return tuple(text for text in texts if text is not None)

    def _expressions(self, name: str) -> tuple[str, ...]:
        return tuple(text.strip() for text in self._words(name))

    def _named(self, name: str) -> dict[str, document.Entry]:
        """The entries of the mapping `name`, whose keys are names of the vocabulary."""
        entry = self.entries.get(name)
        if entry is None:
            return {}
        noun = "knob" if name == "knobs" else "name"
        found = entry.mapping(allowed=self.terms, noun=noun)
        for item in found.values():
            item.keep(item.at)
        return found

    def _own(self, entry: document.Entry, part: str) -> bool:
        """True if `part` is the first to give this name a value."""
        other = self.owners.setdefault(entry.name, part)
        if other != part:
            text = f"{entry.name!r} is under {part!r} and under {other!r}"
            entry.key.add(text, hint="keep one of them")
        return other == part

    def _knobs(self) -> dict[str, Knob]:
        entries = [e for e in self._named("knobs").values() if self._own(e, "knobs")]
        if "knobs" in self.entries and not self.entries["knobs"].node.value:
            self.entries["knobs"].add("there is no knob")
        return {e.name: read_knob(e, self.terms[e.name]) for e in entries}

    def _memory(self, knobs: Mapping[str, Knob], *, own: bool) -> dict[str, tuple[KnobValue, ...]]:
        if not own and "memory" in self.entries:
            text = "is for code of your own; what takes memory in this workload is known"
            dataclasses.replace(self.entries["memory"].key, at="memory").add(text)
            return {}
        found = {}
        for entry in self._named("memory").values():
            if entry.name in knobs:
                term, knob = self.terms[entry.name], knobs[entry.name]
                found[entry.name] = read_order(entry, knob, term)
            else:
                entry.key.add(f"{entry.name!r} is no knob")
        return found

    def _values(self, part: str) -> dict[str, KnobValue]:
        entries = self._named(part)
        if part == "fixed":
            entries = {n: e for n, e in entries.items() if self._own(e, part)}
        return self._read_values(entries)

    def _read_values(self, entries: Mapping[str, document.Entry]) -> dict[str, KnobValue]:
        read = {e.name: read_value(e, self.terms[e.name]) for e in entries.values()}
        return {name: value for name, value in read.items() if value is not None}

    def _data(self) -> DataFacts:
        entry = self.entries.get("data")
        return read_data(entry) if entry else DataFacts()

    def _apply(self) -> dict[str, ApplyTarget]:
        entry = self.entries.get("apply")
        return read_apply(entry) if entry else {}

    def _objectives(self) -> tuple[ObjectiveName, ...]:
        if "objectives" not in self.entries:
            return DEFAULT_OBJECTIVES
        words = self._words("objectives")
        for index, word in enumerate(words):
            node = self.problems.nodes[f"objectives[{index}]"]
            place = document.Place(self.problems, node, "objectives")
            if word not in METRICS:
                hint = document.suggestion(word, METRICS)
                place.add(f"unknown objective {word[:60]!r}", hint=hint)
            elif word in words[:index]:
                place.add(f"{word!r} is listed twice")
        if not words:
            self.entries["objectives"].add("there is no objective")
        return tuple(METRICS[word] for word in words if word in METRICS)

    def _stages(self) -> tuple[tuple[rules.Stage, ...], dict[str, Knob]]:
        """The stages, and the knobs that one of them has for itself."""
        stages: list[rules.Stage] = []
        knobs: dict[str, Knob] = {}
        for index, item in enumerate(self._items("stages")):
            place = dataclasses.replace(item, at=f"stages[{index}]")
            parts = place.mapping(allowed=("name", "set", *_STAGE_TERMS))
            if isinstance(place.node, MappingNode) and not {"name", "set"} <= set(parts):
                place.add("a stage needs a name and what it sets: {name, set}")
                continue
            name = dataclasses.replace(parts["name"], at=place.at).scalar() if parts else None
            if name is None:
                continue
            values = parts["set"].mapping(allowed=self.terms, noun="name")
            if any(name == stage.name for stage in stages):
                place.add(f"there are two stages {name!r}")
            read: dict[str, Any] = {
                n: read_value(parts[n], term) for n, term in _STAGE_TERMS.items() if n in parts
            }
            own = {n: e for n, e in values.items() if self._is_searched(e)}
            fixed = self._read_values({n: e for n, e in values.items() if n not in own})
            found = {n: read_knob(e, self.terms[n]) for n, e in own.items()}
            if own and not name.isidentifier():
                hint = "letters, digits and _, so that a condition can name it"
                place.add(f"{name[:60]!r} has knobs of its own", hint=hint)
            stage = rules.Stage(
                name,
                {**fixed, **{n: knob.values[0] for n, knob in found.items() if knob.values}},
                searched=frozenset(n for n, knob in found.items() if knob.values),
                **read,
            )
            stages.append(stage)
            for n, knob in found.items():
                knobs[stage.own_name(n)] = Knob(stage.own_name(n), knob.values)
                own[n].keep(f"knobs.{stage.own_name(n)}")
        return tuple(stages), knobs

    def _is_searched(self, entry: document.Entry) -> bool:
        """True if a stage gives several values to choose from."""
        is_list = isinstance(entry.node, SequenceNode)
        return isinstance(entry.node, MappingNode) or (
            is_list and self.terms[entry.name].kind != "names"
        )


def check_meaning(space: SearchSpace, problems: document.Problems) -> None:
    """Note in `problems` what can only be seen with the whole space."""
    with problems.place("derived").noting():
        _ = space.derivations  # raises for a circle
    size = rules.combinations(space.choices)
    if size > rules.MAX_COMBINATIONS:
        knobs = sorted(space.knobs.values(), key=lambda knob: -len(knob.values))[:3]
        largest = ", ".join(f"{knob.name} has {len(knob.values)}" for knob in knobs)
        problems.place("knobs").add(
            f"the knobs have {size:,} combinations; at most {rules.MAX_COMBINATIONS:,} are allowed",
            hint=f"use fewer values or larger steps: {largest}",
        )
    problems.check()
    _check_evaluation(space, problems)
    problems.check()
    _check_not_empty(space, problems)
    _check_baseline(space, problems)


def check_expressions(space: SearchSpace, problems: document.Problems) -> None:
    """Note every expression that is none, and stages that set derived values.

    Needs no knob to have been read, so it can be said together with everything else.
    """
    for index, stage in enumerate(space.stages):
        for name in stage.values:
            if name in space.derived:
                text = f"{name} is derived ({space.derived[name]}) and cannot be set in a stage"
                problems.place(f"stages[{index}]").add(text)
    texts = {f"derived.{name}": text for name, text in space.derived.items()}
    texts |= {f"constraints[{i}]": text for i, text in enumerate(space.constraints)}
    texts |= {f"floors[{i}]": text for i, text in enumerate(space.floors)}
    if space.command is not None and space.command.samples_per_step is not None:
        texts["samples_per_step"] = space.command.samples_per_step
    for at, text in texts.items():
        with problems.place(at).noting():
            space.condition(text)
    check_apply(space.apply, [stage.name for stage in space.stages], space.condition, problems)


def _check_evaluation(space: SearchSpace, problems: document.Problems) -> None:
    """Evaluate every rule for all values it can meet, so that nothing fails later."""
    every = [*space.rules, *space.floor_rules()]
    needed = sum(rules.evaluations(rule, space.choices) for rule in every)
    if needed > rules.MAX_EVALUATIONS:
        widest = max(every, key=lambda rule: rules.evaluations(rule, space.choices))
        problems.place(widest.origin).add(
            f"the constraints need {needed:,} evaluations; at most {rules.MAX_EVALUATIONS:,} are "
            "allowed",
            hint=f"use fewer values, or fewer knobs in one condition than `{widest.label}`",
        )
        return
    failed: set[str] = set()
    for rule in sorted(every, key=lambda rule: not rule.origin.startswith("derived")):
        try:
            rules.evaluate_everywhere(rule, space.choices, space.fixed)
        except InputError as error:
            # A derived value that cannot be computed also fails every rule that reads it.
            if error.message not in failed:
                problems.place(rule.origin).add_error(error)
            failed.add(error.message)


def _check_not_empty(space: SearchSpace, problems: document.Problems) -> None:
    blamed = rules.conflict(space.choices, space.fixed, space.rules)
    if not blamed:
        blamed = rules.conflict(space.choices, space.fixed, [*space.rules, *space.floor_rules()])
    if blamed:
        at = next((rule.origin for rule in blamed if rule.origin in problems.nodes), "knobs")
        names = sorted({name for rule in blamed for name in rule.inputs})
        fixed = settings_text(space.fixed, names, between=", ")
        problems.place(at).add(
            f"no configuration is left, excluded by {_together(blamed, problems)}",
            hint=f"with {fixed}" if fixed else None,
        )


def _together(blamed: list[rules.Rule], problems: document.Problems) -> str:
    def line(rule: rules.Rule) -> str:
        node = problems.nodes.get(rule.origin)
        return f" (line {node.start_mark.line + 1})" if node is not None else ""

    return " together with ".join(f"`{rule.label}`{line(rule)}" for rule in blamed)


def _check_baseline(space: SearchSpace, problems: document.Problems) -> None:
    if space.baseline is None or problems.found:
        return
    missing = sorted(space.knobs.keys() - space.baseline.keys())
    if missing:
        text = f"{', '.join(missing)} missing: a baseline sets every knob"
        problems.place("baseline").add(text)
    for name in sorted(space.baseline.keys() - space.knobs.keys()):
        problems.place(f"baseline.{name}").add(f"{name} is not a knob of this space")
    if not problems.found:
        with problems.place("baseline").noting():
            configure(space, space.baseline, strict=False)


_SUFFIXES = (".yaml", ".yml")
_OWN_FOLDERS = shipped_places("search_spaces", "search_spaces")
DEFAULT_WORKLOAD = "causal_lm"


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """One search space that was found. `problem` says what is wrong where it cannot be read."""

    name: str
    path: Path
    description: str = ""
    model: str | None = None
    configurations: int | None = None
    problem: InputError | None = None


def load_space(name_or_path: str) -> SearchSpace:
    """The search space of that name, or in that YAML file.

    Raises `InputError`, with the nearest spelling, if there is none, and with everything that
    is wrong if the file is malformed.
    """
    if name_or_path.endswith(_SUFFIXES) or "/" in name_or_path or "\\" in name_or_path:
        return _load_file(Path(name_or_path))
    found = _find()
    if name_or_path not in found:
        files = (Path(name_or_path + suffix) for suffix in _SUFFIXES)
        if file := next(filter(os.path.isfile, files), None):  # false for any text
            hint = f"did you mean the file here? --space {file}"
            raise InputError(f"unknown search space {name_or_path!r}", hint=hint)
        raise unknown("search space", name_or_path, found, list_command="tuner spaces")
    return _load_file(found[name_or_path])


def list_spaces() -> list[SpaceInfo]:
    """Every search space that can be named, by name; broken files are listed with the problem."""
    return [_info(name, path) for name, path in sorted(_find().items())]


def default_space(model: str, settings: Collection[str] = ()) -> SearchSpace:
    """A space of one configuration for `tuner estimate --model`: the vocabulary's defaults.

    `settings` are the names that the user sets: a value that otherwise follows from others
    (grad_accum from effective_batch, lora_alpha from lora_rank) is then free to be set, and
    setting grad_accum makes the effective batch follow from it.
    """
    empty = SearchSpace(
        name="default",
        workload=DEFAULT_WORKLOAD,
        description="defaults of the workload",
        model=model,
    )
    given = {n: empty.terms[n].default for n in settings if n in empty.terms}
    return complete_space(dataclasses.replace(empty, fixed=given))


def is_shipped(space: SearchSpace) -> bool:
    """True if the space comes with tuner."""
    return space.path is not None and space.path.resolve().parent in _OWN_FOLDERS


def _find() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in _files():
        found.setdefault(path.stem, path)
    return found


def _files() -> Iterator[Path]:
    for folder in (Path("search_spaces"), *_OWN_FOLDERS):  # the first match counts
        try:
            paths = sorted(folder.iterdir()) if folder.is_dir() else []
        except PermissionError:
            continue  # a folder that may not be read holds no spaces for this user
        yield from (path for path in paths if path.suffix in _SUFFIXES)


def _load_file(path: Path) -> SearchSpace:
    return read_space(document.read_text(path), path.name, path=path)


def _info(name: str, path: Path) -> SpaceInfo:
    try:
        space = _load_file(path)
    except InputError as error:
        return SpaceInfo(name, path, problem=error)
    return SpaceInfo(
        name,
        path,
        description=space.description,
        model=space.model,
        configurations=space.count(use_floors=False),
    )
