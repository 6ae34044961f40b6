"""The vocabulary of a workload: kind, range and default of each knob, and typed groups of them.

A group is a dataclass whose fields are made by `knob`: the one place that states a knob. The
tables that space files are read with, and typed settings, both derive from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from tuner.core.errors import InputError, nearest
from tuner.core.expressions import compile_expression, show
from tuner.core.records import KnobValue

Kind = Literal["int", "float", "bool", "word", "names", "text", "any"]

_INT = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PATTERN = re.compile(r"[\w.()|\[\]\\*+?^$:-]+")
_OPTION = re.compile(r"[a-z][A-Za-z0-9_]*:([A-Za-z0-9_.]+|\[[A-Za-z0-9_.,:>]+\])")
BETWEEN_OPTIONS = re.compile(r",(?![^\[]*\])")
"""A comma that is not inside brackets."""
_EXPECTS = {
    "bool": "true or false",
    "names": "a list of module names such as [q_proj, v_proj], or all-linear",
    "any": "a number, a word, a list of names, true or false",
}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MAX_INT = 10**12


@dataclass(frozen=True, slots=True)
class KnobSchema:
    """One name of a workload's vocabulary.

    `default` is the value where neither the space nor the user sets one; a `default_rule` (an
    expression over other names) takes its place where the default follows from them.
    `capacity` marks knobs that make the result better and never faster or smaller (rank,
    length): a search needs a floor on them.

    An `optional` one is not part of a configuration whose space does not mention it: it then has
    its default all the same. One that is not `modelled` acts in real trials, and predictions do
    not know what it does.
    """

    name: str
    kind: Kind
    meaning: str
    default: KnobValue
    default_rule: str | None = None
    allowed: tuple[str, ...] = ()
    minimum: float = -math.inf
    below: float = math.inf
    """Values must be less than this."""
    capacity: bool = False
    optional: bool = False
    modelled: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    """Words that people know and that are not allowed, each with what comes nearest."""

    @property
    def expects(self) -> str:
        """The allowed values in words: "a whole number of at least 1"."""
        if self.kind == "word":
            return f"one of {', '.join(self.allowed)}"
        if self.kind in _EXPECTS:
            return _EXPECTS[self.kind]
        if self.kind == "text":
            options = ", ".join(self.allowed)
            return f"options as name:value with commas between them; names are {options}"
        noun = "a whole number" if self.kind == "int" else "a number"
        if self.below != math.inf:
            return f"{noun} of at least {self.minimum:g} and below {self.below:g}"
        return noun if self.minimum == -math.inf else f"{noun} of at least {self.minimum:g}"

    def read(self, value: Any) -> KnobValue:
        """`value` (typed by a person, or already of the right type) as a value of this term.

        Raises `InputError` with the value, what is allowed and the nearest spelling.
        """
        if isinstance(value, str):
            value = value.strip()
        result = _READERS[self.kind](value)
        if result is None or not self._in_range(result):
            raise self._refusal(value)
        return result

    def _in_range(self, value: KnobValue) -> bool:
        if self.kind == "word":
            return value in self.allowed
        if self.kind == "text":
            options = BETWEEN_OPTIONS.split(str(value)) if value else ()
            return {option.partition(":")[0] for option in options} <= set(self.allowed)
        if isinstance(value, bool | str | tuple):
            return True
        return self.minimum <= value < self.below and abs(value) <= _MAX_INT

    def _refusal(self, value: Any) -> InputError:
        shown = show(value)
        if shown in self.refused:
            return InputError(
                f"{self.name} {shown} is not predicted; it must be {self.expects}",
                hint=self.refused[shown],
            )
        close = nearest(shown.partition(":")[0], self.allowed) if self.allowed else None
        return InputError(
            f"{self.name} cannot be {shown[:60]!r}: it must be {self.expects}",
            hint=f"did you mean {close!r}?" if close else None,
        )


def _read_int(value: Any) -> int | None:
    if isinstance(value, str):
        # Not int(): it would take "٣", and YAML 1.1 would take 010 for eight.
        return int(value) if len(value) < 30 and _INT.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)  # also 2e-4, which YAML 1.1 reads as text
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return _BOOLEANS.get(value.lower()) if isinstance(value, str) else None


def is_pattern(name: str) -> bool:
    """True for a regular expression over names of modules, as peft's `target_modules` takes it."""
    return _NAME.fullmatch(name) is None


