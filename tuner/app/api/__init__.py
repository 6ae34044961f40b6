"""The Python API; here its arguments, as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.core.errors import InputError
from tuner.core.units import parse_bytes
from tuner.searches.options import Mode


def as_bytes(value: int | str | None, name: str) -> int | None:
    """Bytes of "40GiB" or of a number of bytes. Raises `InputError` for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        return parse_bytes(value, what=name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InputError(
            f"{name} {value!r} is not a size", hint="give bytes as an int, or text such as '40GiB'"
        )
    return value


def as_share(value: float | str | None, name: str) -> str | None:
    """A share of the memory as the command line has it: "3%" of 0.03, and text as it is."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not 0 <= value < 1:
        raise InputError(
            f"{name} {value!r} is not a share of the memory",
            hint="give a fraction such as 0.03, or text such as '3%' or '2GiB'",
        )
    return f"{value * 100:.10f}%"


def as_texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """One text or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def as_mode(value: str) -> Mode:
    """The mode of trials. Raises `InputError` for an unknown word."""
    if value not in tuple(Mode):
        raise InputError(f"unknown mode {value!r}", hint=f"allowed: {', '.join(Mode)}")
    return Mode(value)
