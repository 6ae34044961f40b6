"""The part `apply` of a space: where the user's files keep the values of its knobs."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from yaml.nodes import MappingNode, Node, SequenceNode

from tuner.core.errors import InputError
from tuner.space.document import Entry, Problems, mapping, scalar, sequence, suggestion, text_of

Step = str | int
Path = tuple[Step, ...]

_STEP = re.compile(
    r"""(?P<name>[\w-]+)|\[(?P<index>\d{1,6})\]|\["(?P<double>[^"]*)"\]|\['(?P<single>[^']*)'\]"""
)
_NAME = re.compile(r"(?P<name>[\w-]+)")
_MAX_LENGTH = 300


@dataclass(frozen=True, slots=True)
class KeyPath:
    """The keys and list indices that lead to a value; `anywhere` leaves out how it begins."""

    steps: Path
    anywhere: bool = False

    def matches(self, path: Path) -> bool:
        """True if the key path leads to `path`."""
        if self.anywhere:
            return path[-len(self.steps) :] == self.steps
        return path == self.steps

    def __str__(self) -> str:
        return "." * self.anywhere + show_path(self.steps)


def read_key(text: str) -> KeyPath:
    """`text` as a key path: names parted by dots, `[0]` and `["a.b"]`; a leading dot: anywhere.

    Raises `InputError` for anything else.
    """
    anywhere = text.startswith(".")
    steps: list[Step] = []
    position = int(anywhere)
    while position < len(text) <= _MAX_LENGTH:
        if steps and text[position] not in ".[":
            break
        after_dot = bool(steps) and text[position] == "."
        match = (_NAME if after_dot else _STEP).match(text, position + after_dot)
        if match is None:
            break
        steps.append(_step(match))
        position = match.end()
    if not steps or position != len(text):
        raise InputError(
            f"{text[:60]!r} is not a key",
            hint='write for example training.batch_size, stages[0].batch, LORA_CONFIG["r"], '
            "or .batch_size for the one place that is called so",
        )
    return KeyPath(tuple(steps), anywhere)


def _step(match: re.Match[str]) -> Step:
    assert match.lastgroup is not None  # every alternative is a group
    text = match[match.lastgroup]
    return int(text) if match.lastgroup == "index" else text


def show_path(path: Path) -> str:
    """A path as people write it."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif re.fullmatch(r"[\w-]+", step):
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


_PARTS = ("file", "stage", "keys")


@dataclass(frozen=True, slots=True)
class ApplyTarget:
    """One set of names: `keys` gives for each key path the expression of its value.

    `files` are patterns for the names of the files that are meant (none: any file). With `stage`
    the values are those of that stage.
    """

    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    stage: str | None = None

    @property
    def is_of_script(self) -> bool:
        """True if any script may have these keys."""
        return not self.files or "*.py" in self.files


def is_meant(path: pathlib.Path, patterns: Collection[str]) -> bool:
    """True if `path` ends with one of the patterns, name for name; no pattern means any file."""
    return not patterns or any(path.match(pattern) for pattern in patterns)


def read_apply(entry: Entry, problems: Problems, nodes: dict[str, Node]) -> dict[str, ApplyTarget]:
    """The targets by name; each expression is noted in `nodes` under "apply.NAME.KEY"."""
    found: dict[str, ApplyTarget] = {}
    for target in mapping(entry.value, problems, entry.at).values():
        parts = mapping(target.value, problems, target.at, allowed=_PARTS)
        if isinstance(target.value, MappingNode) and "keys" not in parts:
            problems.add(target.value, "keys is missing", at=target.at)
        if "stage" in parts:
            nodes[f"{target.at}.stage"] = parts["stage"].value
        found[target.name] = ApplyTarget(
            name=target.name,
            keys=_keys(parts["keys"], target.at, problems, nodes) if "keys" in parts else {},
            files=_patterns(parts.get("file"), problems),
            stage=text_of(parts.get("stage"), problems),
        )
    return found


def _patterns(entry: Entry | None, problems: Problems) -> tuple[str, ...]:
    """One pattern, or a list of them."""
    if entry is None:
        return ()
    nodes = [entry.value]
    if isinstance(entry.value, SequenceNode):
        nodes = sequence(entry.value, problems, entry.at) or []
    texts = [scalar(node, problems, entry.at) for node in nodes]
    for node, text in zip(nodes, texts, strict=True):
        if text == "":
            problems.add(node, "a pattern is empty", at=entry.at)
    return tuple(text for text in texts if text)


def _keys(entry: Entry, at: str, problems: Problems, nodes: dict[str, Node]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for key in mapping(entry.value, problems, entry.at).values():
        text = scalar(key.value, problems, key.at)
        with problems.noting(key.key, at):
            read_key(key.name)
        if text is not None:
            keys[key.name] = text.strip()
            nodes[place_of(at.removeprefix("apply."), key.name)] = key.value
    return keys


def place_of(target: str, key: str) -> str:
    """The name under which `read_apply` notes where a key stands."""
    return f"apply.{target}.{key}"


def check_apply(
    targets: Mapping[str, ApplyTarget],
    stages: Collection[str],
    check: Callable[[str], object],
    *,
    nodes: Mapping[str, Node],
    problems: Problems,
) -> None:
    """Note stages that there are not, and what `check` refuses as an expression."""
    for target in targets.values():
        if target.stage is not None and target.stage not in stages:
            at = f"apply.{target.name}.stage"
            hint = suggestion(target.stage, stages) if stages else "the space has no stages"
            problems.add(nodes.get(at), f"unknown stage {target.stage[:60]!r}", at=at, hint=hint)
        for key, text in target.keys.items():
            at = place_of(target.name, key)
            with problems.noting(nodes.get(at), at):
                check(text)
