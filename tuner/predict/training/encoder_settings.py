"""The knobs that workloads around an encoder share, checked and typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.predict.training.token_data import LoaderSettings
from tuner.space.models.positions import length_problem, table_positions

_AUTOCAST = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What a session around an encoder needs, whatever its model computes."""

    micro_batch: int
    max_length: int
    padded: bool
    mixed_precision: str
    attention: str
    optimizer: str
    max_grad_norm: float
    loader: LoaderSettings

    @classmethod
    def from_configuration(cls, values: Configuration) -> EncoderSettings:
        """Read the knobs. Raises KeyError when one of the required ones is missing."""
        return cls(
            micro_batch=whole(values["micro_batch"]),
            max_length=whole(values["max_length"]),
            padded=values.get("padding", "max_length") == "max_length",
            mixed_precision=str(values.get("mixed_precision", "no")),
            attention=str(values["attention"]),
            optimizer=str(values["optimizer"]),
            max_grad_norm=number(values.get("max_grad_norm", 1.0)),
            loader=_loader(values),
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None without mixed precision."""
        return _AUTOCAST[self.mixed_precision]


def _loader(values: Configuration) -> LoaderSettings:
    names = [field.name for field in fields(LoaderSettings)]
    given: dict[str, Any] = {name: values[name] for name in names if name in values}
    return LoaderSettings(**given)


def whole(value: Any) -> int:
    """`value` as a whole number. Raises `InputError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{value!r} is not a whole number")
    return value


def number(value: Any) -> float:
    """`value` as a number. Raises `InputError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{value!r} is not a number")
    return value


def names(value: Any) -> tuple[str, ...]:
    """A list of names; ("none",) is the empty one, which a space file cannot write."""
    found: Sequence[str] = (value,) if isinstance(value, str) else tuple(value)
    return () if tuple(found) == ("none",) else tuple(found)


def require_positions(model_config: Any, length: int, knob: str) -> None:
    """Raise `InputError` where the model has no positions for so many tokens."""
    problem = length_problem(table_positions(model_config.to_dict()), length, knob)
    if problem is not None:
        raise InputError(problem[0], hint=problem[1])
