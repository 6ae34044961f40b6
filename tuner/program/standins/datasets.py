"""Datasets, loaders and tokenizers, as far as a training's settings come from them."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator
from typing import Any

from tuner.program.standins import MARK
from tuner.program.standins.files import Refused
from tuner.program.standins.guard import TooLong, within
from tuner.program.standins.record import call
from tuner.program.standins.unknown import (
    CALLS,
    LONG,
    ORACLE,
    Note,
    Thing,
    Unknown,
    is_library,
    users_frame,
)

ROWS = 64  # batches that a loader has where nothing tells
# The loader of the last batch; 1 after a backward pass of it, 0 after a step.
CURRENT: list[Any] = []
_CALLED: dict[Any, Note] = {}  # lengths of calls of tokenizers outside of functions of rows
_LIMITS: dict[Any, Note] = {}  # lengths that tokenizers cut to where a call gives none
_ROWS: dict[Any, Note] = {}  # lengths that mapped functions cut rows to
_ADDED: list[Note] = []
_TRIED: list[list[Any]] = []  # calls of tokenizers in each function that is being tried
_ONE_ENCODING = re.compile(r"tokenizer\((\d+)\)")
_FIRST = re.compile(r"\[slice\(None, (\d+), None\)\]$")


def named(names: str, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names.split(), args)), **kwargs}


class Holder(Thing):
    """Has what its call got as attributes."""

    _path = "Thing"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        self.__dict__.update((k, v) for k, v in self._note.given.items() if not k.isdigit())

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls(**named("pretrained_model_name_or_path", args, kwargs))


def _line(note: Note) -> Any:
    at = note.where or {}
    return note.path, at.get("file"), at.get("line")


def _unknown_length(note: Note, why: str) -> Note:
    return Note(note.path, note.where, (), {"max_length": Unknown(why)})


class Tokenizer(Holder):
    """A tokenizer or processor; its calls tell how long rows get."""

    _path = "transformers.AutoTokenizer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limited(self._note.given)

    def _limited(self, given: Any) -> None:
        if "model_max_length" in given:
            note = call(self._path, (), given)
            _LIMITS[_line(note)] = self.__dict__["_limit"] = note

    def _encoded(self, path: str, args: Any, given: Any) -> Any:
        """The result of a call, which cuts rows as transformers 5.23 does."""
        note, text = call(path, (), given), args[0] if args else given.get("text")
        cut, most, pads = (given.get(n) for n in ("truncation", "max_length", "padding"))
        # One text that the program has itself is a prompt or a template.
        is_row = type(text) is not str or MARK in text or pads == "max_length"
        if _TRIED and not is_row:
            return Unknown(f"{path}(...)")
        if cut is None:
            cut = most is not None and not pads and path == "tokenizer"
        if "**" in given:
            note = _unknown_length(note, "arguments of the tokenizer")
        elif not cut and pads != "max_length":
            note = _unknown_length(note, "the longest row: this call doesn't cut any")
        elif most is None:
            limit = self.__dict__.get("_limit")
            note = limit or _unknown_length(note, "model_max_length of the tokenizer")
        if not _TRIED:
            again = _CALLED.setdefault(_line(note), note)
            again.extra["rows"] = again is not note or is_row
            return Unknown(f"{path}(...)")
        _TRIED[-1].append((_stack(), note))
        return Unknown(f"tokenizer({len(_TRIED[-1]) - 1})")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._encoded("tokenizer", args, kwargs)

    encode = encode_plus = batch_encode_plus = __call__

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        path = "tokenizer.apply_chat_template"
        if kwargs.get("tokenize") is False:
            return Unknown(f"{path}(...)")
        return self._encoded(path, args, kwargs)

    def add_tokens(self, new_tokens: Any = (), *args: Any, **kwargs: Any) -> Any:
        _ADDED.append(call("tokenizer.add_tokens", (), {"new_tokens": new_tokens}))
        return Unknown("tokenizer.add_tokens(...)")

    def add_special_tokens(self, special_tokens_dict: Any = None, *args: Any, **kw: Any) -> Any:
        return self.add_tokens(special_tokens_dict)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._limited({name: value})


def _stack() -> list[Any]:
    """The lines of the user's that are running."""
    found, frame = [], users_frame(2)
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _is_own(function: Any) -> bool:
    """True for a function of the user's, also within a `partial`, and an object that has one."""
    while isinstance(function, functools.partial) or "__wrapped__" in getattr(
        function, "__dict__", ()
    ):
        partial = isinstance(function, functools.partial)
        function = function.func if partial else function.__wrapped__
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    return code is not None and not is_library(code.co_filename)


def tried(function: Any, *args: Any, own: Any = None, **kwargs: Any) -> tuple[Any, list[Any]]:
    """The result of a function of rows of the user's, and the calls of tokenizers in it.

    Its questions count only if it called one. It may call another, which is `own`.
    """
    if not _is_own(own or function):
        return None, []
    asked, times, made = len(ORACLE.asked), dict(ORACLE.times), None
    _TRIED.append([])
    try:
        with within(1):
            made = function(*args, **kwargs)
    except (Exception, Refused, SystemExit, TooLong):
        pass
    if not (calls := _TRIED.pop()):
        del ORACLE.asked[asked:]
        ORACLE.times = times
    return made, calls


