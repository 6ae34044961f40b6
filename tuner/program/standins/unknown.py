"""Values that only the real library knows.

An `Unknown` can be called, indexed, compared and added to. Where a program needs an answer (a
truth, a length, a number), a seeded oracle gives one, and the question is noted.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import types
import zlib
from abc import ABCMeta
from collections.abc import Callable, Iterator
from itertools import combinations, islice
from opcode import opmap
from typing import Any

from tuner.program.standins.tables import Tables

_HERE = __file__.rpartition("unknown.py")[0]
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} | {sys.base_prefix + "/lib"}
)
_NOT_THE_USERS: dict[str, bool] = {}

MARK = "<unknown:"

# Answers of six seeds to one question: as often yes as no.
_BALANCED = [sum(1 << bit for bit in bits) for bits in combinations(range(6), 3)]


def is_library(file: str) -> bool:
    known = _NOT_THE_USERS.get(file)
    if known is None:
        known = _NOT_THE_USERS[file] = (
            file.startswith((_HERE, "<frozen", "<string>", "<__array", *_LIBRARIES))
            or "/site-packages/" in file.replace("\\", "/")
            or "/dist-packages/" in file
        )
    return known


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
    found: Any = (None,) * 4
    if hasattr(code, "co_positions"):
        found = next(islice(code.co_positions(), instruction // 2, None), found)
    first, end, column, end_column = found
    if first is None or column is None:
        first, end, column, end_column = line, line, 0, 0
    return {
        "file": code.co_filename,
        "line": first,
        "end": end,
        "column": column,
        "end_column": end_column,
    }


class Oracle:
    """Answers by seed. A question that is asked again gets the same answer, twenty times."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.seed = 0
        self.random = random.Random(0)
        self.times: dict[str, int] = {}

    def start(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)

    def _note(self, what: str) -> int:
        times = self.times[what] = self.times.get(what, 0) + 1
        if times == 1 and len(self.asked) < 200:
            self.asked.append({"what": what[:200], "where": where()})
        return times

    def truth(self, what: str) -> bool:
        if self._note(what) > 20:  # a loop that waits for the other answer ends
            return self.random.random() < 0.5
        pattern = _BALANCED[zlib.crc32(what.encode()) % len(_BALANCED)]
        return bool(pattern >> (self.seed % 6) & 1)

    def small(self, what: str) -> int:
        self._note(what)
        return (self.seed + zlib.crc32(what.encode())) % 3 + 1

    def number(self, what: str) -> int:
        """One of six magnitudes, each with another seed, so that any threshold is crossed."""
        self._note(what)
        orders = [2, 30, 400, 5000, 60_000, 2_000_000]
        random.Random(what).shuffle(orders)
        return orders[self.seed % 6] + self.seed

    def fraction(self, what: str) -> float:
        self._note(what)
        orders = [0.003, 0.07, 0.3, 0.6, 4.2, 900.5]
        random.Random(what).shuffle(orders)
        return orders[self.seed % 6] + self.seed / 1000

    def text(self, what: str) -> Text:
        return Text(f"{MARK}{what[:80]} {zlib.crc32(f'{self.seed} {what}'.encode())}>")


ORACLE = Oracle()


