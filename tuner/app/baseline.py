"""Reads the configuration in use from a file of knobs or the user's own configuration files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.program.edit.assign import value_of
from tuner.program.edit.place import Location, is_wanted
from tuner.program.edit.source import SourceFile, open_source
from tuner.program.planned import WORKLOAD, plan_program
from tuner.program.program import trainers_program
from tuner.program.reads import SETTINGS_FILES
from tuner.program.trainer import trainer_of
from tuner.program.vocabulary import settings_for
from tuner.space import ApplyTarget, SearchSpace, configure
from tuner.space.apply import is_meant, read_key
from tuner.space.models.catalogue import get_entry
from tuner.space.settings import default_values

_MODEL_KEYS = (("base_model",), ("model_name_or_path",))

_OF_THE_SPACE = ("lora_alpha", "max_grad_norm")
"""Knobs without effect on memory or time keep the space's values."""

_OF_QUANTIZED = ("kbit_preparation", "double_quant", "compute_dtype")
"""Knobs of quantized models only."""


@dataclass(frozen=True, slots=True)
class TrainedFile:
    """Knobs of a space that a trainer's file sets, or that have the trainer's default.

    `outside` lists settings of the file that the space has no knob for.
    """

    knobs: Mapping[str, KnobValue]
    outside: tuple[str, ...] = ()


def read_trained(space: SearchSpace, source: SourceFile) -> TrainedFile | None:
    """Read a trainer's file; None for any other file.

    For an unsupported trainer or setting there are no knobs, and `outside` says why.
    """
    if space.workload != WORKLOAD or source.path.suffix not in SETTINGS_FILES:
        return None
    if trainer_of(source.places) is None:
        return None
    try:
        plan = plan_program(trainers_program(source), model=space.model, strict=False)
    except InputError as error:
        texts = [str(problem) for problem in error.problems] or [error.message]
        return TrainedFile({}, tuple(texts))
    knobs = {
        name: value
        for name, value in plan.configuration.items()
        if name in plan.known & space.terms.keys() and name not in _OF_THE_SPACE
    }
    outside = [
        *_other_model(space, source),
        *plan.left_out,
        *_beyond(space, knobs, source.path),
    ]
    return TrainedFile(knobs, tuple(outside))


def _other_model(space: SearchSpace, source: SourceFile) -> Iterator[str]:
    """The note on a file that trains another model than that of the space."""
    for place in source.places:
        if place.path not in _MODEL_KEYS or not isinstance(place.value, str):
            continue
        entry = get_entry(place.value)
        if space.model not in (place.value, entry.id if entry else None):
            yield f"{source.at(place)}: {place.value}; the numbers are of {space.model}"


def _beyond(space: SearchSpace, knobs: Mapping[str, KnobValue], path: Path) -> Iterator[str]:
    """Notes on values of the file that the space excludes."""
    is_quantized = knobs.get("precision") in ("nf4", "int8")
    for name, value in knobs.items():
        if name in _OF_QUANTIZED and not is_quantized:
            continue
        held = space.fixed.get(name)
        said = f"{name} is {show(value)} in {path.name}"
        if held is not None and held != value:
            yield f"{said} and {show(held)} in every configuration of the space"
        elif name not in space.names and value != space.terms[name].default:
            yield f"{said}, and no configuration of the space has it"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The configuration in use.

    `assumed` are knobs without a value, which have the space's own. `notes` say how values were
    read. `outside` lists settings in the files that the configuration cannot represent.
    """

    configuration: Configuration
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A value and its place in a file."""

    name: str
    value: KnobValue
    where: str


def read_baseline(
    space: SearchSpace, paths: Sequence[Path], settings: Mapping[str, str] | None = None
) -> Baseline:
    """Read the configuration in the files at `paths`; `settings` (as typed) override them.

    A file is either flat, `knob: value`, or the user's own: it is read by the keys that the space
    names under `apply`, then by its trainer's settings and defaults. Without files it is the
    space's baseline. Raises `InputError` with everything that is wrong.
    """
    problems: list[Problem] = []
    found: dict[str, _Found] = {}
    sources = [open_source(path) for path in paths]
    trained = [one for source in sources if (one := read_trained(space, source)) is not None]
    for source in sources:
        for each in _read(space, source, problems, is_trained=bool(trained)):
            first = found.setdefault(each.name, each)
            if first.value != each.value:
                text = f"{each.name} is {show(each.value)} here and {show(first.value)} in "
                problems.append(Problem(text + first.where, each.where))
    if problems:
        raise InputError("the baseline cannot be read", problems=problems)
    values: dict[str, KnobValue] = {name: each.value for name, each in found.items()}
    for one in trained:
        values = {**one.knobs, **values}
    baseline = _complete(space, values, settings_for(space, settings or {}), from_files=bool(paths))
    outside = tuple(text for one in trained for text in one.outside)
    return replace(baseline, outside=outside)


