"""A workload of the user's own that is written as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.core.records import Configuration
from tuner.predict.training.base import Environment, TrainingSession

OpenSession = Callable[[Any, Configuration, Environment], TrainingSession]


@dataclass(slots=True)
class FunctionWorkload:
    """Opens sessions by calling a function; see `tuner.predict.training.base.Workload`."""

    name: str
    function: OpenSession

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> TrainingSession:
        """The session that the function opens."""
        return self.function(model_config, configuration, environment)
