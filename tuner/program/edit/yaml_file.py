"""The values of a YAML or JSON file, each with its exact place in the text.

Nodes are composed, not constructed: no tag runs code, and `${...}`, `2e-4` and duplicate keys are
seen as written.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError
from tuner.program.edit.place import NO_VALUE, Kind, Language, Location, Value, read_number
from tuner.space.apply import Path
from tuner.space.document import yaml_errors

_TAG = "tag:yaml.org,2002:"
_LINE_BREAK = re.compile("[\n\r\x85\u2028\u2029]")
_INTERPOLATION = re.compile(r"\$\{|\{\{")
_ANCHOR = re.compile(r"&\S+[ \t]+")
_MAX_DEPTH = 60
_MOST_AGAIN = 10_000
"""Aliases and merge keys can stand for gigabytes of values in a few lines."""


def read_yaml(text: str, file: str) -> list[Location]:
    """All values of the YAML documents in `text`, in order; `InputError` with a broken line."""
    return _read(text, text, file, "yaml")


def read_json(text: str, file: str) -> list[Location]:
    """Every value of the JSON document `text`. Raises `InputError` where it is none."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: broken JSON: {error}") from None
    # JSON is YAML but for tabs between its tokens; inside its strings there are none.
    return _read(text, text.replace("\t", " "), file, "json")


def _read(text: str, composable: str, file: str, language: Language) -> list[Location]:
    places: list[Location] = []
    with yaml_errors(text, file):
        for root in yaml.compose_all(composable, Loader=yaml.SafeLoader):
            # compose_all gives None for an empty document.
            places += [] if root is None else _Document(text, language, root).walk(root, ())
    return places


class _Document:
    """Walks one document; what is reached again by an alias or a merge key can't be changed."""

    def __init__(self, text: str, language: Language, root: Node) -> None:
        self.text = text
        self.language = language
        self.references = _references(root)
        self.seen: set[int] = set()
        self.left = _MOST_AGAIN

    def walk(self, node: Node, path: Path, problem: str | None = None) -> Iterator[Location]:
        if id(node) in self.seen or len(path) > _MAX_DEPTH:
            self._count(len(path))
        self.seen.add(id(node))
        if isinstance(node, ScalarNode):
            yield self._scalar(node, path, problem)
            return
        if self.references[id(node)] > 1:
            problem = NO_VALUE
        if isinstance(node, SequenceNode):
            yield self._sequence(node, path, problem)
            for index, item in enumerate(node.value):
                yield from self.walk(item, (*path, index), problem)
        else:
            yield self._place(node, path, None, problem or NO_VALUE, "mapping")
            keys = Counter(_name(key) for key, _ in node.value)
            for key, value in node.value:
                name = _name(key)
                blocked = problem if keys[name] == 1 else NO_VALUE
                yield from self.walk(value, (*path, name), blocked)
            for key, value in self._merged(node):
                if _name(key) not in keys:
                    keys[_name(key)] = 1
                    yield from self.walk(value, (*path, _name(key)), NO_VALUE)

    def _count(self, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise ValueError(
                f"aliases and merge keys (<<) stand for more than {_MOST_AGAIN} values, "
                f"or nest more than {_MAX_DEPTH} levels deep"
            )

    def _merged(self, node: Node, depth: int = 0) -> Iterator[tuple[Node, Node]]:
        """The entries that the merge keys (`<<`) of a mapping add; the first of a name counts."""
        for key, value in node.value if isinstance(node, MappingNode) else ():
            if key.tag == f"{_TAG}merge":
                for one in value.value if isinstance(value, SequenceNode) else [value]:
                    self._count(depth)
                    if isinstance(one, MappingNode):
                        yield from one.value
                        yield from self._merged(one, depth + 1)

    def _scalar(self, node: ScalarNode, path: Path, problem: str | None) -> Location:
        anchor = _ANCHOR.match(self.text, node.start_mark.index, node.end_mark.index)
        start = anchor.end() if anchor else node.start_mark.index
        raw = self.text[start : node.end_mark.index]
        is_computed = bool(_INTERPOLATION.search(node.value))
        is_block = node.style in ("|", ">") or bool(_LINE_BREAK.search(raw))
        if is_computed or is_block or raw[:1] in ("&", "!"):
            problem = NO_VALUE
        value = None
        if problem is None:
            value = node.value if node.style else _plain_value(node.value, node.tag)
        kind: Kind = "computed" if is_computed else "value"
        place = self._place(node, path, value, problem, kind)
        quote = raw[:1] if raw[:1] in ("'", '"') else ""
        return replace(place, start=start, raw=raw, quote=quote)

    def _sequence(self, node: SequenceNode, path: Path, problem: str | None) -> Location:
        raw = self.text[node.start_mark.index : node.end_mark.index]
        value = None
        if problem is None and all(isinstance(item, ScalarNode) for item in node.value):
            value = tuple(item.value for item in node.value)
        if value is None or raw[:1] != "[" or _LINE_BREAK.search(raw):
            problem = NO_VALUE
        style = node.value[0].style if value else ""
        place = self._place(node, path, value, problem, "list")
        return place if self.language == "json" else replace(place, quote=(style or "").strip("|>"))

    def _place(
        self, node: Node, path: Path, value: Value, problem: str | None, kind: Kind
    ) -> Location:
        start, end = node.start_mark.index, node.end_mark.index
        return Location(
            path, node.start_mark.line + 1, start, end, self.text[start:end], self.language,
            value, '"' if self.language == "json" else "", problem, kind,
            names=tuple(step for step in reversed(path) if isinstance(step, str)),
        )  # fmt: skip


def _references(root: Node) -> Counter[int]:
    """The number of references to each node: more than one if it has aliases."""
    counts: Counter[int] = Counter()
    pending = [root]
    while pending:
        node = pending.pop()
        counts[id(node)] += 1
        if counts[id(node)] > 1:
            continue
        if isinstance(node, SequenceNode):
            pending += node.value
        elif isinstance(node, MappingNode):
            pending += [part for pair in node.value for part in pair]
    return counts


def _name(key: Node) -> str:
    return str(key.value) if isinstance(key, ScalarNode) else "?"


def _plain_value(text: str, tag: str) -> Value:
    if tag == f"{_TAG}null" or text == "???":  # OmegaConf: still to be set
        return None
    if tag == f"{_TAG}bool":
        return text.lower() in ("true", "yes", "on")
    number = read_number(text)
    if number is None and tag in (f"{_TAG}int", f"{_TAG}float"):
        number = math.nan  # 0x10, 1_000, .inf: a number, never the one that is to be written
    return text if number is None else number