class Text(str):
    """The text of an `Unknown`; what is in it is asked."""

    def __contains__(self, part: object) -> bool:
        return ORACLE.truth(f"{part!r} in {self}")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (
            isinstance(other, str) and MARK not in other and ORACLE.truth(f"{self} == {other!r}")
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("encode", "join", "format"):
            return str.__getattribute__(self, name)
        return getattr(Unknown(str.__str__(self)), name)

    def __getitem__(self, key: Any) -> Any:
        return Unknown(str.__str__(self))[key]


_CALLS = {opmap[name] for name in ("CALL", "PRECALL", "CACHE") if name in opmap}
_STORES = {opmap[name]: name for name in ("STORE_NAME", "STORE_GLOBAL", "STORE_FAST")}


def decorates(frame: Any, decorated: Any) -> bool:
    """Whether what a call returns is stored under the name of what it got: a decorator."""
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and code[at] in _CALLS:
        at += 2
    if at >= len(code) or code[at] not in _STORES:
        return False
    fast = _STORES[code[at]] == "STORE_FAST"
    stored = (frame.f_code.co_varnames if fast else frame.f_code.co_names)[code[at + 1] :][:1]
    return bool(stored == (decorated.__name__,))


# Whether these are None matters to no memory; nearly every program asks.
_MAY_BE_NONE = set("pad_token pad_token_id eos_token bos_token unk_token eos_token_id".split())
_IF_NONE = {number for name, number in opmap.items() if "JUMP" in name and "NONE" in name}


def none_asked(frame: Any) -> bool:
    """Whether a line of the user's asks `is None` of the attribute that it reads."""
    code = frame.f_code.co_code
    at = frame.f_lasti + 2
    while at < len(code) and code[at] == 0:  # caches
        at += 2
    if at >= len(code) or is_library(frame.f_code.co_filename):
        return False
    if code[at] in _IF_NONE:
        return True
    return (
        code[at] == opmap["LOAD_CONST"]
        and frame.f_code.co_consts[code[at + 1]] is None
        and code[at + 2 : at + 3] == bytes([opmap.get("IS_OP", 0)])
    )


def filled(function: Any) -> Any:
    """A function that a decorator gives arguments of its own: those that lack are unknown."""
    code, least = function.__code__, len(function.__defaults__ or ())
    needed = code.co_varnames[: code.co_argcount - least]

    def call(*args: Any, **kwargs: Any) -> Any:
        lacking = [name for name in needed[len(args) :] if name not in kwargs]
        return function(*args, **kwargs, **{name: Unknown(name) for name in lacking})

    call.__name__, call.__wrapped__ = function.__name__, function  # type: ignore[attr-defined]
    return call


def guarded(frame: Any) -> bool:
    """Whether a line stands in a `try`."""
    if frame is None or not hasattr(frame.f_code, "co_exceptiontable"):
        return False
    import dis

    parsed = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in parsed)


def unpacked(frame: Any) -> int | None:
    """Into how many names a line unpacks a value, where it does."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if code[at] == opmap["UNPACK_SEQUENCE"]:
        return int(code[at + 1])
    return int(code[at + 1]) + 1 if code[at] == opmap["UNPACK_EX"] else None


_PASSES = set(
    """no_grad inference_mode enable_grad compile jit cache register decorator is_main_process
    record on_main_process on_local_main_process main_process_first on_last_process step inference
    autocast custom_fwd custom_bwd script skip_init""".split()
)


def short(value: object) -> str:
    return repr(value)[:60]


class Unknown:
    """One value that only the real library knows, by the words that made it."""

    __slots__ = ("__dict__", "__weakref__", "_at", "_note", "_what")

    _what: str
    _at: Any
    _note: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        put(self, "_at", None)
        put(self, "_note", None)
        put(self, "_what", cls.__name__)
        return self

    def __init__(self, what: str = "?", at: Any = None) -> None:
        put(self, "_what", what)
        put(self, "_at", at)

    def _child(self, what: str) -> Unknown:
        return Unknown(what[-200:], self._at)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        asked = name not in _MAY_BE_NONE and none_asked(sys._getframe(1))
        if asked and ORACLE.truth(f"{self._what}.{name} is None"):
            return None
        child = self._child(f"{self._what}.{name}")
        self.__dict__[name] = child
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        last = self._what.rpartition(".")[2].replace("(...)", "")
        frame = users_frame(2)
        alone = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        if alone and last in _PASSES:
            return args[0]
        if alone and decorates(frame, args[0]):
            return args[0] if isinstance(args[0], type) else filled(args[0])
        if (call := CALLS.get(last)) is not None:
            call(self, args, kwargs)
        at = self._at or (frame and (frame.f_code, frame.f_lasti, frame.f_lineno))
        return Unknown(f"{self._what}(...)"[-200:], at)

    def __iter__(self) -> Iterator[Any]:
        count = unpacked(sys._getframe(1))
        if count is None:
            count = ORACLE.small(f"length of {self._what}")
        return (self[index] for index in range(count))

    def __getitem__(self, key: Any) -> Any:
        held, key = (
            self.__dict__.setdefault("[]", {}),
            key if isinstance(key, (str, int)) else repr(key),
        )
        if key not in held:
            held[key] = self._child(f"{self._what}[{short(key)}]")
        return held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("[]", {})[key if isinstance(key, (str, int)) else repr(key)] = (
            value
        )

    def __eq__(self, other: object) -> Any:
        return self is other or self._child(f"{self._what} == {short(other)}")

    def __hash__(self) -> int:
        return id(self)

    def __ne__(self, other: object) -> Any:
        return self is not other and self._child(f"{self._what} != {short(other)}")

    def keys(self) -> Any:
        return Keys(f"{self._what}.keys()", self._at)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy  # the user's own, and imported already

        return numpy.full((4, 4), float(self))


class Keys(Unknown):
    """Keys of an `Unknown`: `**unknown` is one argument with this name."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        yield "**"


