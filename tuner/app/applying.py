"""The recommended values in your own files (`tuner apply`), or as another tool's (`export`)."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.app.target import Target
from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import InputError, Problem, TunerError, UnavailableError
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.schemas import ALL_LINEAR
from tuner.core.units import format_gib
from tuner.program.changes import Change, FileSetting, by_hand, change
from tuner.program.edit.place import Location, is_same, is_wanted, spot
from tuner.program.edit.source import SETTINGS_FILES, SourceFile, checked
from tuner.program.edit.write import read_bytes
from tuner.program.export import Exported, command_line, export
from tuner.program.planned import plan_program
from tuner.program.program import Program, read_program
from tuner.program.settings import Settings, settings_of
from tuner.program.trainer import trainer_of
from tuner.program.training import named_models
from tuner.searches.best import BestTrial
from tuner.space import ApplyTarget, SearchSpace
from tuner.space.apply import is_meant, read_key, show_path
from tuner.space.command import Command, placeholders
from tuner.space.models.catalogue import get_entry, resolve_config


@dataclass(frozen=True, slots=True)
class _Applying:
    """A program with the recommended values.

    `lacking` are the values that it has no setting for ("lora_dropout = 0.05"), `refused` says what
    is in the way of others, `notes` are side effects.
    """

    change: Change
    lacking: tuple[str, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]


def applying(
    space: SearchSpace,
    configuration: Configuration,
    words: Sequence[str],
    selected: Sequence[str] = (),
) -> _Applying:
    """Give the files or the program in `words` the values of `configuration`; nothing is written.

    Without words it is the program that the space searches. Raises `InputError` for files that set
    none of the values, for a change that can't be proved, and for a program that trains another
    model; `selected` are the arguments that select the search on a command line.
    """
    settings = settings_of(_program(space, words))
    program = settings.program
    named = named_models(program) if space.model is not None else {}
    same = {name: same_architecture(name, space.model or "") for name in named}
    others = {name: where for name, where in named.items() if same[name] is False}
    if others and True not in same.values():
        search = ["tuner", "search", *selected, "--model", next(iter(others))]
        raise InputError(
            f"the recommendation is for {space.model}, and the program trains another model",
            problems=[Problem(f"trains {name}", where) for name, where in others.items()],
            hint=f"{shlex.join(search)}, then `tuner apply` with that --model",
        )
    stages = {"": configuration, **space.stage_configurations(configuration)}
    table, spoken = _table(space, stages, settings)
    obstacles = {one: one.obstacle(program) for one in table}
    taken = {one.expression for one in table}
    values = {
        knob: configuration[knob]
        for knob in PROGRAM_NAMES
        if knob in configuration
        and knob not in taken
        and (knob in settings or ((knob, "") not in spoken and knob not in space.defaulted))
    }
    can = {
        n: v
        for n, v in values.items()
        if (n in settings and is_wanted(settings[n].value, v)) or settings.can_change(n)
    }
    refused = [problem for problem in obstacles.values() if problem is not None]
    refused += [by_hand(settings, n, values[n]) for n in values if n in settings and n not in can]
    unset = {n: v for n, v in values.items() if n not in settings and n not in can}
    missing = unset | _lacking(space, stages, spoken, values)
    own = _predicted(program)
    said = {*space.fixed} - space.defaulted | {*_BESIDE_RANK}
    said -= {n for n, _ in spoken}
    missing |= {n: configuration[n] for n in own if n in said and n in configuration}
    missing = {n: v for n, v in missing.items() if n not in own or not is_same(own[n], v)}
    now = {n: f" (now {show(own[n])})" for n in missing if n in own}
    lacking = tuple(f"{n} = {show(v)}{now.get(n, '')}" for n, v in missing.items())
    unread = [Problem(settings.trial.error.message)] if settings.trial.error is not None else []
    written = [one for one, problem in obstacles.items() if problem is None]
    if not can and not written:
        raise InputError(
            f"no recommended value can be written into {', '.join(program.files)}",
            problems=[*unread, *refused],
            hint="name your script, its command, or the file of its settings; not set there: "
            + ", ".join(lacking),
        )
    made = change(settings, can, written)
    before = {n: setting.value for n, setting in settings.items()}
    before |= {one.expression: one.place.value for one in table}
    notes, old, new = list[str](), _batch(before), _batch(configuration)
    if old and new and old != new:
        notes.append(
            f"the effective batch of a GPU changes from {old} to {new}: the learning rate that "
            "suited the one may not suit the other"
        )
    return _Applying(made, lacking, tuple(map(str, [*unread, *refused])), tuple(notes))


def _program(space: SearchSpace, words: Sequence[str]) -> Program:
    if not words and space.command is not None and space.command.is_program:
        return read_program(space.command.argv, Path(space.command.cwd))
    if words and Path(words[0]).suffix in SETTINGS_FILES:
        files = {word: checked(SourceFile(Path(word), read_bytes(Path(word)))) for word in words}
        if trainer_of(files[words[0]].places) is None:
            return Program(tuple(words), files)
    return read_program(words, is_run=False)


def _table(
    space: SearchSpace, stages: Mapping[str, Configuration], settings: Settings
) -> tuple[list[FileSetting], set[tuple[str, str]]]:
    """The places that the space's table names, and the (parameter, stage) that it speaks of."""
    table: list[FileSetting] = []
    spoken: set[tuple[str, str]] = set()
    for target in space.apply.values():
        stage = target.stage or ""
        for key, expression in target.keys.items():
            names = {(name, stage) for name in space.condition(expression).names}
            if expression in settings and settings.can_change(expression):
                spoken |= names  # the program itself says where it is
                continue
            for word, place, problem in _at_key(settings.program, target, key):
                value = value_of(space, expression, stages[stage])
                name = key.lstrip(".")
                table.append(FileSetting(name, expression, word, place, value, problem))
                spoken |= names
    places = {(one.word, one.place.start, show(one.value)): one for one in table}
    return list(places.values()), spoken


