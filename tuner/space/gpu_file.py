"""A YAML file whose every problem can be reported with its line; used for the GPU catalogue."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import yaml

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.units import parse_bytes

MAX_BYTES = 256 * 1024
"""Several times the shipped catalogue with its sources."""

_LONGEST_SIZE = 40  # characters; longer digits would overflow a float


class YamlFile:
    """A YAML file as nodes that know their line, and the problems found in it so far.

    Nodes instead of Python objects: every scalar stays the text that was written (YAML 1.1
    would make numbers, dates and booleans of some), and every problem gets its line.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._trusted = trusted
        self.problems: list[Problem] = []

    def root(self) -> yaml.Node | None:
        """The document's node; None for an empty or unreadable one, which is reported."""
        # libyaml is ten times faster, and brackets nested by the thousand overflow its stack.
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader) if self._trusted else yaml.BaseLoader
        try:
            node: yaml.Node | None = yaml.compose(self._text(), loader)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path} is not a text file in UTF-8: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            what = getattr(error, "problem", None) or str(error).splitlines()[0]
            self.problems.append(Problem(f"is not valid YAML: {what}", f"{self.path.name}{line}"))
            self.raise_problems()
        except RecursionError:
            self.report(None, "", "is nested too deeply")
            self.raise_problems()
        except (ValueError, OverflowError) as error:
            # PyYAML lets these escape from impossible escapes (\UFFFFFFFF) and versions.
            self.report(None, "", f"is not valid YAML: {error}")
            self.raise_problems()
        if node is None:
            self.report(None, "", "is empty; expected `gpus:` with one entry per id")
        return node

    def _text(self) -> str:
        with self.path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{self.path} is larger than {MAX_BYTES} bytes, and no GPU file")
        return data.decode("utf-8")

    def report(self, node: yaml.Node | None, where: str, message: str) -> None:
        """Note a problem of the value at `node`, which stands at `where` ("gpus.a6000.memory")."""
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        self.problems.append(Problem(message, f"{self.path.name}{line} {where}".rstrip()))

    def raise_problems(self) -> None:
        """Raise one `InputError` with all problems noted so far, if there are any."""
        if self.problems:
            raise InputError(f"GPU file {self.path} cannot be used", problems=self.problems)

    def mapping(
        self, node: yaml.Node | None, where: str, known: Iterable[str] = ()
    ) -> dict[str, yaml.Node]:
        """The entries of a mapping; double keys and, given `known`, unknown ones are reported."""
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            self.report(node, where, "is not a mapping (`key: value` lines)")
            return {}
        found: dict[str, yaml.Node] = {}
        known = tuple(known)
        for key_node, value in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not key or not key.strip():
                self.report(key_node, where, "has a key that is not a word")
            elif known and key not in known:
                close = nearest(key, known)
                hint = f"did you mean {close!r}?" if close else f"allowed: {', '.join(known)}"
                self.report(key_node, where, f"unknown key {key!r}; {hint}")
            elif key in found:
                self.report(key_node, where, f"key {key!r} is set twice")
            else:
                found[key] = value
        return found

    @staticmethod
    def is_null(node: yaml.Node) -> bool:
        """Whether the value is written as nothing, `~` or `null`."""
        return isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")

    def text(self, node: yaml.Node, where: str) -> str | None:
        """The text of a scalar as it was written, without space around it."""
        if isinstance(node, yaml.ScalarNode) and node.value.strip():
            return str(node.value).strip()
        self.report(node, where, "is not a text")
        return None

    def texts(self, node: yaml.Node, where: str) -> tuple[str, ...] | None:
        """The texts of a list."""
        if not isinstance(node, yaml.SequenceNode):
            self.report(node, where, "is not a list of texts")
            return None
        values = [self.text(item, where) for item in node.value]
        return tuple(value for value in values if value is not None)

    def number(self, node: yaml.Node, where: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`, both included."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            self.report(node, where, f"{text!r} is not a number from {low:g} to {high:g}")
            return None
        return value

    def size(self, node: yaml.Node, where: str, low: int, high: int) -> int | None:
        """Bytes of a size with its unit, from `low` to `high`."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = parse_bytes(text[:_LONGEST_SIZE], what=where.rpartition(".")[2])
        except InputError as error:
            self.report(node, where, f"{error.message}; {error.hint}")
            return None
        if not low <= value <= high:
            self.report(node, where, f"{text!r} is not between {low} and {high} bytes")
            return None
        return value