def _complete(
    space: SearchSpace,
    found: dict[str, KnobValue],
    settings: Mapping[str, Any],
    *,
    from_files: bool,
) -> Baseline:
    """Add the values that are missing, and compare derived values with those in the files."""
    wanted = {**{n: v for n, v in found.items() if n not in space.derived}, **settings}
    if "grad_accum" in space.derived and "effective_batch" not in settings:
        # People write the accumulation down; the effective batch that they train with is theirs.
        accumulation = settings.get("grad_accum", found.get("grad_accum"))
        if accumulation is not None:
            values = {**default_values(space), **wanted}
            factors = ("micro_batch", GPUS_PER_TRIAL)
            read = {n: space.terms[n].read(values[n]) for n in factors if n in values}
            rounds = space.terms["grad_accum"].read(accumulation)
            wanted["effective_batch"] = math.prod(int(str(n)) for n in (*read.values(), rounds))
    configuration = configure(space, wanted, strict=False)
    notes = [
        f"{name}={show(found[name])} in the file is compared as {show(configuration[name])}, "
        f"which the space derives as {space.derived[name]}"
        for name in found
        if name in space.derived and name not in settings and configuration[name] != found[name]
    ]
    unset = [name for name in space.knobs if name not in found and name not in settings]
    return Baseline(configuration, tuple(unset) if from_files else (), tuple(notes))


def _read(
    space: SearchSpace, source: SourceFile, problems: list[Problem], *, is_trained: bool
) -> list[_Found]:
    top = {str(place.path[0]) for place in source.places if place.path}
    if top and top <= space.terms.keys():
        return list(_flat(space, source, problems))
    found = [
        each
        for target in space.apply.values()
        if is_meant(source.path, target.files)
        for each in _mapped(space, source, target, problems)
    ]
    if not found and not problems and not is_trained:
        problems.append(Problem(_nothing(space, top), str(source.path)))
    return found


def _nothing(space: SearchSpace, top: set[str]) -> str:
    strange = sorted(top - space.terms.keys())
    if strange and top & space.terms.keys():
        close = nearest(strange[0], space.terms)
        hint = f" (did you mean {close!r}?)" if close else ""
        return f"{strange[0]!r} is not a knob of this space{hint}"
    return (
        "it has no knob of this space (such as micro_batch: 4) and no key that the space names "
        "under apply"
    )


def _flat(space: SearchSpace, source: SourceFile, problems: list[Problem]) -> Iterator[_Found]:
    for place in source.places:
        if len(place.path) != 1:
            continue  # an item of a list that is a value itself
        name = str(place.path[0])
        if place.value is None:
            problems.append(Problem(place.problem or "has no value", source.at(place)))
            continue
        yield from _term_value(space, name, place, source, problems)


def _mapped(
    space: SearchSpace, source: SourceFile, target: ApplyTarget, problems: list[Problem]
) -> Iterator[_Found]:
    """The mapping of `apply` backwards, from keys to knobs."""
    staged = next((s.values for s in space.stages if s.name == target.stage), {})
    for key, expression in target.keys.items():
        places = [p for p in source.find(read_key(key)) if p.value is not None]
        names = space.condition(expression).names
        # A key that is there with two values says nothing; a stage's own values are the space's.
        if len({p.raw for p in places}) != 1 or len(names) != 1 or names & staged.keys():
            continue
        (name,) = names
        if expression == name:
            yield from _term_value(space, name, places[0], source, problems)
            continue
        value = _value_behind(space, name, expression, places[0])
        if value is not None:
            yield _Found(name, value, source.at(places[0]))


def _value_behind(
    space: SearchSpace, name: str, expression: str, place: Location
) -> KnobValue | None:
    """The only value of `name` for which the expression equals the value at `place`.

    The space's own values are tried before all others. None if several values would do.
    """
    term = space.terms[name]
    booleans: tuple[KnobValue, ...] = (True, False) if term.kind == "bool" else ()
    for candidates in (space.choices.get(name, ()), (*term.allowed, *booleans)):
        fitting = [
            value
            for value in candidates
            if is_wanted(place.value, value_of(space, expression, {name: value}))
        ]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


def _term_value(
    space: SearchSpace, name: str, place: Location, source: SourceFile, problems: list[Problem]
) -> Iterator[_Found]:
    try:
        yield _Found(name, space.terms[name].read(place.value), source.at(place))
    except InputError as error:
        problems.append(Problem(error.message, source.at(place)))
