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
from dataclasses import dataclass
from typing import Literal

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError
from tuner.program.edit.place import Language, Location, Value, read_number
from tuner.space.apply import Path, show_path
from tuner.space.document import yaml_errors

_TAG = "tag:yaml.org,2002:"
_LINE_BREAK = re.compile("[\n\r\x85\u2028\u2029]")
_INTERPOLATION = re.compile(r"\$\{|\{\{")
_ANCHOR = re.compile(r"&\S+[ \t]+")
_MAX_DEPTH = 60
_MOST_MERGED = 100_000
"""Values that merge keys of a document may bring in: few lines can stand for gigabytes of them."""


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
            places += [] if root is None else _Document(text, language, root).places()
    return places


@dataclass(frozen=True, slots=True)
class _Spot:
    """The path and line by which a node was reached, and the problem on the way."""

    path: Path
    line: int
    problem: str | None = None


class _Document:
    """Walks one document; a node that is reached twice is one that an alias names."""

    def __init__(self, text: str, language: Language, root: Node) -> None:
        self.text = text
        self.language = language
        self.root = root
        self.references = _references(root)
        self.seen: set[int] = set()
        self.merged = 0

    def places(self) -> list[Location]:
        return list(self._walk(self.root, _Spot((), self.root.start_mark.line + 1)))

    def _walk(self, node: Node, spot: _Spot) -> Iterator[Location]:
        if id(node) in self.seen:
            if isinstance(node, ScalarNode):
                yield self._scalar(node, spot)  # an alias is another name of the same value
            else:
                yield self._blocked(node, spot, "is an alias of what stands in", node)
            return
        self.seen.add(id(node))
        problem = spot.problem
        is_shared = self.references[id(node)] > 1 and not isinstance(node, ScalarNode)
        if problem is None and is_shared:
            problem = "has an anchor, and aliases of it stand elsewhere"
        if problem is None and len(spot.path) > _MAX_DEPTH:
            problem = "is nested too deeply"
        spot = _Spot(spot.path, spot.line, problem)
        if isinstance(node, ScalarNode):
            yield self._scalar(node, spot)
        elif isinstance(node, SequenceNode):
            yield self._sequence(node, spot)
            for index, item in enumerate(node.value):
                line = item.start_mark.line + 1
                yield from self._walk(item, _Spot((*spot.path, index), line, problem))
        else:
            yield self._place(node, spot, problem=problem or "is a mapping, not a value")
            yield from self._entries(node, spot)

    def _entries(self, node: Node, spot: _Spot) -> Iterator[Location]:
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            lines.setdefault(_name(key), []).append(key.start_mark.line + 1)
        for key, value in node.value:
            name, line = _name(key), key.start_mark.line + 1
            path = (*spot.path, name)
            problem = spot.problem
            if len(lines[name]) > 1:
                numbers = " and ".join(map(str, lines[name]))
                problem = f"belongs to {show_path(path)}, which is set twice, in lines {numbers}"
            if _is_merge(key):
                self.seen.add(id(key))
                yield from self._merged(value, spot, line, set(lines))
            yield from self._walk(value, _Spot(path, line, problem))

    def _merged(self, value: Node, spot: _Spot, line: int, own: set[str]) -> Iterator[Location]:
        """The values that a merge key (`<<`) adds to those of the mapping itself."""
        names = sorted(_merged_names(value) - own)
        self.merged += len(names)
        if self.merged > _MOST_MERGED:
            raise ValueError(f"merge keys (<<) bring in more than {_MOST_MERGED} values")
        for name in names:
            yield self._blocked(
                value,
                _Spot((*spot.path, name), line),
                "comes from a merge key (<<), of what stands in",
                value,
            )

    def _blocked(self, node: Node, spot: _Spot, why: str, origin: Node) -> Location:
        problem = f"{why} line {origin.start_mark.line + 1}"
        return Location(
            path=spot.path,
            line=spot.line,
            start=node.start_mark.index,
            end=node.start_mark.index,
            raw="",
            language=self.language,
            problem=spot.problem or problem,
            kind="alias",
        )

    def _scalar(self, node: ScalarNode, spot: _Spot) -> Location:
        start = node.start_mark.index
        anchor = _ANCHOR.match(self.text, start, node.end_mark.index)
        start = anchor.end() if anchor else start
        raw = self.text[start : node.end_mark.index]
        value, problem = _scalar_value(node, raw)
        problem = spot.problem or problem
        quote = raw[:1] if raw[:1] in ("'", '"') else ""
        return self._place(
            node, spot, value=None if problem else value, problem=problem, quote=quote, start=start
        )

    def _sequence(self, node: SequenceNode, spot: _Spot) -> Location:
        raw = self.text[node.start_mark.index : node.end_mark.index]
        items = [item for item in node.value if isinstance(item, ScalarNode)]
        if spot.problem or len(items) != len(node.value):
            return self._place(node, spot, problem=spot.problem or "is a list, not a value")
        on_one_line = raw.startswith("[") and not _LINE_BREAK.search(raw)
        names = tuple(item.value for item in items)
        marks = [item.style or "" for item in items]
        problem = None if on_one_line else "is a list over several lines"
        quote = marks[0] if marks and marks[0] in ("'", '"') else ""
        return self._place(node, spot, value=names, problem=problem, quote=quote)

    def _place(
        self,
        node: Node,
        spot: _Spot,
        *,
        value: Value = None,
        problem: str | None = None,
        quote: str = "",
        start: int | None = None,
    ) -> Location:
        start = node.start_mark.index if start is None else start
        end = node.end_mark.index
        return Location(
            path=spot.path,
            line=node.start_mark.line + 1,
            start=start,
            end=end,
            raw=self.text[start:end],
            language=self.language,
            value=value,
            quote='"' if self.language == "json" else quote,
            problem=problem,
            kind=_kind(node),
        )


