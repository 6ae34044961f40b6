"""The vocabulary of a space whose code nobody here has seen: names typed by their YAML values."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tuner.core.setup.knob_schema import Kind, KnobSchema
from tuner.space.document import Entry, Problems

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
