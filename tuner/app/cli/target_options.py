"""The options that select results and what of them may be recommended, declared once.

Commands get them as values: `selected` is what `--space`, `--gpu` and those beside them name, and
`criteria` what `--where`, `--headroom`, `--max-memory` and `--objective` ask of a recommendation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tuner.app.cli.options import (
    choice_options,
    gpu_options,
    model_option,
    results_option,
    space_option,
)
from tuner.app.recommendation import Criteria
from tuner.app.target import Target, load_target
from tuner.app.targets import ALL, named_targets

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A space, one or several GPU types, and the folder of results, as they were named."""

    space_name: str
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
        return load_target(
            self.space_name,
            self.gpu_name,
            model=self.model,
            results=self.results,
            gpu_memory=self.gpu_memory,
            price=self.price,
        )

    def targets(self) -> list[Target]:
        """Each GPU type that is named. Raises `InputError` for what is not known."""
        return list(
            named_targets(
                self.space_name,
                self.gpu_name,
                model=self.model,
                results=self.results,
                gpu_memory=self.gpu_memory,
                price=self.price,
            )
        )


def target_options(model_help: str) -> Callable[[_Decorated], _Decorated]:
    """`--space`, `--gpu`, `--gpu-memory`, `--price`, `--model` and `--results` as `selected`."""

    def decorate(function: _Decorated) -> _Decorated:
        gathered = _gathered(function, "selected", Selected)
        for option in (results_option, model_option(model_help), gpu_options, space_option()):
            gathered = option(gathered)
        return gathered

    return decorate


def criteria_options(function: _Decorated) -> _Decorated:
    """`--where`, `--max-memory`, `--headroom` and `--objective` as `criteria`."""
    return choice_options(_gathered(function, "criteria", Criteria))


def _gathered(function: _Decorated, name: str, kind: type[Any]) -> _Decorated:
    """`function`, which gets the values of the fields of `kind` as one argument."""
    fields = [field.name for field in dataclasses.fields(kind)]

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        values = {field: given.pop(field) for field in fields}
        return function(*args, **{name: kind(**values)}, **given)

    return command  # type: ignore[return-value]