async def _later(self: Any, *values: Any) -> Any:
    return self


def _awaited(self: Any) -> Any:
    return self
    yield


async def _streamed(self: Any) -> Any:
    for item in self:
        yield item


def _itself(self: Any, *values: Any) -> Any:
    return self


def _child(form: str) -> Any:
    return lambda self, *others: self._child(form.format(self._what, *map(short, others)))


def _is(form: str) -> Any:
    return lambda self, *others: ORACLE.truth(form.format(self._what, *map(short, others)))


_METHODS: dict[str, Any] = {
    "reversed": lambda self: iter(list(self)[::-1]),
    "bool": _is("{0}"),
    "contains": _is("{1} in {0}"),
    "instancecheck": _is("isinstance {1} {0}"),
    "subclasscheck": _is("issubclass {1} {0}"),
    "len": lambda self: ORACLE.number(f"len({self._what})"),
    "int index trunc floor ceil": lambda self: ORACLE.number(f"int({self._what})"),
    "float": lambda self: ORACLE.fraction(f"float({self._what})"),
    "complex": lambda self: complex(float(self)),
    "str repr fspath": lambda self: ORACLE.text(self._what),
    "format": lambda self, spec: ORACLE.text(self._what),
    "bytes": lambda self: str.encode(ORACLE.text(self._what)),
    "enter copy deepcopy": _itself,
    "aenter": _later,
    "aexit": _later,
    "aiter": _streamed,
    "await": _awaited,
    "exit delitem": lambda self, *values: None,
    "reduce_ex": lambda self, protocol: (str, (str.__str__(str(self)),)),
    "mro_entries": lambda self, bases: (thing(self._what),),
    "next": _child("next({0})"),
    "round": _child("round({0})"),
    "array_ufunc": lambda self, *args, **kwargs: self._child(f"numpy({self._what})"),
    "array_function": lambda self, *args, **kwargs: self._child(f"numpy({self._what})"),
    "neg pos abs invert": _child("-{0}"),
}
for _name in """add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod lt le gt
ge radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor rlshift rrshift
rdivmod""".split():
    _METHODS[_name] = _child(f"({{0}} {_name} {{1}})")
for _names, _method in _METHODS.items():
    for _name in _names.split():
        setattr(Unknown, f"__{_name}__", _method)

put = object.__setattr__

# What is called by name on any value: `.backward()`, `.step()`.
CALLS: dict[str, Callable[[Any, Any, Any], None]] = {}


class Name:
    """A constant of a library that only its name tells: `torch.bfloat16`, `FULL_SHARD`."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__dict__.update(attributes, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Unknown(f"{self._name}(...)")

    def __repr__(self) -> str:
        return str(self._name)

    def __reduce__(self) -> Any:
        return Name, (self._name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __or__(self, other: object) -> Any:
        return Unknown(f"{self._name} | {other}")

    __ror__ = __or__


class Word(str):
    """A member of a library's enumeration of words: `IntervalStrategy.STEPS` is "steps"."""

    name: str
    value: str


# Enumerations whose members are words: in small letters, but for these.
_WORDS = set("IntervalStrategy SaveStrategy HubStrategy SchedulerType OptimizerNames".split())
_ODD = {
    "ADAMW_BNB": "adamw_bnb_8bit",
    "PAGED_ADAMW": "paged_adamw_32bit",
    "LION": "lion_32bit",
    "PAGED_LION": "paged_lion_32bit",
    "PAGED_ADEMAMIX": "paged_ademamix_32bit",
}