def _lacking(
    space: SearchSpace,
    stages: Mapping[str, Configuration],
    spoken: set[tuple[str, str]],
    values: Mapping[str, KnobValue],
) -> dict[str, KnobValue]:
    """The values that no setting is for, by parameter."""
    wanted = [
        (name, target.stage or "")
        for target in space.apply.values()
        for expression in target.keys.values()
        for name in sorted(space.condition(expression).names)
    ]
    wanted += [(name, "") for name in space.knobs if "." not in name]
    # The effective batch is that of the values that are written.
    written = [text for name, text in space.derived.items() if name in PROGRAM_NAMES]
    implied = {n for text in written for n in space.condition(text).names}
    return {
        f"{name} in {stage}" if stage else name: stages[stage][name]
        for name, stage in wanted
        if (name, stage) not in spoken
        and name not in values
        and name not in implied
        and stages[stage].get(name, "") != ""
    }


_BESIDE_RANK = ("lora_alpha", "lora_dropout")
"""Values that suit the recommended rank, whether the space or its workload sets them."""


def _predicted(program: Program) -> Mapping[str, KnobValue]:
    """The values of the program that `tuner apply` has no place for; none if they aren't known."""
    with contextlib.suppress(TunerError):
        settings = plan_program(program).settings
        return {n: v for n, v in settings.items() if n not in (*PROGRAM_NAMES, "effective_batch")}
    return {}


def _at_key(
    program: Program, target: ApplyTarget, key: str
) -> Iterator[tuple[str, Location, str | None]]:
    """The places of a key of the space's table, one for each file: word, place, problem."""
    for word, source in program.files.items():
        # A file that only the code mentions counts where the table names it.
        is_named = target.files or word not in program.mentioned
        if not (is_named and is_meant(source.path, target.files)):
            continue
        found = source.find(read_key(key))
        # `Trainer(batch=config["batch"])` beside `config = {"batch": 4}`: the value stands there.
        places = [place for place in found if place.kind != "computed"] or found
        if not places:
            continue
        problem = places[0].problem
        if len(places) > 1:
            where = ", ".join(f"{spot(p.cell, p.line)} ({show_path(p.path)})" for p in places)
            problem = f"is there {len(places)} times: {where}"
        yield word, places[0], problem


def value_of(space: SearchSpace, expression: str, values: Mapping[str, KnobValue]) -> KnobValue:
    """The value of an expression over a configuration; `InputError` if it has none."""
    compiled = space.condition(expression)
    lacking = sorted(compiled.names - values.keys())
    if lacking:
        raise InputError(
            f"the chosen configuration has no {', '.join(lacking)}",
            hint="it was written by another version: search again",
        )
    value = compiled.evaluate(values)
    if isinstance(value, float) and value.is_integer() and expression not in values:
        return int(value)
    return value  # type: ignore[no-any-return]


