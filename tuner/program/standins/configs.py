"""Configuration classes of libraries, with the fields and defaults of the request's tables."""

from __future__ import annotations

import functools
import json
import os
import sys
from opcode import opmap
from typing import Any

from tuner.program.standins.unknown import (
    CLASSES,
    Meta,
    Name,
    Note,
    Unknown,
    guarded,
    is_library,
    put,
    where,
)

_MADE: dict[str, Any] = {}
_FIXED = ("bf16", "fp16", "gradient_checkpointing", "activation_checkpointing")
"""Arguments that only their construction reads; the last two in transformers 5.23 and later."""
_LOADS = {opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in opmap}
RENAMED: dict[str, str] = {}
"""Names that arguments had in older releases, and their names today."""

_ALIASES = [
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
]


def revived(value: Any) -> Any:
    """A default of a table; a new one for each object."""
    if isinstance(value, (list, dict)):
        if isinstance(value, dict) and "$name" in value:
            return Name(value["$name"])
        if isinstance(value, dict) and ("$unknown" in value or "$object" in value):
            return Unknown("default")
        return json.loads(json.dumps(value))
    return value


class ConfigMeta(Meta):
    @property
    def __dataclass_fields__(cls) -> dict[str, Any]:
        for base in cls.__mro__:
            if "_own_fields" not in vars(base) and vars(base).get("_fields"):
                type.__setattr__(base, "_own_fields", _dataclass_fields(base))
            if "_own_fields" in vars(base):
                own: dict[str, Any] = base._own_fields  # type: ignore[attr-defined]
                return own
        raise AttributeError("__dataclass_fields__")

    @__dataclass_fields__.setter
    def __dataclass_fields__(cls, fields: dict[str, Any]) -> None:
        type.__setattr__(cls, "_own_fields", fields)

    def __getattr__(cls, name: str) -> Any:
        if name == "_own_fields":
            raise AttributeError(name)
        if name == "__dataclass_params__":
            return type("Params", (), {"frozen": False, "kw_only": False})
        if name == "__match_args__":
            return ()
        return Meta.__getattr__(cls, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made._note.extra["made"] = True
        if "output_dir" in made._fields:
            names = _FIXED if "activation_checkpointing" in made._fields else _FIXED[:2]
            held = vars(made)
            made._note.extra["fixed"] = {name: held[name] for name in names if name in held}
        return made


def _dataclass_fields(cls: Any) -> dict[str, Any]:
    import dataclasses  # with `inspect`, which only some programs need

    fields = {}
    for name, told in cls._fields.items():
        default = revived(told["default"]) if "default" in told else dataclasses.MISSING
        made: Any = (
            dataclasses.field(default_factory=functools.partial(revived, told["default"]))
            if isinstance(default, (list, dict, Unknown))
            else dataclasses.field(default=default)
        )
        made.name, made.type = name, told.get("type", "Any")
        made._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        made.kw_only = False
        fields[name] = made
    return fields


class Config(metaclass=ConfigMeta):
    __slots__ = ("__dict__", "__weakref__", "_note")
    _fields: dict[str, Any] = {}
    _path = "Thing"
    _open = False
    _known = True
    _contrary: dict[str, str] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        given = {**dict(zip(cls._fields, args)), **kwargs}
        put(self, "_note", Note(cls._path, where(), (), given))
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(self._fields, args)), **kwargs}
        everything = given.pop("**", None)
        for name, told in self._fields.items():
            value = given.get(name, self)
            if value is self:
                value = (
                    everything[name]
                    if everything is not None
                    else revived(told["default"])
                    if "default" in told and self._known
                    else Unknown(f"{self._path}.{name}")
                )
            elif isinstance(value, str) and value[:1] == "{" and "dict" in told.get("type", ""):
                value = json.loads(value)
            put(self, name, value)
        for name in given.keys() - self._fields.keys():
            put(self, name, given[name])
        caller = sys._getframe(1).f_code
        if caller.co_name in ("replace", "_replace") and "dataclasses" in caller.co_filename:
            given = {
                name: value
                for name, value in given.items()
                if value != self._fields.get(name, {}).get("default")
            }
        if everything is not None:
            given["**"] = everything
        self._note.given, self._note.bound = given, True
        self.__post_init__()

    def __post_init__(self) -> None:
        for name, other in self._contrary.items():
            if self.__dict__.get(name, self) is None:
                put(self, name, not self.__dict__.get(other))
        held = self.__dict__
        for old, new in _ALIASES:  # transformers 5.23
            if new in self._fields and old in self._fields:
                held[new] = held[old] = held[old] if held[new] is None else held[new]
                if new == "activation_checkpointing" and held[new] is None:
                    held[new] = held[old] = False

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name[0] == "_":
            return
        if "made" in self._note.extra or not is_library(sys._getframe(1).f_code.co_filename):
            self._note.assign(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("__dataclass_fields__", "__dataclass_params__"):
            return getattr(type(self), name)
        if name[:2] == "__" or name == "_note":
            raise AttributeError(name)
        if name in _ANSWERS and "output_dir" in self._fields:
            return _ANSWERS[name](self)
        frame: Any = sys._getframe(1)
        reads = frame.f_code.co_code[frame.f_lasti] in _LOADS and not is_library(
            frame.f_code.co_filename
        )
        if self._open or (reads and not guarded(frame)):  # of another release
            return Unknown(f"{self._path}.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == vars(other)

    __hash__ = object.__hash__

    def __copy__(self) -> Any:
        return self._copied(dict(self.__dict__))

    def __deepcopy__(self, memo: Any) -> Any:
        from copy import deepcopy

        return self._copied(deepcopy(self.__dict__, memo))

    def _copied(self, values: dict[str, Any]) -> Any:
        made = object.__new__(type(self))
        made.__dict__.update(values)
        note = Note(self._note.path, self._note.where, (), self._note.given)
        note.assigned, note.bound = dict(self._note.assigned), True
        note.extra["made"] = True
        put(made, "_note", note)
        return made

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name[0] != "_"}

    to_sanitized_dict = to_diff_dict = to_dict

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), default=str)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_dict(cls, values: dict[str, Any], **more: Any) -> Any:
        return cls(**{**values, **more})

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls(**{"**": Unknown(f"{cls._path}.from_pretrained(...)")})


