"""The recommended values in your own files: the change that `tuner apply` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue
from tuner.program.changes import Change, change, obstacle
from tuner.program.edit.source import open_source
from tuner.program.named_models import named_models
from tuner.program.program import Program, read_program
from tuner.program.reads import SETTINGS_FILES
from tuner.program.setting import NAMES, Setting
from tuner.program.settings import find_settings
from tuner.program.trainer import trainer_of
from tuner.space import ApplyTarget, SearchSpace
from tuner.space.apply import is_meant, read_key, show_path
from tuner.space.models.same import same_architecture


@dataclass(frozen=True, slots=True)
class Applying:
    """A program with the recommended values.

    `lacking` are the values that it has no setting for ("lora_dropout = 0.05"), `refused` says what
    is in the way of others, `notes` are side effects.
    """

    change: Change
    lacking: tuple[str, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """Settings and the values that they are to get, by parameter, or by file and key of a table.

    `lacking` are the values that no setting is for, by parameter.
    """

    settings: dict[str, Setting]
    values: dict[str, KnobValue]
    lacking: dict[str, KnobValue]


def applying(space: SearchSpace, configuration: Configuration, words: Sequence[str]) -> Applying:
    """Give the files or the program in `words` the values of `configuration`; nothing is written.

    Without words it is the program that the space searches. Raises `InputError` for files that set
    none of the values, and for a change that can't be proved.
    """
    program = _program(space, words)
    found = _find(space, configuration, program)
    problems = {n: obstacle(program, found.settings, n, v) for n, v in found.values.items()}
    values = {n: value for n, value in found.values.items() if problems[n] is None}
    refused = [p for n, p in problems.items() if p is not None and n in found.settings]
    unset = {n: v for n, v in found.values.items() if problems[n] and n not in found.settings}
    lacking = tuple(f"{name} = {show(value)}" for name, value in (unset | found.lacking).items())
    if not values:
        raise InputError(
            f"no recommended value can be written into {', '.join(program.files)}",
            problems=refused,
            hint="name your script, its command, or the file of its settings; not set there: "
            + ", ".join(lacking),
        )
    made = change(
        program, found.settings, values, lambda after: _find(space, configuration, after).settings
    )
    notes = (*_other_models(space, program), *_batch_notes(found.settings, configuration))
    return Applying(made, lacking, tuple(map(str, refused)), notes)


def _program(space: SearchSpace, words: Sequence[str]) -> Program:
    if not words and space.command is not None and space.command.is_program:
        return read_program(space.command.argv, Path(space.command.cwd))
    if words and Path(words[0]).suffix in SETTINGS_FILES:
        files = {word: open_source(Path(word)) for word in words}
        if trainer_of(files[words[0]].places) is None:
            return Program(tuple(words), files)
    return read_program(words, is_run=False)


def _find(space: SearchSpace, configuration: Configuration, program: Program) -> _Found:
    """The settings that the program's reader finds, and those that the space's table names."""
    own = find_settings(program)
    stages = {"": configuration, **space.stage_configurations(configuration)}
    table: dict[tuple[str, str], dict[str, Setting]] = {}
    for target in space.apply.values():
        for key, expression in target.keys.items():
            named = table.setdefault((expression, target.stage or ""), {})
            named.update(_at_key(program, target, key, expression))
    settings: dict[str, Setting] = {}
    values: dict[str, KnobValue] = {}
    spoken: set[tuple[str, str]] = set()
    for (expression, stage), named in table.items():
        read = own.get(expression)
        chosen = {name: setting for name, setting in named.items() if setting.problem is None}
        if read is not None and read.problem is None:
            # The reader has followed the program; a further script has values of its own.
            chosen = {n: s for n, s in chosen.items() if read.source not in (None, s.source)}
        elif chosen:
            own.pop(expression, None)
        elif read is None:
            chosen = named
        settings |= chosen
        values |= dict.fromkeys(chosen, value_of(space, expression, stages[stage]))
        if chosen or read is not None:
            spoken.update((name, stage) for name in space.condition(expression).names)
    taken = {_spot(setting) for setting in settings.values()}
    for knob in NAMES:
        if knob in own and _spot(own[knob]) in taken:
            del own[knob]
        elif knob in own or ((knob, "") not in spoken and knob not in space.defaulted):
            values |= {knob: configuration[knob]} if knob in configuration else {}
    wanted = [(n, s) for e, s in table for n in sorted(space.condition(e).names)]
    wanted += [(name, "") for name in space.knobs if "." not in name]
    # The effective batch is that of the values that are written.
    implied = {n for text in space.derived.values() for n in space.condition(text).names}
    lacking = {
        f"{name} in {stage}" if stage else name: stages[stage][name]
        for name, stage in wanted
        if (name, stage) not in spoken
        and name not in values
        and name not in implied
        and stages[stage].get(name, "") != ""
    }
    return _Found({**own, **settings}, values, lacking)


def _at_key(
    program: Program, target: ApplyTarget, key: str, expression: str
) -> Iterator[tuple[str, Setting]]:
    """The settings that a key of the space's table names, one for each file."""
    for word, source in program.files.items():
        # A file that only the code mentions counts where the table names it.
        is_named = target.files or word not in program.mentioned
        if not (is_named and is_meant(source.path, target.files)):
            continue
        found = source.find(read_key(key))
        # `Trainer(batch=config["batch"])` beside `config = {"batch": 4}`: the value stands there.
        places = [place for place in found if not place.is_reference] or found
        if not places:
            continue
        place, problem = places[0], places[0].problem
        if len(places) > 1:
            where = ", ".join(f"{p.spot} ({show_path(p.path)})" for p in places)
            problem = f"is there {len(places)} times: {where}"
        yield (
            f"{word} {target.name}.{key}",
            Setting(expression, key.lstrip("."), place.value, source, place, problem=problem),
        )


def _spot(setting: Setting) -> object:
    return setting.source and setting.source.path, setting.location and setting.location.start


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


def _other_models(space: SearchSpace, program: Program) -> Iterator[str]:
    named = named_models(program) if space.model is not None else []
    same = {one: same_architecture(one.name, space.model or "") for one in named}
    if True not in same.values():
        for one in (one for one, is_same in same.items() if is_same is False):
            yield (
                f"{one.where} trains {one.name}, and the recommendation is for {space.model}: "
                f"search with --model {one.name}"
            )


def _batch_notes(settings: Mapping[str, Setting], after: Configuration) -> Iterator[str]:
    before = {setting.knob: setting.value for setting in settings.values()}
    old, new = _batch(before), _batch(after)
    if old and new and old != new:
        yield (
            f"the effective batch of a GPU changes from {old} to {new}: the learning rate that "
            "suited the one may not suit the other"
        )


def _batch(values: Mapping[str, object]) -> int:
    size, rounds = values.get("micro_batch"), values.get("grad_accum")
    return size * rounds if isinstance(size, int) and isinstance(rounds, int) else 0
