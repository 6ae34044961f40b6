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
    from tuner.api.recommended import Recommendation
    from tuner.api.result import SearchResult, SearchResults
    from tuner.api.searching import estimate, load_results, search
    from tuner.engine.estimate import Estimate
    from tuner.errors import InputError, NothingFitsError, TunerError, UnavailableError
    from tuner.space import SearchSpace, load_space

__version__ = "0.1.0"

_HOMES = {
    "Estimate": "tuner.engine.estimate",
    "InputError": "tuner.errors",
    "NothingFitsError": "tuner.errors",
    "Recommendation": "tuner.api.recommended",
    "SearchResult": "tuner.api.result",
    "SearchResults": "tuner.api.result",
    "SearchSpace": "tuner.space",
    "TunerError": "tuner.errors",
    "UnavailableError": "tuner.errors",
    "estimate": "tuner.api.searching",
    "load_results": "tuner.api.searching",
    "load_space": "tuner.space",
    "search": "tuner.api.searching",
}

__all__ = [
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
    "estimate",
    "load_results",
    "load_space",
    "search",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
