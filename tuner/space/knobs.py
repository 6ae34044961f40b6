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
from tuner.space.document import Entry, Place, Problems, kind_of

MAX_VALUES = 1000
"""More values of one knob than anyone tells apart."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A name and the values it may take, in the order of the file (the first is its default)."""

    name: str
    values: tuple[KnobValue, ...]


def read_value(place: Place, term: KnobSchema) -> KnobValue | None:
    """One value of `term`, or None with the problem noted."""
    raw: object
    if term.kind == "names" and isinstance(place.node, SequenceNode):
        raw = [Place(place.problems, item, place.at).scalar() for item in place.node.value]
    else:
        raw = place.scalar()
    if raw is None or (isinstance(raw, list) and None in raw):
        return None
    with place.noting():
        return term.read(raw)
    return None


def read_knob(place: Place, term: KnobSchema) -> Knob:
    """The knob there; without values, and with the problem noted, where it is malformed."""
    if isinstance(place.node, MappingNode):
        values = _read_rule(place, term)
    elif isinstance(place.node, SequenceNode):
        values = _read_list(place, term)
    else:
        place.add(
            f"expected the values of a knob, found {kind_of(place.node)}",
            hint="write a list, {min, max, step} or {powers_of_two: {min, max}}; "
            "one value that never changes belongs under `fixed`",
        )
        values = []
    return Knob(term.name, tuple(values))


def read_order(place: Place, knob: Knob, term: KnobSchema) -> tuple[KnobValue, ...]:
    """Values of the knob from least to most memory: a list, "increases" or "decreases"."""
    if isinstance(place.node, SequenceNode):
        order = tuple(_read_list(place, term))
        for value in [value for value in order if value not in knob.values]:
            known = ", ".join(map(show, knob.values))
            place.add(f"{show(value)} is no value of the knob", hint=known)
        return order
    word = place.scalar()
    if word not in ("increases", "decreases"):
        hint = "write increases, decreases, or its values from least to most memory"
        place.add(f"{word!r} is no order", hint=hint)
    elif term.kind not in ("int", "float"):
        hint = "list them from least to most memory"
        place.add("the values of the knob are no numbers", hint=hint)
    else:
        numbers = sorted(value for value in knob.values if isinstance(value, int | float))
        return tuple(numbers if word == "increases" else reversed(numbers))
    return ()


def _read_list(place: Place, term: KnobSchema) -> list[KnobValue]:
    items = place.sequence() or []
    if not items:
        place.add("the list of values is empty")
    if len(items) > MAX_VALUES:
        place.add(f"{len(items)} values; at most {MAX_VALUES} are allowed")
        return []
    values: list[KnobValue] = []
    for item in items:
        value = read_value(item, term)
        if value is not None and value in values:
            item.add(f"the value {show(value)} is listed twice")
        elif value is not None:
            values.append(value)
    return values


def _read_rule(place: Place, term: KnobSchema) -> list[KnobValue]:
    """Values from {min, max, step} or {powers_of_two: {min, max}}."""
    if term.kind not in ("int", "float"):
        place.add(f"{term.name} takes a list: each must be {term.expects}")
        return []
    entries = place.mapping(allowed=("min", "max", "step", "powers_of_two"))
    if "powers_of_two" not in entries:
        return _expand(place, term, ("min", "max", "step"), _steps)
    if len(entries) > 1:
        place.add("powers_of_two stands alone: {powers_of_two: {min, max}}")
        return []
    return _expand(entries["powers_of_two"], term, ("min", "max"), _doublings)


_Expand = Callable[[Mapping[str, float]], "list[float]"]


def _expand(
    place: Place, term: KnobSchema, needs: tuple[str, ...], expand: _Expand
) -> list[KnobValue]:
    entries = place.mapping(allowed=needs)
    missing = [name for name in needs if name not in entries]
    if missing:
        place.add(f"{', '.join(missing)} missing: write {{{', '.join(needs)}}}")
    bounds: dict[str, float] = {}
    for name, entry in entries.items():
        bound = KnobSchema(entry.at.rsplit(".", 1)[-1], term.kind, "", default=0)
        value = read_value(entry, bound)
        if isinstance(value, int | float):
            bounds[name] = value
    if len(bounds) < len(needs):
        return []
    with place.noting():
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
            _check_name(Place(problems, key, part))
            nodes = _values(value) if part == "knobs" else [value]
            found.setdefault(key.value, []).extend(nodes)
    for part_entries in (_pairs(entries, "baseline"), _stage_pairs(entries)):
        for key, value in part_entries:
            if key.value in found:
                found[key.value].append(value)
    terms = {name: _term(name, nodes) for name, nodes in found.items()}
    for key, _ in _pairs(entries, "derived"):
        _check_name(Place(problems, key, "derived"))
        terms.setdefault(key.value, KnobSchema(key.value, "any", _MEANING, default=""))
    return terms


def _pairs(entries: Mapping[str, Entry], part: str) -> Iterator[tuple[ScalarNode, Node]]:
    yield from _scalar_keys(entries[part].node if part in entries else None)


def _stage_pairs(entries: Mapping[str, Entry]) -> Iterator[tuple[ScalarNode, Node]]:
    stages = entries["stages"].node if "stages" in entries else None
    for stage in stages.value if isinstance(stages, SequenceNode) else []:
        for key, value in _scalar_keys(stage):
            if key.value == "set":
                yield from _scalar_keys(value)


def _scalar_keys(node: Node | None) -> Iterator[tuple[ScalarNode, Node]]:
    if isinstance(node, MappingNode):
        yield from ((key, value) for key, value in node.value if isinstance(key, ScalarNode))


def _check_name(key: Place) -> None:
    name = key.node.value
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        hint = "letters, digits and _, as in the conditions that read it"
        key.add(f"{name[:60]!r} is not a name for a value", hint=hint)


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
