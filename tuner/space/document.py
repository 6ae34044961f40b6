"""A YAML file as nodes that know their line, with every problem found kept beside its line.

Only `compose` is used: nothing is constructed, so a tag cannot run code, an alias is never
expanded, and `no` is still the text `no` where a knob expects a word.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError, Problem, nearest

MAX_BYTES = 256 * 1024
"""These files are pages of text; anything larger is the wrong file."""
MAX_PROBLEMS = 40
_STANDARD_TAG = "tag:yaml.org,2002:"
_STANDARD_TAGS = frozenset(
    _STANDARD_TAG + name
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file: its noun, the beginning of one, and where to find more."""

    noun: str
    example: str
    hint: str


SPACE = Form("search space", "name: my_space", "`tuner spaces` shows spaces to copy")


@dataclass(slots=True)
class Problems:
    """Collects what is wrong in one file; `check` raises it all at once.

    `nodes` are those of places that are judged when all is read, by their names.
    """

    file: str
    found: list[Problem] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def place(self, at: str) -> Place:
        """The place of this name; it has no line if it isn't among the `nodes`."""
        return Place(self, self.nodes.get(at), at)

    def check(self) -> None:
        """Raise `InputError` with every problem, in the order of the lines, if there is one."""
        if not self.found:
            return
        count = len(self.found)
        things = "one thing is" if count == 1 else f"{count} things are"
        shown = sorted(self.found[:MAX_PROBLEMS], key=_line_of)
        more = [Problem(f"and {count - MAX_PROBLEMS} more")] if count > MAX_PROBLEMS else []
        raise InputError(f"{self.file}: {things} wrong in this search space", problems=shown + more)


def _line_of(problem: Problem) -> int:
    match = re.search(r":(\d+)(?: |$)", problem.where)
    return int(match.group(1)) if match else 0


