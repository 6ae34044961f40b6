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
    "Check": "tuner.app.api.programs",
    "Estimate": "tuner.app.estimate",
    "InputError": "tuner.core.errors",
    "NothingFitsError": "tuner.core.errors",
    "Recommendation": "tuner.app.api.result",
    "SearchResult": "tuner.app.api.result",
    "SearchResults": "tuner.app.api.result",
    "SearchSpace": "tuner.space",
    "TunerError": "tuner.core.errors",
    "UnavailableError": "tuner.core.errors",
    "check": "tuner.app.api.programs",
    "emulate": "tuner.app.api.programs",
    "estimate": "tuner.app.api.searching",
    "load": "tuner.app.api.searching",
    "load_results": "tuner.app.api.searching",
    "load_space": "tuner.space",
    "search": "tuner.app.api.searching",
    "tune": "tuner.app.api.programs",
}

__all__ = [
    "Check",
    "Estimate",
    "InputError",
    "NothingFitsError",
    "Recommendation",
    "SearchResult",
    "SearchResults",
    "SearchSpace",
    "TunerError",
    "UnavailableError",
    "__version__",
    "check",
    "emulate",
    "estimate",
    "load",
    "load_results",
    "load_space",
    "search",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
