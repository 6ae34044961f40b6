"""Values that only the real library knows.

An `Unknown` can be called, indexed, compared and added to. Where a program needs an answer (a
truth, a length, a number), a seeded oracle gives one, and the question is noted.
"""

from __future__ import annotations

import os
import random
import re
import sys
import sysconfig
import types
import zlib
from abc import ABCMeta
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations, islice, pairwise
from opcode import opname
from typing import Any

from tuner.program.standins import MARK, NAMES
from tuner.program.standins.tables import Tables

put = object.__setattr__
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {}
"""Calls of any value that count, by their last name: `.backward()`, `.step()`."""
LONG = 2**15 + 1
"""Tokens of a row that a cut to fewer makes shorter."""
ABSENT: dict[str, Any] = {}
"""Libraries that are not installed, with the line that first calls each."""
_PLAIN = set(NAMES["plain"])
"""Libraries that print, repeat or check what a program does, and change no value."""
ENTRIES: dict[str, Any] = {}
"""Functions that `modal run` starts, by their decorators; the entrypoint counts first."""
KEYS: list[str] = []
"""Keys that the program takes from its copies of unknown mappings."""
MAY_BE_NONE = set(NAMES["may be none"])
"""Whether these are None matters to no memory; nearly every program asks."""
_LIBRARIES = (
    os.path.join(os.path.dirname(__file__), ""),
    *("<frozen", "<string>", "<__array", sys.base_prefix + "/lib"),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
)


