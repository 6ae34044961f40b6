"""Names of searchers and the defaults of a search, for options: quick to import."""

from __future__ import annotations

from tuner.core.errors import unknown

SEARCHERS = ("guided", "tpe", "random", "grid")
"""Names of the searchers; "package.module:Class" loads an Optuna sampler or a `Strategy`."""
DEFAULT_SEARCHER = "guided"
"""The default searcher; it starts from the request's predictions, if any."""
DEFAULT_TRIALS = 40


def check_searcher(name: str) -> None:
    """Raise `InputError` unless there may be a searcher of this name."""
    if name not in SEARCHERS and ":" not in name:
        raise unknown("searcher", name, (*SEARCHERS, "package.module:Class"))