def _read_names(value: Any) -> tuple[str, ...] | None:
    """Names from ['q_proj', 'v_proj'], '[q_proj, v_proj]' or 'q_proj,v_proj'."""
    if isinstance(value, str):
        inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        value = [part.strip().strip("'\"") for part in inner.split(",")]
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(part, str) and _NAME.fullmatch(part) for part in value) and not (
        len(value) == 1 and isinstance(value[0], str) and _PATTERN.fullmatch(value[0])
    ):
        return None
    return tuple(value) if len(set(value)) == len(value) else None


def _read_text(value: Any) -> str | None:
    """Options such as 'expandable_segments:True', or none of them ('')."""
    if not isinstance(value, str):
        return None
    parts = [part.strip() for part in BETWEEN_OPTIONS.split(value)] if value else []
    return ",".join(parts) if all(map(_OPTION.fullmatch, parts)) else None


def _read_any(value: Any) -> KnobValue | None:
    """Read the result of an expression."""
    if isinstance(value, list):
        value = tuple(value)
    return value if isinstance(value, bool | int | float | str | tuple) else None


_READERS: Mapping[str, Callable[[Any], KnobValue | None]] = {
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "word": lambda value: value if isinstance(value, str) else None,
    "names": _read_names,
    "text": _read_text,
    "any": _read_any,
}


ALL_LINEAR: tuple[str, ...] = ("all-linear",)
"""peft's own word for every linear layer but the output head, whatever the model calls them."""

NO_NAMES: tuple[str, ...] = ("none",)
"""The empty list of names, which a space file cannot write."""

_KINDS: Mapping[str, Kind] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "word",
    "tuple[str, ...]": "names",
}
"""The kind of a knob by the annotation of its field."""


def knob(name: str, default: Any, meaning: str, **more: Any) -> Any:
    """The field of a group that is the knob `name`; `more` are fields of `KnobSchema`."""
    return field(default=default, metadata={"name": name, "meaning": meaning, **more})


@dataclass(frozen=True, slots=True)
class Group:
    """Knobs that belong together, as typed fields."""

    @classmethod
    def terms(cls) -> tuple[KnobSchema, ...]:
        """The vocabulary of the group, in the order of its fields."""
        return tuple(
            KnobSchema(**{"kind": _KINDS.get(str(f.type)), "default": f.default, **f.metadata})
            for f in fields(cls)
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The group from a whole vocabulary's values; see `WorkloadSchema.values`."""
        return cls(**{f.name: values[f.metadata["name"]] for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class WorkloadSchema:
    """Every name of one workload, and the conditions that hold in each of its spaces."""

    workload: str
    terms: Mapping[str, KnobSchema]
    always: tuple[str, ...] = ()
    tokens: Callable[[Mapping[str, Any]], int] = lambda values: int(values["max_length"])
    """Tokens of one sample of a configuration, at full length; by default of one sequence."""

    def values(self, given: Mapping[str, KnobValue]) -> dict[str, Any]:
        """The value of every knob: the given one, checked, or its default.

        Raises `InputError` for a value of another kind or out of range.
        """
        found: dict[str, Any] = {}
        for name, term in self.terms.items():
            if name in given:
                value = given[name]
                found[name] = value if value == () else term.read(value)  # (): no module
            elif term.default_rule is None:
                found[name] = term.default
            else:
                found[name] = compile_expression(term.default_rule, found).evaluate(found)
        return found
