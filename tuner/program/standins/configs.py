"""Configuration classes of libraries, with the fields and defaults of the request's tables."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from copy import deepcopy
from opcode import opname
from types import SimpleNamespace
from typing import Any

from tuner.program.standins import record, unknown
from tuner.program.standins.unknown import CLASSES, Meta, Name, Note, Unknown, is_library, put

RENAMED: dict[str, str] = {}
"""Names that arguments had in older releases, and their names today."""
_BEHIND = {"transformers.BitsAndBytesConfig": ("load_in_4bit", "load_in_8bit")}
"""Fields that are properties: `vars()` of an object has them with `_` before their names."""


def _property(name: str) -> property:
    held = f"_{name}"
    return property(lambda self: vars(self)[held], lambda self, value: put(self, held, value))


def revived(value: Any) -> Any:
    """A default of a table; a new one for each object."""
    if isinstance(value, dict) and "$name" in value:
        return Name(value["$name"])
    if isinstance(value, dict) and ("$unknown" in value or "$object" in value):
        return Unknown("default")
    return deepcopy(value)


class _Fields:
    """`__dataclass_fields__`, made when it is asked for."""

    def __get__(self, config: Any, cls: Any) -> dict[str, Any]:
        import dataclasses  # with `inspect`, which only some programs need

        fields: dict[str, Any] = {}
        for name, told in cls._fields.items():
            made = fields[name] = dataclasses.field()
            default = told.get("default", dataclasses.MISSING)
            if isinstance(default, (list, dict)):
                made.default_factory = functools.partial(revived, default)
            else:
                made.default = default
            made.name, made.type, made.kw_only = name, told.get("type", "Any"), False
            made._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        return fields


class ConfigMeta(Meta):
    def __getattr__(cls, name: str) -> Any:
        """A default, as dataclasses have it."""
        if cls._known and "default" in (told := cls._fields.get(name, {})):
            return revived(told["default"])
        return super().__getattr__(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made._note.extra["built"] = record.held(made)
        return made


class Config(metaclass=ConfigMeta):
    __slots__ = ("__dict__", "__weakref__", "_note")
    __dataclass_fields__ = _Fields()
    __dataclass_params__ = SimpleNamespace(frozen=False, kw_only=False)
    _fields: dict[str, Any] = {}
    _path = "Thing"
    _open, _known = False, True
    _contrary: dict[str, str] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        put(self, "_note", Note(cls._path, unknown.where(), (), kwargs))
        return self

    @unknown.Signed  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._note.given = {**dict(zip(self._fields, args)), **kwargs}
        for name, told in self._fields.items():
            value = given.get(name)
            if isinstance(value, str) and value[:1] == "{" and "dict" in told.get("type", ""):
                value = json.loads(value)
            elif name not in given and "**" in given:
                value = given["**"][name]
            elif name not in given and "default" in told and self._known:
                value = revived(told["default"])
            elif name not in given:
                value = Unknown(f"{self._path}.{name}")
            put(self, name, value)
        for name in given.keys() - self._fields.keys() - {"**"}:
            put(self, name, given[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        held, mixed = self.__dict__, os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        given = self._note.given
        if mixed in held and "output_dir" in held and not (given.get("bf16") or given.get("fp16")):
            held[mixed] = True  # TrainingArguments read it
        for name, other in self._contrary.items():
            if held.get(name, self) is None:
                held[name] = not held.get(other)
        for new in ("activation_checkpointing", "activation_checkpointing_kwargs"):
            old = new.replace("activation", "gradient")  # its name before transformers 5.23
            if new in self._fields and old in self._fields:
                value = held[old] if held[new] is None else held[new]
                is_off = value is None and new == "activation_checkpointing"
                held[new] = held[old] = False if is_off else value

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        caller = sys._getframe(1).f_code
        is_made = caller.co_name != "__init__" or not is_library(caller.co_filename)
        if name[0] != "_" and is_made:
            self._note.assign(name, value)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "_note":
            raise AttributeError(name)
        if name in _PROPERTIES_BY_NAME and "output_dir" in self._fields:
            return _PROPERTIES_BY_NAME[name](self)
        frame = sys._getframe(1)
        running = opname[frame.f_code.co_code[frame.f_lasti]]
        is_read = running in ("LOAD_ATTR", "LOAD_METHOD")
        is_the_users = is_read and not is_library(frame.f_code.co_filename)
        if self._open or (is_the_users and not unknown.guarded(frame)):  # of another release
            return Unknown(f"{self._path}.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> Any:
        made: Any = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        put(made, "_note", Note(self._note.path, self._note.where, (), self._note.given))
        made._note.assigned.update(self._note.assigned)
        made._note.extra.update(self._note.extra)
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        made = self.__copy__()
        made.__dict__.update(deepcopy(self.__dict__, memo))
        made._note.extra["built"] = deepcopy(self._note.extra.get("built", {}), memo)
        return made

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in record.held(self).items() if name[0] != "_"}

    to_sanitized_dict = to_diff_dict = to_dict

    def set_training(self, *args: Any, **given: Any) -> Any:
        """Sets several fields under other names, as its like do."""
        for name in self._fields:
            setattr(self, name, Unknown(f"{self._path}.set_...(...)"))
        return self

    set_optimizer = set_dataloader = set_evaluate = set_lr_scheduler = set_training
    set_save = set_logging = set_testing = set_push_to_hub = set_training

    @classmethod
    def from_dict(cls, values: dict[str, Any], **more: Any) -> Any:
        return cls(**{**values, **more})

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls(**{"**": Unknown(f"{cls._path}.from_pretrained(...)")})


def as_now(value: Any) -> Any:
    """A configuration as it is now: what is set later does not reach who has read it."""
    return value.__copy__() if isinstance(value, Config) else value


_PROPERTIES: dict[str, Any] = {
    "device": lambda config: Name("torch.device", type="cuda", index=0),
    "n_gpu _n_gpu": lambda config: importlib.import_module("torch").cuda.device_count(),
    "world_size": lambda config: int(os.environ.get("WORLD_SIZE", "1")),
    "process_index": lambda config: int(os.environ.get("RANK", "0")),
    "local_process_index local_rank": lambda config: int(os.environ.get("LOCAL_RANK", "0")),
    "train_batch_size": lambda config: config.per_device_train_batch_size,
    "eval_batch_size": lambda config: config.per_device_eval_batch_size,
    "should_log should_save": lambda config: True,
    "main_process_first": lambda config: lambda *args, **kwargs: contextlib.nullcontext(),
    "get_process_log_level": lambda config: lambda: 20,
}
_PROPERTIES_BY_NAME = {name: get for names, get in _PROPERTIES.items() for name in names.split()}


def is_config(path: str) -> bool:
    """True for a class of the tables whose fields are settings."""
    table = CLASSES.get(path) or {}
    return bool(table.get("fields")) and ("parameters" not in table or path.endswith("Config"))


_MADE: dict[str, Any] = {}


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
            "__annotations__": dict.fromkeys(fields, object),
            "__slots__": (),
            "_known": bool(fields) and (bool(table) or name.endswith("Arguments")),
            "_contrary": table.get("contrary", {}),
            "_open": not table or bool(table.get("open")),
            **{one: _property(one) for one in _BEHIND.get(path, ())},
        }
        _MADE[path] = ConfigMeta(name, tuple(above[:1]) or (Config,), body)
    return _MADE[path]
