"""Changes of this process for a while: its environment, its loggers, its search for cycles."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """These variables have these values inside, and are as before afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def log_level(level: int, names: Sequence[str]) -> Iterator[None]:
    """The loggers of these names let through what is of `level` or above inside."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level_before in zip(loggers, before, strict=True):
            logger.setLevel(level_before)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python looks for no cycles inside: where many objects are made that stay, it takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
