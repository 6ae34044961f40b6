"""Where in a model an allocation is made: the module whose forward is running."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

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
