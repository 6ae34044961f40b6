"""The model in a trace: which module's forward is running, and whose code fails."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.checkpoint import CheckpointError

from tuner.core.errors import InputError, TunerError
from tuner.predict.tracing.recorder import Recorder


@contextlib.contextmanager
def named_modules(recorder: Recorder, model: torch.nn.Module) -> Iterator[None]:
    """Inside, `recorder.place` is the name in `model` of the module whose forward is running.

    Blocks of parameters have the parameter's name. In a backward pass only recomputed forwards
    have a place.
    """
    for parameter_name, parameter in model.named_parameters():
        recorder.name(parameter, parameter_name)
    names = {id(module): name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(names.get(id(module)) or type(module).__name__)
        recorder.place = stack[-1]

    def leave(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
        stack.pop()
        recorder.place = stack[-1] if stack else ""

    entering = register_module_forward_pre_hook(enter)
    # A recomputation ends by an exception once it has all that it needs.
    leaving = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        entering.remove()
        leaving.remove()
        recorder.place = ""


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