class Meta(ABCMeta):
    """The class of stand-ins' classes: every attribute is there, and `isinstance` can be asked."""

    def __getattr__(cls, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(name)
        path = getattr(cls, "_path", cls.__name__)
        last = path.rpartition(".")[2]
        made: Any
        if (last in _WORDS or last in ("TaskType", "PeftType")) and name.isupper():
            made = Word(_ODD.get(name, name.lower()) if last in _WORDS else name)
            made.name, made.value = name, str(made)
        elif name.replace("_", "").isupper():
            made = Name(f"{path}.{name}")
        else:
            made = Unknown(f"{path}.{name}")
        type.__setattr__(cls, name, made)
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        if cls in type(instance).__mro__:
            return True
        if "_path" not in vars(cls):
            return False
        if (holds := vars(type(instance)).get("_is_a")) is not None:
            return bool(holds(instance, cls._path))
        if type(instance) is Unknown and cls._path != "Thing":
            return ORACLE.truth(f"isinstance({instance._what}, {cls.__name__})")
        return False

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls in getattr(subclass, "__mro__", ())

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __contains__(cls, item: object) -> bool:
        return ORACLE.truth(f"{short(item)} in {cls.__name__}")


class Thing(Unknown, metaclass=Meta):
    """An object of a library's class, or of the user's class that derives from one."""

    __slots__ = ()
    _path = "Thing"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = Unknown.__new__(cls)
        put(self, "_what", cls._path)
        put(self, "_note", Note(cls._path, where(), args, kwargs))
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name[0] != "_":
            self._note.assign(name, value)


class Note:
    """What is recorded of one object: its call, and what was done to it later."""

    __slots__ = ("assigned", "bound", "calls", "extra", "given", "path", "where")

    def __init__(self, path: str, at: Any, args: Any = (), kwargs: Any = None) -> None:
        self.path, self.where, self.bound = path, at, False
        self.given: dict[str, Any] = {**dict(zip(names(path), args)), **(kwargs or {})}
        self.assigned: dict[str, Any] = {}
        self.calls: list[Note] = []
        self.extra: dict[str, Any] = {}

    def take(self, args: Any, kwargs: Any) -> None:
        """The arguments that reached the library's own `__init__`, through the user's classes."""
        self.bound, self.given = True, {**dict(zip(names(self.path), args)), **kwargs}

    def assign(self, name: str, value: Any) -> None:
        if (frame := users_frame(3)) is not None:
            self.assigned[name] = (value, where(frame))


# Rows of the request, and positional parameters by the path of what is called.
ROWS: dict[str, dict[str, Any]] = {}
CLASSES = Tables(ROWS.get)


def names(path: str) -> Any:
    """The names of the positional parameters of a call; further ones are numbered."""
    root, last = path.partition(".")[0], path.rpartition(".")[2]
    table = CLASSES.get(path) or CLASSES.get(f"{root}.{last}") or {}
    known: list[str] = table.get("parameters") or PARAMETERS.get(last) or []
    yield from known
    yield from map(str, range(len(known), 99))


PARAMETERS = {  # of what the tables lack
    "from_config": ["config"],
    "add_adapter": ["adapter_config", "adapter_name"],
    "resize_token_embeddings": ["new_num_tokens", "pad_to_multiple_of"],
    "gradient_checkpointing_enable": ["gradient_checkpointing_kwargs"],
    "requires_grad_": ["requires_grad"],
    "Linear": ["in_features", "out_features"],
    "SentenceTransformer": ["model_name_or_path", "modules", "device"],
    "SentenceTransformerTrainer": ["model", "args", "train_dataset", "eval_dataset", "loss"],
}

_CLASSES: dict[str, Any] = {}


def thing(path: str, base: Any = Thing, **body: Any) -> Any:
    """The class of a library by its path, made once."""
    if path not in _CLASSES:
        module, _, name = path.rpartition(".")
        bases = base if isinstance(base, tuple) else (base,)
        _CLASSES[path] = Meta(
            name, bases, {"__module__": module, "_path": path, "__slots__": (), **body}
        )
    return _CLASSES[path]
