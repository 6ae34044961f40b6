"""From the mapping of a space, and `--map`, to values for keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, Problem, unknown
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue
from tuner.space import ApplyTarget, SearchSpace
from tuner.space.apply import KeyPath, is_meant, read_key


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for a key, in files that match one of the patterns `files`, or in all.

    `required` keys must exist: the user asked for them, perhaps `only` for files of a pattern.
    """

    key: KeyPath
    expression: str
    value: KnobValue
    files: tuple[str, ...] = ()
    stage: str | None = None
    required: bool = False
    only: str | None = None

    def is_for(self, path: Path) -> bool:
        """True if the file at `path` matches."""
        return is_meant(path, self.files) and (self.only is None or path.match(self.only))


def assignments(
    space: SearchSpace,
    configuration: Configuration,
    *,
    targets: Sequence[str] = (),
    maps: Sequence[str] = (),
) -> list[Assignment]:
    """The values to write: for the keys of `targets` (default: all of the space), and of `maps`.

    An entry of `maps` is "KNOB=KEY", "KNOB=FILE:KEY" or "KNOB=" (leave it out), where KNOB may be
    an expression. It replaces the space's own. Raises one `InputError` with everything that is
    wrong.
    """
    own = [_parse_map(text) for text in maps]
    problems: list[Problem] = []
    for text, (expression, _, _) in zip(maps, own, strict=True):
        try:
            space.condition(expression)
        except InputError as error:
            problems.append(Problem(f"{error.message} ({error.hint})", f"--map {text!r}"))
    if problems:
        raise InputError("--map names something that is not a knob", problems=problems)
    replaced = {expression for expression, _, _ in own}
    stages = space.stage_configurations(configuration)
    chosen = _chosen(space, targets)
    result = [
        Assignment(
            key=read_key(key),
            expression=expression,
            value=value_of(space, expression, stages[t.stage] if t.stage else configuration),
            files=t.files,
            stage=t.stage,
        )
        for t in chosen
        for key, expression in t.keys.items()
        if expression not in replaced
    ]
    for text, (expression, file, key) in zip(maps, own, strict=True):
        if key is not None:
            asked = Assignment(
                key, expression, value_of(space, expression, configuration),
                required=True, only=file,
            )  # fmt: skip
            result += _by_stage(space, asked, stages, f"--map {text!r}")
    return result


def _by_stage(
    space: SearchSpace, asked: Assignment, stages: Mapping[str, Configuration], at: str
) -> list[Assignment]:
    """`asked` with the value of each stage in its own files, where the stages differ in it."""
    values = {name: value_of(space, asked.expression, own) for name, own in stages.items()}
    if not values:
        return [asked]
    if len(set(values.values())) == 1:
        return [dataclasses.replace(asked, value=next(iter(values.values())))]
    found = [
        dataclasses.replace(asked, value=values[t.stage], files=t.files, stage=t.stage)
        for t in space.apply.values()
        if t.stage is not None and t.files
    ]
    if not found:
        each = ", ".join(f"{show(value)} in {name}" for name, value in values.items())
        raise InputError(
            f"{at}: the stages differ in {asked.expression} ({each}), and the space does not say "
            "which file is of which stage",
            hint="name them in the space, under apply: {stage: ..., file: ..., keys: ...}",
        )
    return found


def unmapped(
    space: SearchSpace, found: Iterable[Assignment], maps: Sequence[str] = ()
) -> list[str]:
    """The knobs of `space` that no assignment speaks of, less those that `maps` leave out."""
    texts = {a.expression for a in found} | {_parse_map(text)[0] for text in maps}
    spoken = {name for text in texts for name in space.condition(text).names}
    return [name for name in space.knobs if name not in spoken]


def _chosen(space: SearchSpace, targets: Iterable[str]) -> list[ApplyTarget]:
    for name in targets:
        if name not in space.apply:
            raise unknown("mapping", name, space.apply)
    return [space.apply[name] for name in targets] or list(space.apply.values())


def _parse_map(text: str) -> tuple[str, str | None, KeyPath | None]:
    """(expression, file, key) of "KNOB=FILE:KEY"; the last = is the one that parts them."""
    expression, equals, place = text.rpartition("=")
    if not equals or not expression.strip():
        raise InputError(
            f"--map {text!r} is not KNOB=KEY", hint="write for example micro_batch=train.batch_size"
        )
    place = place.strip()
    if not place:
        return expression.strip(), None, None
    head, bracket, rest = place.partition("[")
    file, colon, key = head.rpartition(":")
    return expression.strip(), file if colon else None, read_key(key + bracket + rest)


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
