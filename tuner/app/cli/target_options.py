"""The options that select results and what of them may be recommended, declared once.

Commands get them as values: `selected` is what `--space`, `--gpu` and those beside them name, and
`criteria` what `--where`, `--headroom`, `--max-memory` and `--objective` ask of a recommendation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tuner.app.cli.options import (
    choice_options,
    gathered,
    gpu_options,
    model_option,
    results_option,
    space_option,
    together,
)
from tuner.app.recommendation import Criteria
from tuner.app.target import Target, load_target
from tuner.app.targets import ALL, named_targets

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A space, one or several GPU types, and the folder of results, as they were named."""

    space: str
    gpu_name: str
    gpu_memory: int | None
    price: float | None
    model: str | None
    results: Path

    @property
    def is_several(self) -> bool:
        """True for "all" or a list of GPU types."""
        return self.gpu_name == ALL or "," in self.gpu_name

    def target(self) -> Target:
        """The one that is named. Raises `InputError` for what is not known."""
        return load_target(**dataclasses.asdict(self))

    def targets(self) -> list[Target]:
        """Each GPU type that is named. Raises `InputError` for what is not known."""
        return named_targets(**dataclasses.asdict(self))


def target_options(
    model_help: str = "Model the search was run with, if you overrode it.",
) -> Callable[[_Decorated], _Decorated]:
    """`--space`, `--gpu`, `--gpu-memory`, `--price`, `--model` and `--results` as `selected`."""
    options = together(space_option(), gpu_options, model_option(model_help), results_option)
    return lambda function: options(gathered(function, "selected", Selected))


def criteria_options(function: _Decorated) -> _Decorated:
    """`--where`, `--max-memory`, `--headroom` and `--objective` as `criteria`."""
    return choice_options(gathered(function, "criteria", Criteria))
