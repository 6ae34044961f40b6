"""The record of one run, as plain JSON."""

from __future__ import annotations

import pathlib
import types
from typing import Any

from tuner.program.standins.unknown import (
    MARK,
    Meta,
    Name,
    Note,
    Thing,
    Unknown,
    place,
    where,
)

TRAININGS: list[dict[str, Any]] = []
LOOPS: dict[int, dict[str, Any]] = {}
STANDINS: dict[str, None] = {}
ABSENT: dict[str, None] = {}

_open: list[int] = []  # objects that are being told: a circle ends


def unknown(what: str, at: Any = None) -> dict[str, Any]:
    if isinstance(at, tuple):
        at = place(*at)
    return {"$unknown": what, "where": [at] if at else []}


def plain(value: Any, stubs: frozenset[int] = frozenset()) -> Any:
    """A value as JSON; what JSON lacks as `$unknown`, `$object` or `$name`."""
    if value is None or isinstance(value, (bool, int, float)):
        return value if value is None or isinstance(value, (bool, int)) else float(value)
    if isinstance(value, str):
        return unknown(str.__str__(value)) if MARK in str.__str__(value) else str(value)
    if isinstance(value, Name):
        return {"$name": value._name}
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if id(value) in _open or len(_open) > 8:
        return {"$object": _stub(value)}
    _open.append(id(value))
    try:
        if isinstance(value, (list, tuple, set, frozenset, range)):
            return [plain(each, stubs) for each in list(value)[:1024]]
        if isinstance(value, (dict, types.MappingProxyType)):
            return {str(key): plain(each, stubs) for key, each in list(value.items())[:256]}
        if isinstance(value, type):
            return {"$name": _class_of(value)}
        if isinstance(getattr(value, "_note", None), Note):
            if id(value) in stubs:
                return {"$object": _stub(value)}
            tell = getattr(type(value), "_told", None)
            return {"$object": tell(value, stubs) if tell else told(value, stubs)}
        if isinstance(value, Unknown):
            return unknown(value._what, value._at)
        if hasattr(type(value), "__dataclass_fields__"):
            inside = {k: plain(v, stubs) for k, v in vars(value).items() if k[0] != "_"}
            return {"$object": {**_stub(value), "values": inside}}
        if hasattr(value, "_content") or hasattr(value, "items"):  # OmegaConf, mappings
            return {str(key): plain(each, stubs) for key, each in value.items()}
        if callable(value) and hasattr(value, "__qualname__"):
            return {"$name": f"{value.__module__}.{value.__qualname__}"}
        item = getattr(value, "item", None)  # numpy's numbers
        if item is not None and type(value).__module__ == "numpy":
            return plain(value.tolist())
    except Exception:
        pass
    finally:
        _open.pop()
    if isinstance(getattr(value, "value", None), (str, int)):  # an enumeration of the user's
        return value.value
    return {"$object": _stub(value)}


def _class_of(cls: type) -> str:
    own = cls.__dict__.get("_path")
    return own if isinstance(own, str) else f"{cls.__module__}.{cls.__qualname__}"


def _stub(value: Any) -> dict[str, Any]:
    note = getattr(value, "_note", None)
    return {
        "class": _class_of(type(value)),
        "where": note.where if isinstance(note, Note) else None,
    }


def told(value: Any, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
    """An object: its class, what its call was given, what was set later, and what it holds."""
    note, cls = value._note, type(value)
    lines: list[Any] = [base for base in cls.__mro__ if "_path" in base.__dict__]
    own = [base for base in cls.__mro__ if isinstance(base, Meta) and "_path" not in base.__dict__]
    methods = {name for base in own for name, each in vars(base).items() if callable(each)}
    told: dict[str, Any] = called(note, stubs)
    told["class"] = _class_of(cls)
    above = dict.fromkeys(base._path for base in lines)
    told["bases"] = [path for path in above if path not in ("Thing", told["class"])]
    if methods:
        told["methods"] = sorted(methods)
    told["values"] = {name: plain(each, stubs) for name, each in values(value).items()}
    return told


def values(value: Any) -> dict[str, Any]:
    held = vars(value)
    if not isinstance(value, Thing):
        return {name: each for name, each in held.items() if name[:1] != "_"}
    return {
        name: each
        for name, each in held.items()
        if name[:1] not in ("_", "[")
        and not (type(each) is Unknown and each._what.endswith(f"{value._what}.{name}"))
    }


def called(note: Note, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
    """A call that made no object of its own."""
    return {
        "class": note.path,
        "bases": [],
        "where": note.where,
        "given": {name: plain(each, stubs) for name, each in note.given.items()},
        "assigned": {name: [plain(v, stubs), at] for name, (v, at) in note.assigned.items()},
        "values": {},
    }


def call(path: str, args: Any = (), kwargs: Any = None) -> Note:
    return Note(path, where(), args, kwargs)


def described(value: Any) -> Any:
    """O of a configuration, or of the call that took its place; else V."""
    if isinstance(value, Note):
        return called(value)
    return told(value) if isinstance(getattr(value, "_note", None), Note) else plain(value)


def told_model(model: Any) -> Any:
    """M of a model of a library; else V."""
    return model._told() if hasattr(type(model), "_told") else plain(model)