def _length(made: Any, calls: list[Any], many: bool) -> Note | None:
    """The length of the rows that a function makes with these calls; `many` rows at once."""
    if not calls or (isinstance(made, dict) and "tokenizer(" not in _words(made)):
        return None  # texts, or numbers
    if isinstance(made, (dict, Unknown)):
        name = "input_ids" if isinstance(made, Unknown) or "input_ids" in made else "**"
        made = made.get(name) if isinstance(made, dict) else made[name]
    text = _words(made)
    used = [calls[n] for n in dict.fromkeys(map(int, _ONE_ENCODING.findall(text)))] or calls
    note: Note = used[0][1]
    if first := _FIRST.search(text):
        return Note("datasets.map", note.where, (), {"max_length": int(first[1])})
    if len(used) > 1 and not (many and all(stack == used[0][0] for stack, _ in used)):
        return _unknown_length(note, "rows of several tokenized texts")
    return _unknown_length(note, "a part of a tokenized text") if "slice(" in text else note


def _words(value: Any) -> str:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    return str(value._what) if isinstance(value, Unknown) else ""


def _cut(function: Any, batched: bool, **kwargs: Any) -> int | None:
    """The length to which a function cuts rows of tokens; None if longer rows stay longer."""
    found = set()
    for tokens in (LONG // 2, LONG):  # a cut to fewer makes them alike
        row = {name: [0] * tokens for name in ("input_ids", "attention_mask")}
        given = {name: [value] for name, value in row.items()} if batched else row
        made, _ = tried(function, given, **kwargs)
        rows = made.get("input_ids") if isinstance(made, dict) else None
        rows = rows if batched else [rows]
        if not rows or not isinstance(rows, list) or not all(isinstance(r, list) for r in rows):
            return None
        found.add(max(map(len, rows)))
    return found.pop() if len(found) == 1 else None


def _mapped(self: Any, args: Any, kwargs: Any) -> Note | None:
    """The length to which the function cuts rows, if it does."""
    function = args[0] if args else kwargs.get("function", kwargs.get("transform"))
    rows = [Unknown("row"), Unknown("index")][: 2 if kwargs.get("with_indices") else 1]
    given, many = kwargs.get("fn_kwargs") or {}, kwargs.get("batched") is True
    made, calls = tried(function, *rows, **given)
    if (note := _length(made, calls, many or "transform" in self._what)) is not None:
        _ROWS[_line(note)] = note
    elif not calls and (tokens := _cut(function, many, **given)):
        for line in [k for k, v in _ROWS.items() if type(v.given["max_length"]) is Unknown]:
            del _ROWS[line]
        note = call("datasets.map", (), {"max_length": tokens})
        _ROWS[_line(note)] = note
    return note


CALLS.update(dict.fromkeys(("map", "with_transform", "set_transform"), _mapped))


def _of_library(value: Any) -> Note | None:
    """The length to which a collator or a data set of a library cuts or fills rows, if it does."""
    if not isinstance(note := getattr(value, "_note", None), Note):
        return None
    name, length = note.path.rpartition(".")[2], note.given.get("max_length")
    if name == "UnslothVisionDataCollator":
        model = getattr(note.given.get("model", note.given.get("0")), "_note", None)
        usual = model.given.get("max_seq_length", 2048) if model else Unknown("length of the model")
        length = note.given.get("max_seq_length", usual)
    elif name == "ConstantLengthDataset":
        length = note.given.get("seq_length", 1024)
    elif note.given.get("padding") != "max_length":
        return None
    return length and Note(note.path, note.where, (), {"max_length": length})


def tokenized(rows: Any, collator: Any, others: Any) -> list[Note]:
    """The lengths of the rows of a trainer, and the tokens that were added."""
    own = _length(*tried(collator, [Unknown("row")]), many=True)
    own = _of_library(collator) or _of_library(rows) or own
    if own is None and (item := getattr(type(rows), "__getitem__", None)) is not None:
        own = _length(*tried(item, rows, 0), many=False)
    if own is None and (each := getattr(type(rows), "__iter__", None)) is not None:
        own = _length(*tried(lambda: next(iter(rows)), own=each), many=False)
    called = [note for note in _CALLED.values() if note.extra["rows"]]
    cuts = [note for note in called if type(note.given.get("max_length")) is not Unknown]
    cut = [note for each in (rows, others) if type(note := getattr(each, "_rows", None)) is Note]
    lengths = [own] if own else cut or [*_ROWS.values()] or cuts or called or [*_LIMITS.values()]
    return [*_ADDED, *lengths]


class DataLoader(Holder):
    _path = "torch.utils.data.DataLoader"

    def _batches(self) -> int | None:
        rows, size = self._note.given.get("dataset"), self._note.given.get("batch_size", 1)
        known = isinstance(rows, list) and isinstance(size, int) and size > 0
        return -(-len(rows) // size) if known else None

    def __len__(self) -> int:
        known = self._batches()
        return ORACLE.number("length of the DataLoader") if known is None else known

    def __iter__(self) -> Iterator[Any]:
        tried(self._note.given.get("collate_fn"), [Unknown("row")])
        known = self._batches()
        for index in range(ROWS if known is None else min(known, 4 * ROWS)):
            CURRENT[:] = [self, 0]
            yield Unknown(f"batch[{index}]")
        CURRENT[:] = [self]


class tqdm(Holder):
    """A progress bar goes through what it gets."""

    _path = "tqdm.tqdm"

    def __iter__(self) -> Any:
        given = self._note.given
        return iter(given.get("iterable", given.get("0", Unknown("tqdm"))))