def _batch(values: Mapping[str, object]) -> int:
    size, rounds = values.get("micro_batch"), values.get("grad_accum")
    return size * rounds if isinstance(size, int) and isinstance(rounds, int) else 0


_SIZES = re.compile(r"(size|layers?|heads?|experts?|dim|rank|depth|width)$|^(n|d)_[a-z]+$")
"""Fields of a configuration that shape its weights; lengths and ids of tokens do not."""


def same_architecture(one: str, other: str) -> bool | None:
    """True if the weights of both have the same shapes; None if one of them is unknown.

    A name is one of the catalogue, a folder, or one of the hub's.
    """
    entries = [get_entry(name) for name in (one, other)]
    if one == other:
        return True
    first, second = entries
    if first is not None and second is not None:  # which takes no transformers
        return first == second or _shapes(first.config) == _shapes(second.config)
    try:
        configs = [resolve_config(name) for name in (one, other)]
    except (InputError, UnavailableError):
        return None
    shapes = [_shapes({**c.to_dict(), **c.get_text_config().to_dict()}) for c in configs]
    return shapes[0] == shapes[1]


def _shapes(fields: Mapping[str, Any]) -> dict[str, Any]:
    fields = {**fields, **fields.get("text_config", {})}
    return {
        key: value
        for key, value in fields.items()
        if key == "model_type"
        or (_SIZES.search(key) and isinstance(value, int) and not isinstance(value, bool))
    }


def export_recommended(target: Target, best: BestTrial, name: str) -> Exported:
    """The settings of the tool `name`. Raises `InputError` for one that cannot train this."""
    space, values = target.space, best.configuration
    entry = get_entry(space.model) if space.model else None
    says = _flags(space, values) if space.command is None else _own_command(space.command, values)
    trial, memory = best.record.trial_id, format_gib(best.evidence.memory.device_bytes)
    return export(
        name,
        _with_names(target, values),
        space.workload,
        entry.hub_id if entry and entry.hub_id else space.model,
        f"{space.name} on {target.gpu.name}: trial {trial}, {memory} ({best.source})",
        says,
    )


def _with_names(target: Target, values: Configuration) -> Configuration:
    """The configuration, with names in place of all-linear for models outside the catalogue."""
    model = target.space.model
    if (
        target.space.workload != "causal_lm"
        or values.get("lora_targets") != ALL_LINEAR
        or not values.get("lora_rank")
        or not model
        or get_entry(model) is not None
    ):
        return values
    from tuner.predict.training.quantized import adaptable_names

    names = adaptable_names(resolve_config(model))
    return Configuration({**values, "lora_targets": names}) if names else values


def _own_command(command: Command, values: Configuration) -> tuple[str, dict[str, str]]:
    if not command.is_program:
        told = command.environment(values)
        environment = [f"{n}={shlex.quote(told[n])}" for n in command.env]
        line = " ".join([*environment, shlex.join(command.arguments(values))])
        said = {n for text in (*command.argv, *command.env.values()) for n in placeholders(text)}
        return line, {n: "the command has no place for it" for n in values if n not in said}
    program = read_program(command.argv, Path(command.cwd))
    settings = settings_of(program)
    wanted = {n: v for n, v in values.items() if n in PROGRAM_NAMES}
    after = change(settings, wanted).after
    unsaid = {
        n: f"it stands in {settings[n].where}: `tuner apply` writes it"
        if n in settings
        else "the program does not set it"
        for n in values
        if n not in settings or not settings[n].is_word
    }
    return shlex.join(after.command), unsaid


def _flags(space: SearchSpace, values: Configuration) -> tuple[str, dict[str, str]]:
    """The options of a script: those of the space's table for scripts, else called as the knobs."""
    table = next((t.keys for t in space.apply.values() if t.is_of_script), None)
    if table is None:
        flags = {name: value for name, value in values.items() if name not in space.defaulted}
        unsaid = {n: "a default of the workload" for n in values if n in space.defaulted}
        return command_line(flags), unsaid
    flags = {str(read_key(key).steps[-1]): value_of(space, e, values) for key, e in table.items()}
    spoken = {name for e in table.values() for name in space.condition(e).names}
    unsaid = {n: "the space names no option for it" for n in values if n not in spoken}
    return command_line(flags), unsaid
