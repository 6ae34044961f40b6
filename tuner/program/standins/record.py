"""The record of one run, as plain JSON."""

from __future__ import annotations

import pathlib
from typing import Any

from tuner.program.standins import MARK
from tuner.program.standins.unknown import PATCHED, Name, Note, Thing, Unknown, place, where

TRAININGS: list[dict[str, Any]] = []
LOOPS: dict[int, dict[str, Any]] = {}
STANDINS: dict[str, None] = {}

_OURS = ("builtins", "tuner.program.standins.unknown")

_open: list[int] = []  # objects that are being told: a circle ends


def unknown(what: str, at: Any = None) -> dict[str, Any]:
    if isinstance(at, tuple):
        at = place(*at)
    return {"$unknown": what, "where": [at] if at else []}


def plain(value: Any, stubs: frozenset[int] = frozenset()) -> Any:
    """A value as JSON; what JSON lacks as `$unknown`, `$object` or `$name`."""
    if isinstance(value, str):
        text = str.__str__(value)
        return unknown(text) if MARK in text else text
    if isinstance(value, float):
        return float(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Name):
        return {"$name": value._name}
    if id(value) in _open or len(_open) > 8:
        return {"$object": _stub(value)}
    _open.append(id(value))
    try:
        found = _plain(value, stubs)
    except Exception:
        found = None
    finally:
        _open.pop()
    if found is None and isinstance(getattr(value, "value", None), (str, int)):
        return value.value  # an enumeration of the user's
    return {"$object": _stub(value)} if found is None else found


def _plain(value: Any, stubs: frozenset[int]) -> Any:
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, (list, tuple, set, frozenset, range)):
        items = list(value)
        most = len(items) if all(isinstance(each, str) for each in items) else 1024
        return [plain(each, stubs) for each in items[:most]]
    if isinstance(value, type):
        return {"$name": _class_of(value)}
    if isinstance(getattr(value, "_note", None), Note):
        tell = getattr(type(value), "_told", told)
        return {"$object": _stub(value) if id(value) in stubs else tell(value, stubs)}
    if isinstance(value, Unknown):
        return unknown(value._what, value._at)
    if hasattr(type(value), "__dataclass_fields__"):
        inside = {k: plain(v, stubs) for k, v in vars(value).items() if k[0] != "_"}
        return {"$object": {**_stub(value), "values": inside}}
    if hasattr(value, "items"):  # OmegaConf's as well
        return {str(key): plain(each, stubs) for key, each in list(value.items())[:256]}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"$name": f"{value.__module__}.{value.__qualname__}"}
    return plain(value.tolist()) if type(value).__module__ == "numpy" else None


def _class_of(cls: type) -> str:
    own = cls.__dict__.get("_path")
    return own if isinstance(own, str) else f"{cls.__module__}.{cls.__qualname__}"


def _stub(value: Any) -> dict[str, Any]:
    at = getattr(getattr(value, "_note", None), "where", None)
    return {"class": _class_of(type(value)), "where": at if isinstance(at, dict) else None}


def held(value: Any) -> dict[str, Any]:
    """The attributes of an object; fields that its class has as properties are asked for."""
    lines = [vars(base) for base in type(value).__mro__]
    asked = {n for line in lines for n, each in line.items() if isinstance(each, property)}
    asked &= getattr(type(value), "_fields", {}).keys()
    return {**vars(value), **{name: getattr(value, name) for name in asked}}


def told(value: Any, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
    """An object: its class, what its call was given, what was set later, and what it holds."""
    made, cls = called(value._note, stubs), type(value)
    made["class"] = _class_of(cls)
    paths = dict.fromkeys(base.__dict__.get("_path") for base in cls.__mro__)
    made["bases"] = [path for path in paths if path not in (None, "Thing", made["class"])]
    methods = {name for base in cls.__mro__ for name in PATCHED.get(base, ())}
    for base in cls.__mro__:  # the program's own, those beside the library's among them
        if "_path" not in vars(base) and base.__module__ not in _OURS:
            methods |= {name for name, each in vars(base).items() if callable(each)}
    if methods:
        made["methods"] = sorted(methods)
    made["values"] = {
        name: plain(each, stubs)
        for name, each in held(value).items()
        if name[:1] not in ("_", "[")
        and not (  # made when it was asked for
            isinstance(value, Thing)
            and type(each) is Unknown
            and each._what.endswith(f"{value._what}.{name}")
        )
    }
    if built := value._note.extra.get("built"):  # `vars(args).update(...)` assigns as well
        now = held(value)
        for name in getattr(cls, "_fields", ()):
            if name not in made["assigned"] and now.get(name) is not built.get(name):
                made["assigned"][name] = [made["values"].get(name), made["where"]]
    return made


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
