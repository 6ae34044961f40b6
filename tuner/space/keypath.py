"""Where a value stands in a configuration: `trainer.batch_size`, `.lora_r`, `LORA["r"]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.core.errors import InputError

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
        """Whether the value at `path` is meant."""
        if self.anywhere:
            return path[-len(self.steps) :] == self.steps
        return path == self.steps

    def leads_through(self, path: Path) -> bool:
        """Whether the value meant would stand below `path`."""
        return not self.anywhere and len(path) < len(self.steps) and self.steps[: len(path)] == path

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