@cache
def is_library(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return True
    parts = file.replace("\\", "/").split("/")
    own = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    roots = [os.path.abspath(each) for each in sys.path]
    holds = [each for each in roots if each not in own and file.startswith(each + os.sep)]
    return not {"site-packages", "dist-packages"}.isdisjoint(parts) or any(map(_is_filled, holds))


@cache
def _is_filled(folder: str) -> bool:
    """True for a folder of `pip install --target`."""
    return os.path.isdir(folder) and any(n.endswith(".dist-info") for n in os.listdir(folder))


def users_frame(depth: int = 1) -> Any:
    """The nearest frame that runs a line of the user's."""
    frame: Any = sys._getframe(depth)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def where(frame: Any = None) -> dict[str, Any] | None:
    """The user's call that is running now, to the column."""
    frame = frame or users_frame(2)
    return None if frame is None else place(frame.f_code, frame.f_lasti, frame.f_lineno)


def place(code: types.CodeType, instruction: int, line: int) -> dict[str, Any]:
    found: Any = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if found[0] is None or found[2] is None:
        found = line, line, 0, 0
    names = "line", "end", "column", "end_column"
    return {"file": code.co_filename, **dict(zip(names, found))}


@cache
def _after(code: types.CodeType) -> dict[int, Any]:
    """The instruction after each, by the offset of the first."""
    import dis

    return {each.offset: after for each, after in pairwise(dis.get_instructions(code))}


def _decorates(frame: Any, decorated: Any) -> bool:
    """True for a call whose result is stored under the name of what it got."""
    after: Any = frame and _after(frame.f_code).get(frame.f_lasti)
    while after and after.opname in ("CALL", "PRECALL"):
        after = _after(frame.f_code).get(after.offset)
    return bool(after) and after.opname[:6] == "STORE_" and after.argval == decorated.__name__


def guarded(frame: Any) -> bool:
    """True for a line in a `try` or `with`; an `except` is guarded only by what is around it."""
    import dis

    code: Any = dis.Bytecode(frame.f_code) if frame else None
    at = frame and frame.f_lasti
    while code and (around := [e for e in code.exception_entries if e.start <= at < e.end]):
        at = around[0].target
        if opname[frame.f_code.co_code[at]] == "PUSH_EXC_INFO":
            return True
    return False


_BALANCED = [sum(1 << bit for bit in bits) for bits in combinations(range(6), 3)]
"""Answers of six seeds to one question: as often yes as no."""


_NUMBER = re.compile(r"(?<=.) \d+>")  # ends the text of an unknown value


class Oracle:
    """Answers by seed; a question that is asked again gets the same answer, twenty times.

    `fixed` has answers that are given. `branches` are the answers so far, a line each: question,
    file and line, answer. `numbers` are the sizes that were answered.
    """

    def __init__(self) -> None:
        self.seed, self.asked, self.times = 0, list[dict[str, Any]](), dict[str, int]()
        self.fixed: dict[str, Any] = {}
        self.order: dict[str, int] = {}  # of the first run's questions: no two of ten are alike
        self.branches: dict[tuple[Any, ...], None] = {}
        self.numbers: dict[str, float] = {}

    def ask(self, what: str) -> None:
        times = self.times[what] = self.times.get(what, 0) + 1
        if times == 1 and len(self.asked) < 200:
            self.asked.append({"what": what[:200], "where": where()})

    def _hash(self, what: str) -> int:
        self.ask(what)
        return zlib.crc32(what.encode())

    def truth(self, what: str) -> bool:
        what = _NUMBER.sub(">", what)  # a question is the same for all seeds
        number = self._hash(what)
        if self.seed == 0:
            self.order.setdefault(what, len(self.order))
        pattern = _BALANCED[self.order.get(what, number) % len(_BALANCED)]
        if self.times[what] > 20:  # a loop that waits for the other answer ends
            return self.times[what] % 2 == 0
        answer = bool(self.fixed.get(what, pattern >> (self.seed % 6) & 1))
        self._note(what, answer)
        return answer

    def _note(self, what: str, answer: Any) -> None:
        frame = users_frame(3)
        at = None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if len(self.branches) < 200:
            self.branches.setdefault((what, at, answer))

    def small(self, what: str) -> int:
        return (self.seed + self._hash(what)) % 3 + 1

    def magnitude(self, what: str, orders: str) -> float:
        """Another one with each of six seeds, so that any threshold is crossed; then twice that."""
        self._hash(what)
        mixed = orders.split()
        random.Random(what).shuffle(mixed)
        answer = float(mixed[self.seed % 6]) * (1 + self.seed // 6)
        return self.numbers.setdefault(what, answer)

    def number(self, what: str) -> int:
        return int(self.magnitude(what, "2 30 400 5000 60000 2000000")) + self.seed


ORACLE = Oracle()


class Text(str):
    """The text of an `Unknown`; what is in it is asked."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("encode", "join", "format"):
            return str.__getattribute__(self, name)
        return getattr(Unknown(str.__str__(self)), name)


class _Key(Text):
    """All keys of an unknown mapping: `**unknown` is one argument with this name."""

    def __eq__(self, other: object) -> bool:
        frame = sys._getframe(1)  # a call compares it with the names of parameters, too
        asks = opname[frame.f_code.co_code[frame.f_lasti]] in ("COMPARE_OP", "CONTAINS_OP")
        return _equals(self, other) if asks else str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not _equals(self, other)

    __hash__ = str.__hash__


_ANY_KEY = _Key("**")


def short(value: object) -> str:
    return str.__str__(value._what if isinstance(value, Unknown) else repr(value))[:60]


class Unknown:
    """One value that only the real library knows, by the words that made it.

    `_rows` is the last call that set the length of the rows that it has, if it has some, and
    `_is_read` is true for what was read as an attribute, or with `get`: it may be None.
    """

    __slots__ = ("__dict__", "__weakref__", "_at", "_is_read", "_note", "_rows", "_what")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        for name in ("_at", "_is_read", "_note", "_rows"):
            put(self, name, None)
        put(self, "_what", cls.__name__)
        return self

    def __init__(self, what: str = "?", at: Any = None, rows: Any = None) -> None:
        put(self, "_what", what)
        put(self, "_at", at)
        put(self, "_rows", rows)

    def _child(self, what: str) -> Unknown:
        return Unknown(what[-200:], self._at, self._rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = self.__dict__.setdefault(name, self._child(f"{self._what}.{name}"))
        put(made, "_is_read", name not in MAY_BE_NONE)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame, is_absent = users_frame(2), calls_absent(self._what)
        alone = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        if alone and _decorates(frame, args[0]):
            if not isinstance(args[0], type):
                made = _filled(args[0], is_absent)
                if self._what.startswith("modal."):
                    ENTRIES[self._what.rpartition(".")[2]] = made
                return made
            return _opened(args[0], self._what) if is_absent else args[0]
        last = self._what.rpartition(".")[2].replace("(...)", "")
        rows = (counts := CALLS.get(last)) and counts(self, args, kwargs)
        at = self._at or (frame and (frame.f_code, frame.f_lasti, frame.f_lineno))
        rows = rows if isinstance(rows, Note) else self._rows
        made = Unknown(f"{self._what}(...)"[-200:], at, rows)
        put(made, "_is_read", last == "get" and not kwargs and args[1:] in ((), (None,)))
        return made

    def __iter__(self) -> Iterator[Any]:
        if self._what.endswith(".keys()"):
            return iter([_ANY_KEY])
        frame = sys._getframe(1)
        kind, names = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
        count = {"UNPACK_SEQUENCE": names, "UNPACK_EX": names + 1}.get(opname[kind])
        if count is None:
            count = ORACLE.small(f"length of {self._what}")
        return (self[index] for index in range(count))

    def keys(self) -> Any:
        return self._child(f"{self._what}.keys()")

    def items(self) -> Any:
        return [(key, self[key]) for key in KEYS or [_ANY_KEY]]

    def __getitem__(self, key: Any) -> Any:
        child = self._child(f"{self._what}[{short(key)}]")
        return self.__dict__.setdefault("[]", {}).setdefault(repr(key), child)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("[]", {})[repr(key)] = value


def calls_absent(path: str) -> bool:
    """True for a call of a library that is not installed, whose first line is noted."""
    root = path.partition(".")[0]
    is_absent = root in ABSENT and root not in _PLAIN
    if is_absent and ABSENT[root] is None:
        ABSENT[root] = where()
    return is_absent


def _filled(function: Any, is_absent: bool) -> Any:
    """A function that a decorator gives arguments of its own: those that lack are unknown.

    One that is not installed may give those that have defaults, too.
    """
    code, least = function.__code__, len(function.__defaults__ or ())
    needed = code.co_varnames[: code.co_argcount - least]
    if is_absent:
        needed = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def call(*args: Any, **kwargs: Any) -> Any:
        lacking = [name for name in needed[len(args) :] if name not in kwargs]
        return function(*args, **kwargs, **{name: Unknown(name) for name in lacking})

    call.__name__ = function.__name__
    # Of schedulers, which run it elsewhere: Modal's, Ray's and others.
    vars(call).update(dict.fromkeys(("remote", "local", "spawn", "delay", "submit"), call))
    vars(call).update(__wrapped__=function, options=lambda *args, **kwargs: call)
    return call


def _opened(cls: type, decorator: str) -> Any:
    """A class to which a decorator that is not installed gives its fields."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if "__init__" in vars(cls):
        body["__init__"] = _filled(vars(cls)["__init__"], True)
    try:
        return Meta(cls.__name__, (cls, thing(f"{decorator}.{cls.__name__}", Absent)), body)
    except TypeError:  # it can't be derived from
        return cls


def _awaited(self: Any) -> Any:
    yield from ()
    return self


async def _streamed(self: Any) -> Any:
    for item in self:
        yield item


def _text(self: Any, *form: Any) -> Text:
    number = zlib.crc32(f"{ORACLE.seed} {self._what}".encode())
    return Text(f"{MARK}{self._what[:80]} {number}>")


def _length(what: str) -> int:
    if "tokenizer(" in what and "tokenizer(..." not in what:
        return LONG  # the longest row decides, and a program may cut it
    # A function of rows gets some of them at once.
    return (ORACLE.small if what[:3] == "row" else ORACLE.number)(f"len({what})")


def _equals(self: Any, other: Any) -> bool:
    if str.__eq__(self, other) is True or not isinstance(other, str) or MARK in other:
        return str.__eq__(self, other) is True
    return ORACLE.truth(f"{self} == {other!r}")


def _child(form: str) -> Any:
    return lambda self, *others: self._child(form.format(self._what, *map(short, others)))


def _is(form: str) -> Any:
    return lambda self, *others: ORACLE.truth(form.format(self._what, *map(short, others)))


_ARITHMETIC = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OPERATORS = ["lt", "le", "gt", "ge", *chain(*((name, f"r{name}") for name in _ARITHMETIC))]
_METHODS: dict[str, Any] = {
    **{name: _child(f"({{0}} {name} {{1}})") for name in _OPERATORS},
    "eq": lambda self, other: self is other or self._child(f"{self._what} == {short(other)}"),
    "ne": lambda self, other: self is not other and self._child(f"{self._what} != {short(other)}"),
    "neg pos abs invert": _child("-{0}"),
    "next": _child("next({0})"),
    "round": _child("round({0})"),
    "array_ufunc array_function": lambda self, *_, **__: self._child(f"numpy({self._what})"),
    "array": lambda self, *_, **__: sys.modules["numpy"].full((4, 4), float(self)),
    "bool": _is("{0}"),
    "contains": _is("{1} in {0}"),
    "instancecheck": _is("isinstance {1} {0}"),
    "subclasscheck": _is("issubclass {1} {0}"),
    "len": lambda self: _length(self._what),
    "int index trunc floor ceil": lambda self: ORACLE.number(f"int({self._what})"),
    "float": lambda self: ORACLE.magnitude(f"float({self._what})", "0.003 0.07 0.3 0.6 4.2 900.5"),
    "str repr fspath format": _text,
    "reversed": lambda self: iter(list(self)[::-1]),
    "enter aenter aexit copy deepcopy": lambda self, *values: self,
    "exit delitem": lambda self, *values: None,
    "aiter": _streamed,
    "await": _awaited,
    "reduce_ex": lambda self, protocol: (str, (str.__str__(str(self)),)),
    "mro_entries": lambda self, bases: (thing(self._what),),
}
_METHODS_OF_TEXT = {
    "eq": _equals,
    "ne": lambda self, other: not _equals(self, other),
    "contains": lambda self, part: ORACLE.truth(f"{part!r} in {self}"),
    "getitem": lambda self, key: Unknown(str.__str__(self))[key],
}
_METHODS_OF_CLASSES = {
    "subclasscheck": lambda cls, subclass: cls in getattr(subclass, "__mro__", ()),
    "contains": lambda cls, item: ORACLE.truth(f"{short(item)} in {cls.__name__}"),
    "getitem": lambda cls, key: cls,
    "iter": lambda cls: iter(()),
}


class Name:
    """A constant of a library that only its name tells: `torch.bfloat16`, `FULL_SHARD`."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__dict__.update(attributes, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return str(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


class Word(str):
    """A member of a library's enumeration of words: `IntervalStrategy.STEPS` is "steps"."""

    name, value = property(str.upper), property(str.__str__)


_LOWER = set("IntervalStrategy SaveStrategy HubStrategy SchedulerType OptimizerNames".split())
"""Enumerations whose members are words in small letters, but for these."""
_ODD = {
    **{name: f"{name}_32bit" for name in "lion paged_adamw paged_lion paged_ademamix".split()},
    "adamw_bnb": "adamw_bnb_8bit",
}


PATCHED: dict[type, set[str]] = {}
"""By class of a library: the methods that the program has replaced."""


class Signed:
    """An `__init__` with the parameters that the table of its class has."""

    def __init__(self, own: Any, cls: Any = None) -> None:
        self.own, self.cls = own, cls

    def __get__(self, held: Any, cls: Any) -> Any:
        return Signed(self.own, cls) if held is None else types.MethodType(self.own, held)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        signature = self.cls.__signature__
        if name == "__code__" and signature is not None:
            return types.SimpleNamespace(co_varnames=("self", *signature.parameters))
        return signature if name == "__signature__" else getattr(self.own, name)


class Meta(ABCMeta):
    """The class of stand-ins' classes: every attribute is there, and `isinstance` can be asked."""

    def __getattr__(cls, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(name)
        path = getattr(cls, "_path", cls.__name__)
        last = path.rpartition(".")[2]
        made: Any = Unknown(f"{path}.{name}")
        if last in _LOWER and name.isupper():
            made = Word(_ODD.get(name.lower(), name.lower()))
        elif last in ("TaskType", "PeftType") and name.isupper():
            made = Word(name)
        elif name.replace("_", "").isupper():
            made = Name(f"{path}.{name}")
        type.__setattr__(cls, name, made)
        return made

    @property
    def __signature__(cls) -> Any:
        """The parameters of the library's class; None of a class with an `__init__` of its own."""
        init = next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
        table = CLASSES.get(getattr(cls, "_path", "")) if isinstance(init, Signed) else None
        if table is None:
            return None
        import inspect

        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        made = [
            inspect.Parameter(name, kind, default=each.get("default", empty))
            for name, each in table["fields"].items()
        ]
        return inspect.Signature(made, __validate_parameters__=False)

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls, name, value)
        if callable(value) and name[0] != "_":
            PATCHED.setdefault(cls, set()).add(name)

    def _name(cls) -> Any:
        own = vars(cls).get("_named")
        return own() if own else type.__dict__["__name__"].__get__(cls)

    __name__: Any = property(_name, type.__dict__["__name__"].__set__)

    def register(cls, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """An Auto class that learns of a class of the program's."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls in type(instance).__mro__ or "_path" not in vars(cls):
            return cls in type(instance).__mro__
        if (holds := vars(type(instance)).get("_is_a")) is not None:
            return bool(holds(instance, cls._path))
        if type(instance) is Unknown and cls._path != "Thing":
            return ORACLE.truth(f"isinstance({instance._what}, {cls.__name__})")
        return False


def _define(cls: type, methods: dict[str, Any]) -> None:
    for names, method in methods.items():
        for name in names.split():
            setattr(cls, f"__{name}__", method)


_define(Unknown, _METHODS)
_define(Text, _METHODS_OF_TEXT)
_define(Meta, _METHODS_OF_CLASSES)


class Thing(Unknown, metaclass=Meta):
    """An object of a library's class, or of the user's class that derives from one."""

    __slots__ = ()
    _path = "Thing"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = Unknown.__new__(cls)
        put(self, "_what", cls._path)
        put(self, "_note", Note(cls._path, where(), args, kwargs))
        return self

    @Signed  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name[0] != "_" or name == "_attn_implementation":
            self._note.assign(name, value)


class Absent(Thing):
    """An object of a library that is not installed: only what it is given is known of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._note.given["**"] = Unknown(f"defaults of {self._path}")
        calls_absent(self._path)
        own = [vars(base) for base in type(self).__mro__ if "_path" not in vars(base)]
        kinds = {k: kind for each in own for k, kind in each.get("__annotations__", {}).items()}
        for name in (*kinds, *kwargs):
            kind, value = kinds.get(name), kwargs.get(name, self)
            if isinstance(value, dict) and isinstance(kind, Meta):
                value = kind(**value)  # a class of the same library
            elif value is self or (isinstance(value, dict) and "dict" not in str(kind).lower()):
                value = Unknown(f"{type(self).__name__}.{name}")
            put(self, name, value)


class Note:
    """The record of one object: its call, and what was done to it later."""

    __slots__ = ("assigned", "calls", "extra", "given", "path", "where")

    def __init__(self, path: str, at: Any, args: Any = (), kwargs: Any = None) -> None:
        self.path, self.where = path, at
        self.assigned: dict[str, Any] = {}
        self.calls: list[Note] = []
        self.extra: dict[str, Any] = {}
        self.take(args, kwargs or {})

    def take(self, args: Any, kwargs: Any) -> None:
        """The arguments that reached the library's own `__init__`, through the user's classes."""
        root, last = self.path.partition(".")[0], self.path.rpartition(".")[2]
        table = CLASSES.get(self.path) or CLASSES.get(f"{root}.{last}") or {}
        known = table.get("parameters") or _PARAMETERS.get(last, "").split()
        names = chain(known, map(str, range(len(known), 99)))  # further ones are numbered
        self.given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}

    def assign(self, name: str, value: Any) -> None:
        if (frame := users_frame(3)) is not None:
            self.assigned[name] = (value, where(frame))


ROWS: dict[str, dict[str, Any]] = {}
"""The rows of the request."""
CLASSES = Tables(ROWS.get)
_PARAMETERS = {
    "from_config": "config",
    "add_adapter": "adapter_config adapter_name",
    "resize_token_embeddings": "new_num_tokens pad_to_multiple_of",
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",
    "autocast": "device_type dtype enabled",
    "requires_grad_": "requires_grad",
    "Linear": "in_features out_features",
    "SentenceTransformer": "model_name_or_path modules device",
    "SentenceTransformerTrainer": "model args train_dataset eval_dataset loss",
}
"""Positional parameters of what the tables lack."""

_CLASSES: dict[str, Any] = {}


def thing(path: str, base: Any = Thing, **body: Any) -> Any:
    """The class of a library by its path, made once."""
    if path not in _CLASSES:
        module, _, name = path.rpartition(".")
        body = {"__module__": module, "_path": path, "__slots__": (), **body}
        _CLASSES[path] = Meta(name, (base,), body)
    return _CLASSES[path]
