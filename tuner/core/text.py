"""Text from elsewhere, made safe to show: names of files, models and GPUs, messages of programs."""

from __future__ import annotations

import re

# C0 and C1 controls but for line break and tab, line and paragraph separators, marks that turn the
# direction of writing, the byte order mark, and halves of characters that no encoding can hold.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""`text` with every character spelled out that acts on a screen instead of being shown.

    A terminal obeys what stands after an escape character, and a mark of direction turns the text
    around it: they become "\x1b" and "\u202e". Line breaks and tabs stay.
    """
    if text.isprintable():  # nearly all of it, in a report of many trials
        return text
    return _UNSAFE.sub(lambda found: _spelled(found.group()), text.replace("\r\n", "\n"))


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
