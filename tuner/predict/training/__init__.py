"""Workloads: what is trained, and how a configuration becomes a training session."""

from __future__ import annotations

import importlib
from typing import Any

from tuner.core.errors import InputError, missing_extra, unknown
from tuner.core.records import Configuration
from tuner.core.setup.schemas import SCHEMAS
from tuner.predict.training.base import FunctionWorkload, Workload

CLASSES = {
    "causal_lm": "tuner.predict.training.causal_lm:CausalLM",
    "contrastive": "tuner.predict.training.contrastive:Contrastive",
    "multitask": "tuner.predict.training.multitask:MultiTask",
}
"""The class of each workload. It loads torch, so it is imported when the workload is asked for."""


def get_workload(name: str) -> Workload:
    """The workload with this name. Imports torch. Raises `InputError` for other names.

    "package.module:object" names one of the user's own: a `Workload`, a class of which one can be
    made without arguments, or a function that opens a session as `Workload.open` does.
    """
    if name not in CLASSES and ":" not in name:
        raise unknown("workload", name, CLASSES)
    return _workload_of(CLASSES.get(name, name))


def _workload_of(name: str) -> Workload:
    """The workload that `name` names. Raises `InputError` if it opens no session."""
    found = load_object(name, "workload")
    if isinstance(found, type):
        found = found()
    if callable(getattr(found, "open", None)):
        workload: Workload = found
        return workload
    if not callable(found):
        raise InputError(
            f"workload {name!r} is of type {type(found).__name__}, which opens no session",
            hint="write a function or a class with open(model_config, configuration, environment)",
        )
    return FunctionWorkload(name, found)


def tokens_per_sample(workload: str, configuration: Configuration) -> int:
    """Tokens of one sample at full length. Raises `InputError` for an unknown workload."""
    if workload not in SCHEMAS:
        raise unknown("workload", workload, CLASSES)
    return SCHEMAS[workload].tokens(configuration)


def load_object(name: str, kind: str) -> Any:
    """The object that "package.module:object" names; `kind` is what it is to be, for people.

    Raises `InputError` where there is none, `UnavailableError` where the extra `[all]` is missing.
    """
    module_name, _, object_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (ModuleNotFoundError, AttributeError) as error:
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            raise missing from error
        raise InputError(f"{kind} {name!r} cannot be found: {error}") from error
