"""Errors of a model's code in a trace."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.checkpoint import CheckpointError

from tuner.core.errors import InputError, TunerError

_MODEL_CODE = ("transformers", "models")
"""The folder of transformers in which each kind of model has its code."""


@contextlib.contextmanager
def model_faults(model_config: Any) -> Iterator[None]:
    """Raise `InputError` for what fails inside of a model's forward or backward pass.

    Some classes of transformers cannot be trained as they are, some ask for values, which tensors
    without data do not have, and some need images. What fails anywhere else is a bug, and stays as
    it is.
    """
    try:
        yield
    except TunerError:
        raise
    except CheckpointError as error:
        raise InputError(
            f"a training step of this {model_config.model_type} model cannot be traced with "
            "gradient checkpointing: its recomputation is not what its forward pass was",
            hint="set gradient_checkpointing to false",
        ) from error
    except Exception as error:
        place = _in_model_code(error.__traceback__) or _in_signature(error)
        if place is None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"a training step of this {model_config.model_type} model cannot be traced: "
            f"{type(error).__name__} in {place}: {reason}",
            hint="`tuner emulate` and `tuner check` run a program of yours that trains it",
        ) from error


def _in_model_code(trace: TracebackType | None) -> str | None:
    """The innermost line of a model's code that was running, as file:line."""
    for frame in reversed(traceback.extract_tb(trace)):
        path = Path(frame.filename)
        if path.parts[-4:-2] == _MODEL_CODE:
            return f"{path.name}:{frame.lineno}"
    return None


def _in_signature(error: Exception) -> str | None:
    """The forward method that was called without an argument that it needs."""
    method, found, _ = str(error).partition("() missing ")
    return (
        method if isinstance(error, TypeError) and found and method.endswith(".forward") else None
    )
