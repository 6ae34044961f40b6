"""Units, and text from elsewhere made safe to show."""

from __future__ import annotations

import re
from collections.abc import Callable

from tuner.core.errors import InputError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SIZE = re.compile(r"^\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_FACTORS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
}  # fmt: skip


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Bytes for a size with its unit ("80GiB", "24 GB", "512MiB").

    A bare number is refused: GB and GiB differ by 7 %, and guessing which was meant is how
    memory budgets go wrong. Raises `InputError` for anything else.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2) is None:
        raise InputError(
            f"{what} {text!r} is not a size with a unit",
            hint="write for example 80GiB (2^30 bytes) or 80GB (10^9 bytes)",
        )
    return round(float(match.group(1)) * _FACTORS[match.group(2).lower()])


def format_gib(size_bytes: float) -> str:
    """`size_bytes` as GiB with two decimals, for people ("47.40 GiB")."""
    return f"{size_bytes / GIB:.2f} GiB"


def format_size(size_bytes: float) -> str:
    """A size in GiB, or in MiB where two decimals of a GiB would hide what differs."""
    if abs(size_bytes) >= GIB or not size_bytes:
        return format_gib(size_bytes)
    return f"{size_bytes / MIB:.1f} MiB"


def format_range(low: float, high: float, shown: Callable[[float], str]) -> str:
    """Two numbers as `shown` writes them ("40.65 to 54.20 GiB", "812.3 MiB to 1.06 GiB").

    A unit that both share stands once, at the end.
    """
    first, last = shown(low), shown(high)
    number, _, unit = first.partition(" ")
    has_one_unit = unit == last.partition(" ")[2] and not re.search(r"\d", unit)
    return f"{number if has_one_unit else first} to {last}"


def significant(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and no exponent."""
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    decimals = digits - 1 - int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, decimals)}f}"


def format_duration(seconds: float) -> str:
    """A duration spelled out, never as a bare clock ("2 h 05 min", "43.1 s").

    mm:ss was read as hours by users of one of the first systems; units cannot be misread.
    """
    if seconds < 60:
        if seconds >= 1:
            return f"{seconds:.1f} s"
        thousandths = seconds * 1000
        digits = ".0f" if thousandths >= 10 or not seconds else ".2g"
        return f"{thousandths:{digits}} ms"
    minutes = round(seconds / 60)
    if minutes < 60:
        whole_minutes, rest_s = divmod(round(seconds), 60)
        return f"{whole_minutes} min {rest_s:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


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

    def spelled(found: re.Match[str]) -> str:
        code = ord(found.group())
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _UNSAFE.sub(spelled, text.replace("\r\n", "\n"))


_CRASH = "Fatal Python error"  # faulthandler
_STACK_LINES = 5


def last_lines(log: str, chars: int) -> str:
    """The end of a log on one line; the top of the stack if Python itself crashed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:
        return " | ".join(lines[crashes[-1] : crashes[-1] + _STACK_LINES])
    return " | ".join(_end_of(lines, chars))


def _end_of(lines: list[str], chars: int) -> list[str]:
    """The whole lines that fit, or the end of the last one."""
    start, kept = len(lines), 0
    while start > 0 and kept + len(lines[start - 1]) <= chars:
        start -= 1
        kept += len(lines[start])
    if start == len(lines):
        return [line[-chars:] for line in lines[-1:]]
    return lines[start:]
