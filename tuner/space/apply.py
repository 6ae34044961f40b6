"""The part `apply` of a space: where the user's files keep the values of its knobs."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from yaml.nodes import MappingNode, SequenceNode

from tuner.core.errors import InputError
from tuner.space.document import Entry, Place, Problems, suggestion, text_of

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


def read_apply(entry: Entry) -> dict[str, ApplyTarget]:
    """The targets by name; each expression is kept under "apply.NAME.KEY"."""
    found: dict[str, ApplyTarget] = {}
    for target in entry.mapping().values():
        parts = target.mapping(allowed=_PARTS)
        if isinstance(target.node, MappingNode) and "keys" not in parts:
            target.add("keys is missing")
        if "stage" in parts:
            parts["stage"].keep(f"{target.at}.stage")
        found[target.name] = ApplyTarget(
            name=target.name,
            keys=_keys(parts["keys"], target.at) if "keys" in parts else {},
            files=_patterns(parts.get("file")),
            stage=text_of(parts.get("stage")),
        )
    return found


def _patterns(entry: Entry | None) -> tuple[str, ...]:
    """One pattern, or a list of them."""
    if entry is None:
        return ()
    places: list[Place] = [entry]
    if isinstance(entry.node, SequenceNode):
        places = entry.sequence() or []
    texts = [place.scalar() for place in places]
    for place, text in zip(places, texts, strict=True):
        if text == "":
            place.add("a pattern is empty")
    return tuple(text for text in texts if text)


def _keys(entry: Entry, at: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for item in entry.mapping().values():
        text = item.scalar()
        with replace(item.key, at=at).noting():
            read_key(item.name)
        if text is not None:
            keys[item.name] = text.strip()
            item.keep(place_of(at.removeprefix("apply."), item.name))
    return keys


def place_of(target: str, key: str) -> str:
    """The name under which `read_apply` keeps where a key stands."""
    return f"apply.{target}.{key}"


def check_apply(
    targets: Mapping[str, ApplyTarget],
    stages: Collection[str],
    check: Callable[[str], object],
    problems: Problems,
) -> None:
    """Note stages that there are not, and what `check` refuses as an expression."""
    for target in targets.values():
        if target.stage is not None and target.stage not in stages:
            hint = suggestion(target.stage, stages) if stages else "the space has no stages"
            place = problems.place(f"apply.{target.name}.stage")
            place.add(f"unknown stage {target.stage[:60]!r}", hint=hint)
        for key, text in target.keys.items():
            with problems.place(place_of(target.name, key)).noting():
                check(text)
