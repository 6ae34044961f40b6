"""Settings from the command line: `--set micro_batch=4`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.core.errors import InputError, Problem, unknown
from tuner.core.expressions import settings_text, show
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, rule_with_ranks
from tuner.space.knobs import Knob
from tuner.space.searchspace import SearchSpace


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """{"micro_batch": "4"} from ["micro_batch=4"]. Raises `InputError` if malformed or repeated."""
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(
                f"{text!r} is not a setting", hint="write name=value, for example micro_batch=4"
            )
        if name in settings:
            raise InputError(f"{name} is set twice: to {settings[name]!r} and to {value!r}")
        settings[name] = value
    return settings


def default_values(space: SearchSpace) -> dict[str, KnobValue]:
    """The default values of knobs and fixed names."""
    first = {name: knob.values[0] for name, knob in space.knobs.items()}
    return {**space.fixed, **first, **(space.baseline or {})}


def configure(
    space: SearchSpace, settings: Mapping[str, Any] | None = None, *, strict: bool = True
) -> Configuration:
    """The configuration with `settings` (as typed, or as values), the rest as by default.

    With `strict`, a value must be one of the space; without, any value of the right kind
    will do. Raises `InputError` with everything that is wrong.
    """
    wanted = _read(space, settings or {}, strict=strict)
    if GPUS_PER_TRIAL in wanted and GPUS_PER_TRIAL not in space.names:
        # What the space derives the accumulation from then counts the ranks too.
        derived = {n: rule_with_ranks(r, (GPUS_PER_TRIAL,)) for n, r in space.derived.items()}
        fixed = {**space.fixed, GPUS_PER_TRIAL: wanted[GPUS_PER_TRIAL]}
        space = dataclasses.replace(space, fixed=fixed, derived=derived)
    values = default_values(space)
    values |= {name: value for name, value in wanted.items() if name not in space.derived}
    _check_rules(space, values)
    full = space.complete(values)
    raise_all(
        InputError(
            f"{name}={show(wanted[name])} does not agree with {name} = {space.derived[name]} = "
            f"{show(full[name])}",
            hint=f"it follows from {_sources(space, name, full)}; set those instead",
        )
        for name in wanted
        if full[name] != wanted[name]
    )
    return Configuration(full)


def pin(space: SearchSpace, settings: Mapping[str, Any]) -> SearchSpace:
    """The space with some knobs pinned to one value; floors on those knobs are dropped.

    Raises `InputError` for values that are not in the space, and if nothing is left.
    """
    wanted = _read(space, settings, strict=True)
    knobs = {
        name: Knob(name, (wanted[name],)) if name in wanted else knob
        for name, knob in space.knobs.items()
    }
    pinned = {name: value for name, value in wanted.items() if name in space.knobs}
    derived = [f"{n} == {value!r}" for n, value in wanted.items() if n in space.derived]
    narrowed = dataclasses.replace(
        space,
        knobs=knobs,
        constraints=(*space.constraints, *derived),
        floors=tuple(f for f in space.floors if not space.condition(f).names & pinned.keys()),
        baseline={**space.baseline, **pinned} if space.baseline else None,
    )
    narrowed.require_configurations()
    return narrowed


def _read(space: SearchSpace, settings: Mapping[str, Any], *, strict: bool) -> dict[str, KnobValue]:
    """The settings as values of their terms, all errors at once."""
    values: dict[str, KnobValue] = {}
    errors: list[InputError] = []
    for name, raw in settings.items():
        if name not in space.terms:
            command = f"tuner spaces {space.name}" if space.path else ""
            errors.append(unknown("parameter", str(name), space.terms, list_command=command))
            continue
        try:
            values[name] = space.terms[name].read(raw)
        except InputError as error:
            errors.append(error)
            continue
        if strict:
            errors += _outside(space, name, values[name])
    raise_all(errors)
    return values


def _outside(space: SearchSpace, name: str, value: KnobValue) -> list[InputError]:
    """The reasons why `value` is not in the space; a derived value is checked by the rules."""
    if name in space.knobs and value not in space.knobs[name].values:
        allowed = ", ".join(show(v) for v in space.knobs[name].values)
        return [
            InputError(
                f"{name}={show(value)} is not in search space {space.name!r}",
                hint=f"allowed: {allowed}",
            )
        ]
    if name in space.fixed and value != space.fixed[name]:
        return [
            InputError(
                f"{name} is held at {show(space.fixed[name])} in search space {space.name!r} "
                f"and cannot be {show(value)}",
                hint="results of one space are compared with each other; copy the file to "
                "search with another value",
            )
        ]
    if name not in space.names and value != space.terms[name].default:
        return [
            InputError(
                f"{name} is not in search space {space.name!r} and stays at "
                f"{show(space.terms[name].default)!r}",
                hint=f"copy the file and add {name} to its knobs or fixed values",
            )
        ]
    return []


def _check_rules(space: SearchSpace, values: Mapping[str, KnobValue]) -> None:
    """Raise `InputError` with each rule that the values break, one for the same inputs."""
    broken = {rule.inputs: rule for rule in reversed(space.rules) if not rule.holds(values)}
    raise_all(
        InputError(
            f"not a valid configuration: `{rule.label}` does not hold",
            hint=f"it was tried with {settings_text(values, rule.inputs, between=', ')}",
        )
        for rule in reversed(broken.values())
    )


def _sources(space: SearchSpace, name: str, values: Mapping[str, KnobValue]) -> str:
    return settings_text(values, sorted(space.derivations.inputs([name])), between=", ")


def raise_all(errors: Iterable[InputError]) -> None:
    """Raise the only error as it is, several as one with each as a problem."""
    found = list(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        problems = [Problem(f"{e.message} ({e.hint})" if e.hint else e.message) for e in found]
        raise InputError(f"{len(found)} settings are wrong", problems=problems)
