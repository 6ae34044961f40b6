"""The values of one knob: a list, a range with a step, or powers of two."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.core.setup.schema import Kind, KnobSchema
from tuner.space.document import Entry, Problems, kind_of, mapping, scalar, sequence

MAX_VALUES = 1000
"""More values of one knob than anyone tells apart."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A name and the values it may take, in the order of the file (the first is its default)."""

    name: str
    values: tuple[KnobValue, ...]


def read_value(node: Node, term: KnobSchema, problems: Problems, at: str) -> KnobValue | None:
    """One value of `term`, or None with the problem noted."""
    raw: object
    if term.kind == "names" and isinstance(node, SequenceNode):
        raw = [scalar(item, problems, at) for item in node.value]
    else:
        raw = scalar(node, problems, at)
    if raw is None or (isinstance(raw, list) and None in raw):
        return None
    with problems.noting(node, at):
        return term.read(raw)
    return None


def read_knob(node: Node, term: KnobSchema, problems: Problems, at: str) -> Knob:
    """The knob at `node`; without values, and with the problem noted, where it is malformed."""
    if isinstance(node, MappingNode):
        values = _read_rule(node, term, problems, at)
    elif isinstance(node, SequenceNode):
        values = _read_list(node, term, problems, at)
    else:
        problems.add(
            node,
            f"expected the values of a knob, found {kind_of(node)}",
            at=at,
            hint="write a list, {min, max, step} or {powers_of_two: {min, max}}; "
            "one value that never changes belongs under `fixed`",
        )
        values = []
    return Knob(term.name, tuple(values))


def read_order(
    node: Node, knob: Knob, term: KnobSchema, problems: Problems, at: str
) -> tuple[KnobValue, ...]:
    """Values of the knob from least to most memory: a list, "increases" or "decreases"."""
    if isinstance(node, SequenceNode):
        order = tuple(_read_list(node, term, problems, at))
        for value in [value for value in order if value not in knob.values]:
            known = ", ".join(map(show, knob.values))
            problems.add(node, f"{show(value)} is no value of the knob", at=at, hint=known)
        return order
    word = scalar(node, problems, at)
    if word not in ("increases", "decreases"):
        hint = "write increases, decreases, or its values from least to most memory"
        problems.add(node, f"{word!r} is no order", at=at, hint=hint)
    elif term.kind not in ("int", "float"):
        hint = "list them from least to most memory"
        problems.add(node, "the values of the knob are no numbers", at=at, hint=hint)
    else:
        numbers = sorted(value for value in knob.values if isinstance(value, int | float))
        return tuple(numbers if word == "increases" else reversed(numbers))
    return ()


def _read_list(node: Node, term: KnobSchema, problems: Problems, at: str) -> list[KnobValue]:
    items = sequence(node, problems, at) or []
    if not items:
        problems.add(node, "the list of values is empty", at=at)
    if len(items) > MAX_VALUES:
        problems.add(node, f"{len(items)} values; at most {MAX_VALUES} are allowed", at=at)
        return []
    values: list[KnobValue] = []
    for item in items:
        value = read_value(item, term, problems, at)
        if value is not None and value in values:
            problems.add(item, f"the value {show(value)} is listed twice", at=at)
        elif value is not None:
            values.append(value)
    return values


def _read_rule(node: Node, term: KnobSchema, problems: Problems, at: str) -> list[KnobValue]:
    """Values from {min, max, step} or {powers_of_two: {min, max}}."""
    if term.kind not in ("int", "float"):
        problems.add(node, f"{term.name} takes a list: each must be {term.expects}", at=at)
        return []
    entries = mapping(node, problems, at, allowed=("min", "max", "step", "powers_of_two"))
    if "powers_of_two" not in entries:
        return _expand(node, term, problems, at, needs=("min", "max", "step"), expand=_steps)
    if len(entries) > 1:
        problems.add(node, "powers_of_two stands alone: {powers_of_two: {min, max}}", at=at)
        return []
    inner = entries["powers_of_two"]
    return _expand(inner.value, term, problems, inner.at, needs=("min", "max"), expand=_doublings)


_Expand = Callable[[Mapping[str, float]], "list[float]"]


def _expand(
    node: Node,
    term: KnobSchema,
    problems: Problems,
    at: str,
    *,
    needs: tuple[str, ...],
    expand: _Expand,
) -> list[KnobValue]:
    entries = mapping(node, problems, at, allowed=needs)
    missing = [name for name in needs if name not in entries]
    if missing:
        text = f"{', '.join(missing)} missing: write {{{', '.join(needs)}}}"
        problems.add(node, text, at=at)
    bounds: dict[str, float] = {}
    for name, entry in entries.items():
        bound = KnobSchema(entry.at.rsplit(".", 1)[-1], term.kind, "", default=0)
        value = read_value(entry.value, bound, problems, entry.at)
        if isinstance(value, int | float):
            bounds[name] = value
    if len(bounds) < len(needs):
        return []
    with problems.noting(node, at):
        return [term.read(value) for value in expand(bounds)]
    return []