def read_text(path: Path, form: Form = SPACE) -> str:
    """The text of the file at `path`. Raises `InputError` where it cannot be read."""
    try:
        if not path.is_file():
            raise InputError(f"there is no {form.noun} file {str(path)!r}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        text = f"{path}: larger than {MAX_BYTES} bytes; a {form.noun} is a short file"
        raise InputError(text)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not text in UTF-8 (byte {data[error.start]})") from None


@contextlib.contextmanager
def yaml_errors(text: str, file: str) -> Iterator[None]:
    """Inside, an error of YAML in `text` is raised as an `InputError`, with its line if known."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        began = error.context_mark.line + 1 if error.context_mark else None
        context = error.context and (
            f"{error.context} that began in line {began}" if began else error.context
        )
        parts = [part for part in (context, error.problem) if part]
        raise InputError(f"{file}{line}: broken YAML: {', '.join(parts)}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{file}{line}: broken YAML: {error.reason}") from None
    except RecursionError:
        raise InputError(f"{file}: broken YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets these two escape from impossible escapes (\UFFFFFFFF) and versions.
        raise InputError(f"{file}: broken YAML: {error}") from None


def compose(
    text: str, file: str, form: Form = SPACE, *, loader: Any = yaml.SafeLoader
) -> MappingNode:
    """The root mapping of one YAML document. Raises `InputError` with the line if broken."""
    with yaml_errors(text, file):
        root = yaml.compose(text, Loader=loader)
    if root is None:
        raise InputError(f"{file}: the file is empty", hint=form.hint)
    if not isinstance(root, MappingNode):
        number = root.start_mark.line + 1
        raise InputError(f"{file}:{number}: a {form.noun} is a mapping such as `{form.example}`")
    return root


def is_nothing(node: Node) -> bool:
    """True if a value is written as nothing, `~` or `null`."""
    return bool(node.tag == f"{_STANDARD_TAG}null")


def kind_of(node: Node) -> str:
    """The shape of a node for people: "a mapping", "a list", "nothing" or "a value"."""
    if isinstance(node, MappingNode):
        return "a mapping (key: value)"
    if isinstance(node, SequenceNode):
        return "a list"
    return "nothing" if is_nothing(node) else f"the value {node.value[:60]!r}"


@dataclass(frozen=True, slots=True)
class Place:
    """A node and its dotted place ("knobs.lora_rank"), whose problems are noted for its line."""

    problems: Problems
    node: Any
    at: str

    def add(self, message: str, *, hint: str | None = None) -> None:
        """Note what is wrong here."""
        line = f":{self.node.start_mark.line + 1}" if self.node is not None else ""
        where = f"{self.problems.file}{line} {self.at}".rstrip()
        self.problems.found.append(Problem(f"{message} ({hint})" if hint else message, where))

    def add_error(self, error: InputError) -> None:
        """Note an error that was raised about the text."""
        for message in [error.message, *map(str, error.problems)]:
            self.add(message, hint=error.hint)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, an `InputError` about the text is noted, and ends the block."""
        try:
            yield
        except InputError as error:
            self.add_error(error)

    def keep(self, at: str) -> None:
        """Have the node found under this name, when all is read."""
        self.problems.nodes[at] = self.node

    def scalar(self) -> str | None:
        """The text of a scalar as it was written, or None with the problem noted."""
        if not isinstance(self.node, ScalarNode) or is_nothing(self.node):
            self.add(f"expected a value, found {kind_of(self.node)}")
            return None
        if self._is_tagged():
            return None
        text: str = self.node.value
        if bad := _UNPRINTABLE.search(text):
            self.add(f"contains the unprintable character {bad.group()!r}")
            return None
        return text

    def sequence(self) -> list[Place] | None:
        """The items of a list, or None with the problem noted."""
        if not isinstance(self.node, SequenceNode):
            self.add(f"expected a list, found {kind_of(self.node)}")
            return None
        if self._is_tagged():
            return None
        return [Place(self.problems, item, self.at) for item in self.node.value]

    def mapping(
        self, *, allowed: Collection[str] | None = None, noun: str = "key"
    ) -> dict[str, Entry]:
        """The entries by name; repeated and (given `allowed`) unknown keys are noted."""
        if not isinstance(self.node, MappingNode):
            self.add(f"expected a mapping (key: value), found {kind_of(self.node)}")
            return {}
        if self._is_tagged():
            return {}
        entries: dict[str, Entry] = {}
        for key_node, value in self.node.value:
            key = Place(self.problems, key_node, self.at)
            name = key.scalar()
            if name is None:
                continue
            if name == "<<":
                key.add("merge keys (<<) are not read: write the values out")
            elif name in entries:
                first = entries[name].key.node.start_mark.line + 1
                key.add(f"{name!r} is set twice, first in line {first}")
            elif allowed is not None and name not in allowed:
                key.add(f"unknown {noun} {name[:60]!r}", hint=suggestion(name, allowed))
            else:
                at = f"{self.at}.{name[:60]}".lstrip(".")
                entries[name] = Entry(self.problems, value, at, name, key)
        return entries

    def _is_tagged(self) -> bool:
        """True, with a problem noted, if the node has a tag of its own (`!foo`)."""
        if self.node.tag in _STANDARD_TAGS:
            return False
        self.add(f"tags such as {self.node.tag[:40]!r} are not read")
        return True


@dataclass(frozen=True, slots=True)
class Entry(Place):
    """The value of one `key: value` of a mapping, with its name and the place of its key."""

    name: str
    key: Place


def text_of(entry: Entry | None) -> str | None:
    """The text of an entry; None without one, or with the problem noted."""
    return entry.scalar() if entry else None


def suggestion(word: str, allowed: Collection[str]) -> str:
    """The nearest spelling as a question, or everything that is allowed."""
    close = nearest(word[:60], allowed)
    return f"did you mean {close!r}?" if close else f"allowed: {', '.join(sorted(allowed))}"
