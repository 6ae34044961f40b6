"""Finds the fastest fine-tuning configuration that fits a GPU.

::

    import tuner

    result = tuner.search("qlora27b", gpu="a6000")
    print(result.best().configuration)

Importing this loads nothing else; names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.app.api.programs import Check, check, emulate, tune
    from tuner.app.api.result import Recommendation, SearchResult, SearchResults
    from tuner.app.api.searching import estimate, load, load_results, search
    from tuner.app.estimate import Estimate
    from tuner.core.errors import InputError, NothingFitsError, TunerError, UnavailableError
    from tuner.space import SearchSpace, load_space

__version__ = "0.1.0"

_HOMES = {
    name: home
    for home, names in {
        "tuner.app.api.programs": "Check check emulate tune",
        "tuner.app.estimate": "Estimate",
        "tuner.core.errors": "InputError NothingFitsError TunerError UnavailableError",
        "tuner.app.api.result": "Recommendation SearchResult SearchResults",
        "tuner.space": "SearchSpace load_space",
        "tuner.app.api.searching": "estimate load load_results search",
    }.items()
    for name in names.split()
}

__all__ = [
    "Check", "Estimate", "InputError", "NothingFitsError", "Recommendation", "SearchResult",
    "SearchResults", "SearchSpace", "TunerError", "UnavailableError", "__version__", "check",
    "emulate", "estimate", "load", "load_results", "load_space", "search", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