def _kind(node: Node) -> Literal["value", "list", "reference"]:
    if isinstance(node, SequenceNode):
        return "list"
    is_reference = isinstance(node, ScalarNode) and _INTERPOLATION.search(node.value)
    return "reference" if is_reference else "value"


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


def _is_merge(key: Node) -> bool:
    return bool(key.tag == f"{_TAG}merge")


def _merged_names(value: Node) -> set[str]:
    names: set[str] = set()
    seen: set[int] = set()
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Node] = []
        for node in level:
            seen.add(id(node))
            if isinstance(node, SequenceNode):
                below += node.value
            elif isinstance(node, MappingNode):
                names |= {_name(key) for key, _ in node.value if not _is_merge(key)}
                below += [item for key, item in node.value if _is_merge(key)]
        level = list({id(node): node for node in below if id(node) not in seen}.values())
        if not level:
            return names
    raise ValueError(f"more than {_MAX_DEPTH} merge keys (<<) go through each other")


def _scalar_value(node: ScalarNode, raw: str) -> tuple[Value, str | None]:
    if raw[:1] in ("&", "!"):
        return None, "has an anchor or a tag"
    if node.style in ("|", ">") or _LINE_BREAK.search(raw):
        return None, "goes over several lines"
    text: str = node.value
    if _INTERPOLATION.search(text):
        return None, f"is an interpolation, {raw}: map the key that it takes its value from"
    return (text if node.style is not None else _plain_value(text, node.tag)), None


def _plain_value(text: str, tag: str) -> Value:
    if tag == f"{_TAG}null" or text == "???":  # OmegaConf: still to be set
        return None
    if tag == f"{_TAG}bool":
        return text.lower() in ("true", "yes", "on")
    number = read_number(text)
    if number is None and tag in (f"{_TAG}int", f"{_TAG}float"):
        number = math.nan  # 0x10, 1_000, .inf: a number, never the one that is to be written
    return text if number is None else number