def _steps(bounds: Mapping[str, float]) -> list[float]:
    low, high, step = bounds["min"], bounds["max"], bounds["step"]
    if step <= 0:
        raise InputError(f"step {show(step)} must be more than 0")
    if low > high:
        raise InputError(f"min {show(low)} is more than max {show(high)}")
    count = int((high - low) / step + 1e-9) + 1
    if count > MAX_VALUES:
        raise InputError(
            f"{show(low)} to {show(high)} in steps of {show(step)} are {count} values; "
            f"at most {MAX_VALUES} are allowed"
        )
    # Rounding keeps 0.1 + 2 * 0.1 at 0.3.
    return [round(low + i * step, 12) for i in range(count)]


def _doublings(bounds: Mapping[str, float]) -> list[float]:
    low, high = bounds["min"], bounds["max"]
    if low <= 0 or low > high:
        raise InputError(f"powers of two need 0 < min <= max, not {show(low)} to {show(high)}")
    values = [2**exponent for exponent in range(64) if low <= 2**exponent <= high]
    if not values:
        raise InputError(f"there is no power of two from {show(low)} to {show(high)}")
    return list(values)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""A number for people, and text for YAML 1.1: 2e-4."""
_MEANING = "a setting of the user's own code"


def own_terms(entries: Mapping[str, Entry], problems: Problems) -> dict[str, KnobSchema]:
    """A term for each name under `knobs`, `fixed` and `derived`; bad names are noted.

    Whole numbers, numbers, booleans and lists are what YAML reads them as; everything else is
    one of the words that the file has for it. Derived values may be anything.
    """
    found: dict[str, list[Node]] = {}
    for part in ("knobs", "fixed"):
        for key, value in _pairs(entries, part):
            _check_name(key, problems, part)
            nodes = _values(value) if part == "knobs" else [value]
            found.setdefault(key.value, []).extend(nodes)
    for part_entries in (_pairs(entries, "baseline"), _stage_pairs(entries)):
        for key, value in part_entries:
            if key.value in found:
                found[key.value].append(value)
    terms = {name: _term(name, nodes) for name, nodes in found.items()}
    for key, _ in _pairs(entries, "derived"):
        _check_name(key, problems, "derived")
        terms.setdefault(key.value, KnobSchema(key.value, "any", _MEANING, default=""))
    return terms


def _pairs(entries: Mapping[str, Entry], part: str) -> Iterator[tuple[ScalarNode, Node]]:
    node = entries[part].value if part in entries else None
    yield from _scalar_keys(node)


def _stage_pairs(entries: Mapping[str, Entry]) -> Iterator[tuple[ScalarNode, Node]]:
    stages = entries["stages"].value if "stages" in entries else None
    for stage in stages.value if isinstance(stages, SequenceNode) else []:
        for key, value in _scalar_keys(stage):
            if key.value == "set":
                yield from _scalar_keys(value)


def _scalar_keys(node: Node | None) -> Iterator[tuple[ScalarNode, Node]]:
    if isinstance(node, MappingNode):
        yield from ((key, value) for key, value in node.value if isinstance(key, ScalarNode))


def _check_name(key: ScalarNode, problems: Problems, part: str) -> None:
    if not _NAME.fullmatch(key.value) or keyword.iskeyword(key.value):
        hint = "letters, digits and _, as in the conditions that read it"
        problems.add(key, f"{key.value[:60]!r} is not a name for a value", at=part, hint=hint)


def _values(knob: Node) -> Iterator[Node]:
    """Each value of a knob: the items of its list, or the numbers of its range."""
    if isinstance(knob, SequenceNode):
        yield from knob.value
    elif isinstance(knob, MappingNode):
        for _, value in knob.value:
            yield from _values(value)
    else:
        yield knob


def _term(name: str, nodes: list[Node]) -> KnobSchema:
    kinds = {_kind(node) for node in nodes}
    if kinds <= {"int", "float"} and kinds:
        kind: Kind = "float" if "float" in kinds else "int"
        return KnobSchema(name, kind, _MEANING, default=0)
    if kinds == {"bool"}:
        return KnobSchema(name, "bool", _MEANING, default=False)
    words = [node.value.strip() for node in nodes if isinstance(node, ScalarNode)]
    if "names" in kinds:
        return KnobSchema(name, "names", _MEANING, default=())
    return KnobSchema(name, "word", _MEANING, default="", allowed=tuple(dict.fromkeys(words)))


def _kind(node: Node) -> Kind:
    if isinstance(node, SequenceNode):
        return "names"
    tag = node.tag.removeprefix(_TAG)
    if tag in ("int", "float", "bool"):
        return "int" if tag == "int" else "float" if tag == "float" else "bool"
    plain = isinstance(node, ScalarNode) and node.style is None
    return "float" if plain and _EXPONENT.fullmatch(node.value) else "word"
