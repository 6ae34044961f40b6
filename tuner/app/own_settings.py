"""Finds settings in the user's own configuration files that cost speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner.app.machine_facts import Finding, Severity
from tuner.program.edit.place import Location
from tuner.program.edit.source import open_source

_WORKERS = ("dataloader_num_workers", "num_workers")
_PINNED = ("dataloader_pin_memory", "pin_memory")


def own_settings(path: Path, cpus: int) -> Iterator[Finding]:
    """The slow settings of a file, on a machine with `cpus` processors.

    Raises `InputError` for a file that cannot be read.
    """
    source = open_source(path)
    # A literal that has two names is there twice.
    for place in {(p.start, p.end, p.line): p for p in source.places}.values():
        found = _judge(place, cpus)
        if found is not None:
            text, fix = found
            yield Finding("your settings", Severity.WARNING, f"{source.at(place)}: {text}", fix)


def _judge(place: Location, cpus: int) -> tuple[str, str] | None:
    """The cost of a slow value and a better one; None for any other value."""
    key = str(place.path[-1]) if place.path else ""
    value = place.value
    if key in _WORKERS and value in (0, 1) and not isinstance(value, bool) and cpus > 1:
        who = "the training process loads the data" if value == 0 else "one process loads the data"
        return f"{value}: {who}, on a machine with {cpus} processors", f"{min(4, cpus)} or more"
    if key in _PINNED and value is False:
        return "batches are copied to the GPU from memory that is not page-locked", "true"
    if key == "tf32" and value is False:
        return "fp32 products without tensor cores, on GPUs that have them for tf32", "true"
    if key == "attn_implementation" and value == "eager":
        return "attention keeps whole score matrices and runs kernel by kernel", "sdpa"
    return None
