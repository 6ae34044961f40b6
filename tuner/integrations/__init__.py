"""Callbacks for existing training code, and a plugin of pytest.

In a trial they report each step. Outside of one they compare the training with its prediction,
and say once what is off and why. Names are loaded at their first use: pytest
imports this package in every environment that has tuner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.integrations.reporting import Reporter, in_trial, report_step

__all__ = ["Reporter", "in_trial", "report_step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("tuner.integrations.reporting"), name)


def __dir__() -> list[str]:
    return __all__
