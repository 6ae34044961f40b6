"""Calls of a script that turn gradient checkpointing on, whatever its trainer's arguments say."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.names import Literal, Script
from tuner.program.parsed import last_name

_PREPARES = "prepare_model_for_kbit_training"
_ENABLES = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
_FIRST_NOT_REENTRANT = 5
"""From this version of transformers on, checkpointing that is enabled without keyword arguments is
not reentrant (`PreTrainedModel.activation_checkpointing_enable`)."""


@dataclass(frozen=True, slots=True)
class CheckpointCall:
    """A call that turns checkpointing on: its function, "train.py:12", and its line.

    `reentrant` is how it then checkpoints; None where the call does not tell.
    """

    name: str
    where: str
    line: str
    reentrant: bool | None

    @property
    def prepares(self) -> bool:
        """Whether it is k-bit preparation, which checkpoints quantised models only."""
        return self.name == _PREPARES

    @property
    def remedy(self) -> str:
        """What to write so that the call leaves checkpointing off."""
        if self.prepares:
            return f"{self.name}(model, use_gradient_checkpointing=False)"
        return f"no call of {self.name}"


def checkpoint_calls(sources: Iterable[SourceFile]) -> list[CheckpointCall]:
    """The calls in Python files and notebooks that certainly turn checkpointing on."""
    return [
        call
        for source in sources
        if source.path.suffix in PYTHON
        for call in _calls(Script(source))
    ]


def _calls(script: Script) -> Iterator[CheckpointCall]:
    text = script.source.data.decode("utf-8").splitlines()
    for call in script.calls:
        name = last_name(call.func) or ""
        if name != _PREPARES and name not in _ENABLES:
            continue
        if name == _PREPARES and not _is_on(script, call):
            continue
        if script.is_conditional(call):
            continue
        line = script.place_of(call).line
        where = f"{script.source.path}:{line}"
        yield CheckpointCall(name, where, text[line - 1].strip(), _reentrant(script, call, name))


def _is_on(script: Script, call: ast.Call) -> bool:
    """Whether k-bit preparation is certain to enable it, which is its default."""
    given = [k.value for k in call.keywords if k.arg in ("use_gradient_checkpointing", None)]
    given += call.args[1:2]
    return not given or _value(script, given[0]) is True


def _reentrant(script: Script, call: ast.Call, name: str) -> bool | None:
    positional = call.args[2:3] if name == _PREPARES else call.args[:1]
    names = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    given = [k.value for k in call.keywords if k.arg in names] + positional
    if given:
        return _written(script, given[0])
    if any(k.arg is None for k in call.keywords):
        return None
    if name == _PREPARES:
        return True  # peft passes {}, which leaves it to PyTorch
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(version.partition(".")[0]) < _FIRST_NOT_REENTRANT


def _written(script: Script, given: ast.expr) -> bool | None:
    """What keyword arguments of checkpoints say; PyTorch's own default is reentrant."""
    if not isinstance(given, ast.Dict):
        return None
    for key, value in zip(given.keys, given.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "use_reentrant":
            found = _value(script, value)
            return found if isinstance(found, bool) else None
    return True


def _value(script: Script, node: ast.expr) -> object:
    ends = script.ends(node)
    if len(ends) != 1 or not isinstance(ends[0], Literal):
        return None
    return getattr(ends[0].node, "value", None)