def as_now(value: Any) -> Any:
    """A configuration as it is now: what is set later does not reach who has read it."""
    return value.__copy__() if isinstance(value, Config) else value


def _gpus(_: Any) -> int:
    import torch

    return int(torch.cuda.device_count())


def _world(_: Any) -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Setter:
    """`set_training(...)` and its like: arguments of one call become fields of others."""

    names = {
        "batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs",
        "name": "optim",
    }

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            setattr(self.config, self.names.get(name, name), value)
        return self.config


class _Context:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_ANSWERS: dict[str, Any] = {
    "device": lambda self: Name("torch.device", type="cuda", index=0),
    "n_gpu": _gpus,
    "_n_gpu": _gpus,
    "world_size": _world,
    "process_index": lambda self: int(os.environ.get("RANK", "0")),
    "local_process_index": lambda self: int(os.environ.get("LOCAL_RANK", "0")),
    "local_rank": lambda self: int(os.environ.get("LOCAL_RANK", "0")),
    "train_batch_size": lambda self: self.per_device_train_batch_size,
    "eval_batch_size": lambda self: self.per_device_eval_batch_size,
    "should_log": lambda self: True,
    "should_save": lambda self: True,
    "parallel_mode": lambda self: Unknown("parallel_mode"),
    "distributed_state": lambda self: Unknown("distributed_state"),
    "deepspeed_plugin": lambda self: None,
    "main_process_first": lambda self: lambda *args, **kwargs: _Context(),
    "get_process_log_level": lambda self: lambda: 20,
    "get_warmup_steps": lambda self: lambda steps: Unknown("warmup steps"),
    **dict.fromkeys(
        "set_training set_evaluate set_optimizer set_dataloader set_lr_scheduler set_save".split(),
        _Setter,
    ),
}


def is_config(path: str) -> bool:
    """Whether a table tells a class whose values are settings."""
    table = CLASSES.get(path) or {}
    return bool(table.get("fields")) and ("parameters" not in table or path.endswith("Config"))


def config(path: str, bases: tuple[str, ...] = ()) -> Any:
    """The class of a table, below those of its bases; without a table its values are unknown."""
    if path not in _MADE:
        table = CLASSES.get(path) or {}
        module, _, name = path.rpartition(".")
        above = [config(base) for base in table.get("bases") or bases if is_config(base)]
        fields = table.get("fields") or (above[0]._fields if above else {})
        body = {
            "__module__": module,
            "_path": path,
            "_fields": fields,
            "__slots__": (),
            "_known": bool(fields) and (bool(table) or name.endswith("Arguments")),
            "_contrary": table.get("contrary", {}),
            "_open": not table or bool(table.get("open")),
        }
        _MADE[path] = ConfigMeta(name, tuple(above[:1]) or (Config,), body)
    return _MADE[path]
