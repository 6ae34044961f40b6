"""One value in a file: its place, its meaning, and the text for another value there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tuner.core.records import KnobValue
from tuner.core.setup.common import OPTIMIZERS
from tuner.space.apply import Path

Value = KnobValue | None
Kind = Literal["value", "list", "mapping", "computed"]
Language = Literal["yaml", "json", "python"]

_TOKEN = re.compile(r"(?<![\w./])--?[A-Za-z][\w-]*|[\w./][\w./+-]*")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# Words that YAML 1.1 or 1.2 reads as something else than text.
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))
_BOOLEAN_PAIRS = (("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0"))
_ALL_LINEAR = ("all-linear",)

OFFLOADED = ("offload", "offload_disk", "unsloth")
"""Values that Unsloth and Axolotl accept for gradient checkpointing, in place of true."""

_FLASH_KERNELS = {
    "flash_attention_2": ("kernels-community/flash-attn2",),
    "flash_attention_3": ("kernels-community/vllm-flash-attn3",),
}
"""Kernels that transformers 5.23 gets from the hub when the package of a name is not installed
(`modeling_flash_attention_utils.py`)."""


NO_VALUE = "is no plain value of its own (an interpolation, alias, second key or several lines)"
"""The problem of a place whose value can be read and not changed."""


class NotWritableError(Exception):
    """The reason why a value cannot be written at a place."""


@dataclass(frozen=True, slots=True)
class Location:
    """A value at characters `start` to `end` of a text, which are `raw`.

    `value` is None for null, or if `problem` says why nothing can be written here. `quote` is the
    quotation mark for text.
    """

    path: Path
    line: int
    start: int
    end: int
    raw: str
    language: Language
    value: Value = None
    quote: str = ""
    problem: str | None = None
    kind: Kind = "value"
    """Computed values (`${batch}`, `config["batch"]`) follow from another place."""
    cell: int = 0
    """The number of its cell in the notebook, from 1 on; `line` counts from its first line."""
    names: tuple[str, ...] = ()
    """The names beside and around it, the nearest first."""

    def where(self, file: object) -> str:
        """The place for people: "train.py:12", or "cell 4, line 7" of a notebook."""
        return spot(self.cell, self.line) if self.cell else f"{file}:{self.line}"

    def written(self, text: str) -> str:
        """`text` as the characters of the file."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.cell else text

    def render(self, value: KnobValue) -> str:
        """The characters that replace `raw`; `NotWritableError` for a value of another kind."""
        if value == _ALL_LINEAR:  # a word of peft's, no list of one name
            value = _ALL_LINEAR[0]
        if isinstance(value, tuple):
            if self.kind != "list":
                raise self._kept("a list")
            texts = [self._text(item, self.quote) for item in value]
            return f"{self.raw[0]}{', '.join(texts)}{self.raw[-1]}"
        if isinstance(value, bool):
            return self._boolean(value)
        if isinstance(value, int | float):
            return self._number(value)
        if self.value is not None and not isinstance(self.value, str):
            raise self._kept(f"the text {value!r}")
        return self._spaced(self._text(value, self.quote))

    def _kept(self, other: str) -> NotWritableError:
        """The reason why a value of another kind is not written."""
        text = f"says {self.raw or 'nothing'}, kept: {other} can't take its place"
        return NotWritableError(text)

    def _boolean(self, value: bool) -> str:
        if self.value is not None and not isinstance(self.value, bool):
            raise self._kept(str(value))
        old = self.raw.strip("\"'")
        pair = _pair_of(old)
        if pair is None:
            return self._spaced(str(value) if self.language == "python" else str(value).lower())
        word = pair[0] if value else pair[1]
        if old[:1].isupper():
            word = word.upper() if old.isupper() else word.capitalize()
        return self.raw.replace(old, word)

    def _number(self, value: float) -> str:
        # As YAML 1.1, YAML 1.2, JSON and Python all read it: 2, 0.05, 1.0e-05.
        mantissa, e, exponent = repr(value).partition("e")
        text = mantissa + (".0" if e and "." not in mantissa else "") + e + exponent
        if isinstance(self.value, bool) or self.kind == "list":
            raise self._kept(f"the number {text}")
        if isinstance(self.value, float) and not math.isnan(self.value) and text.isdigit():
            text += ".0"
        if isinstance(self.value, str):
            if not _NUMBER.fullmatch(self.value):
                raise self._kept(f"the number {text}")
            return self._text(text, self.quote)  # a number in quotes stays one
        return self._spaced(text)

    def _text(self, text: str, quote: str) -> str:
        if not is_writable(text):
            raise NotWritableError(f"would become {text!r}, which UTF-8 cannot say")
        if quote == "'" and self.language == "yaml":
            return "'" + text.replace("'", "''") + "'"
        if quote == "'" and not {"'", "\\"} & set(text) and text.isprintable():
            return f"'{text}'"
        if not quote and _PLAIN_WORD.fullmatch(text) and text.lower() not in _RESERVED:
            return text
        return json.dumps(text, ensure_ascii=False)  # also a string of YAML and of Python

    def _spaced(self, text: str) -> str:
        """`text` with a blank before it where there was nothing (`key:`)."""
        return text if self.raw else f" {text}"


def spot(cell: int, line: int) -> str:
    """A line of a file, for people: "line 12", or "cell 4, line 7" where there is a cell."""
    return f"cell {cell}, line {line}" if cell else f"line {line}"


def _pair_of(word: str) -> tuple[str, str] | None:
    return next((pair for pair in _BOOLEAN_PAIRS if word.lower() in pair), None)


def truth(written: object) -> bool | None:
    """The truth that a value says: true, the text "yes", 0; None for one that says none."""
    pair = _pair_of(str(written))
    return None if pair is None else str(written).lower() == pair[0]


def is_wanted(written: object, wanted: object) -> bool:
    """True if a written value means the wanted one.

    True is not 1; a number may stand in quotes, and `all-linear` need not be a list.
    """
    if isinstance(written, bool) or isinstance(wanted, bool):
        return written is wanted
    if isinstance(written, str) and isinstance(wanted, int | float):
        return bool(_NUMBER.fullmatch(written)) and float(written) == wanted
    return written is not None and (written == wanted or (written,) == wanted == _ALL_LINEAR)


def is_same(written: object, arrived: object) -> bool:
    """True for a setting that took effect, perhaps under another of its names."""
    if isinstance(written, str) and isinstance(arrived, bool):
        return arrived and written in OFFLOADED
    if isinstance(written, str) and isinstance(arrived, str):
        row = OPTIMIZERS.get(written)
        kernels = _FLASH_KERNELS.get(written, ())
        return written == arrived or arrived in kernels or (
            row is not None and row == OPTIMIZERS.get(arrived)
        )  # fmt: skip
    return is_wanted(written, arrived)


def is_writable(text: str) -> bool:
    """True if UTF-8 can encode it: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MAX_DIGITS = 4000
"""Longer integers are not read: Python's limit is 4,300 (`sys.set_int_max_str_digits`)."""


def read_number(raw: str) -> float | None:
    """The number that `raw` is in every language, nan for one that they read differently."""
    if not _NUMBER.fullmatch(raw):
        return None
    if _LEADING_ZERO.match(raw) or len(raw) > MAX_DIGITS:
        return math.nan  # 010 is eight in YAML 1.1 and ten in 1.2
    return int(raw) if raw.lstrip("+-").isdigit() else float(raw)


def in_words(text: str, start: int = 0, end: int | None = None) -> Iterator[Location]:
    """The words of a shell script, TOML, a command or a string, each named by the one before."""
    names: tuple[str, ...] = ()
    line = text.count("\n", 0, start) + 1
    at = start
    for found in _TOKEN.finditer(text, start, len(text) if end is None else end):
        line, at = line + text.count("\n", at, found.start()), found.start()
        raw, number, said = found[0], read_number(found[0]), truth(found[0])
        value = number if number is not None else raw if said is None else said
        yield Location(names[:1], line, at, found.end(), raw, "yaml", value, names=names)
        names = tuple(reversed(raw.lstrip("-").split(".")))
