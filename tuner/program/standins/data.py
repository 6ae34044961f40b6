"""Datasets, loaders and tokenizers, as far as a training's settings come from them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from tuner.program.standins.record import call
from tuner.program.standins.unknown import CALLS, ORACLE, Note, Thing, Unknown, put, where

ROWS = 64  # batches that a loader has where nothing tells
CURRENT: list[Any] = []  # the loader that gave the last batch
TOKENIZED: dict[str, Note] = {}  # calls of tokenizers, by path and line


def _tokenized(path: str, kwargs: Any) -> None:
    note = call(path, (), kwargs)
    at = note.where or {}
    TOKENIZED[f"{path} {at.get('file')} {at.get('line')}"] = note


class Tokenizer(Thing):
    """A tokenizer or processor; its calls tell how long rows get."""

    __slots__ = ()
    _path = "transformers.AutoTokenizer"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.__new__(cls)
        kwargs = {**dict(zip(("pretrained_model_name_or_path",), args)), **kwargs}
        put(made, "_note", Note(f"{cls._path}.from_pretrained", where(), (), kwargs))
        _tokenized(cls._path, kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _tokenized("tokenizer", kwargs)
        return Unknown("tokenizer(...)", self._at)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        _tokenized("tokenizer.apply_chat_template", kwargs)
        return Unknown("tokenizer.apply_chat_template(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith(("model_max", "padding_side", "truncation_side")):
            _tokenized(f"tokenizer.{name}", {name: value})


def tried(function: Any, *args: Any) -> Any:
    """Calls a function of the user's for the tokenizers that it calls.

    Its questions count only if it did.
    """
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        return None
    asked, times, before = len(ORACLE.asked), dict(ORACLE.times), dict(TOKENIZED)
    try:
        return function(*args)
    except Exception:
        return None
    finally:
        if before == TOKENIZED:
            del ORACLE.asked[asked:]
            ORACLE.times = times


def _mapped(self: Any, args: Any, kwargs: Any) -> None:
    rows: list[Any] = [Unknown("row")]
    rows += [Unknown("index")] if kwargs.get("with_indices") else []
    function = args[0] if args else kwargs.get("function", kwargs.get("transform"))
    if kwargs.get("fn_kwargs") and callable(function):
        own, more = function, kwargs["fn_kwargs"]
        function = lambda *values: own(*values, **more)  # noqa: E731
    tried(function, *rows)


for _name in ("map", "filter", "with_transform", "set_transform"):
    CALLS[_name] = _mapped


class Dataset(Thing):
    """A dataset of `datasets`; one that was made of the program's own rows knows its length."""

    __slots__ = ()
    _path = "datasets.Dataset"

    @classmethod
    def _of(cls, rows: Any) -> Any:
        made = cls.__new__(cls)
        made._note.extra["rows"] = rows
        return made

    @classmethod
    def from_list(cls, mapping: Any = (), *args: Any, **kwargs: Any) -> Any:
        return cls._of(mapping if isinstance(mapping, list) else None)

    @classmethod
    def from_dict(cls, mapping: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mapping, dict) or not all(
            isinstance(each, (list, tuple)) for each in mapping.values()
        ):
            return cls._of(None)
        return cls._of([dict(zip(mapping, row)) for row in zip(*mapping.values())])

    @property
    def _rows(self) -> Any:
        return self._note.extra.get("rows")

    @property
    def num_rows(self) -> Any:
        return Unknown("num_rows") if self._rows is None else len(self._rows)

    def __len__(self) -> int:
        return ORACLE.number(f"len({self._what})") if self._rows is None else len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._rows is None else iter(self._rows)

    def __getitem__(self, key: Any) -> Any:
        if self._rows is None or not isinstance(key, (int, str)):
            return super().__getitem__(key)
        return self._rows[key] if isinstance(key, int) else [row[key] for row in self._rows]

    def select(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
        known = isinstance(indices, (range, list)) and self._rows is not None
        return self._of([self._rows[i] for i in indices] if known else None)

    def map(self, *args: Any, **kwargs: Any) -> Any:
        _mapped(self, args, kwargs)
        known = self._rows is not None and not kwargs.get("batched")
        return self._of([Unknown("row")] * len(self._rows) if known else None)

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        return self

    rename_column = rename_columns = remove_columns = shuffle
    with_format = cast_column = add_column = flatten_indices = shuffle


class _Asked(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if type(instance) is Unknown:
            return ORACLE.truth(f"isinstance({instance._what}, {cls.__name__})")
        return super().__instancecheck__(instance)


class DatasetDict(dict[str, Any], metaclass=_Asked):
    """Several datasets by name: what is done to it is done to each."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def each(*args: Any, **kwargs: Any) -> Any:
            made = {key: getattr(value, name)(*args, **kwargs) for key, value in self.items()}
            return DatasetDict(made)

        return each


class DataLoader(Thing):
    """A loader: it has sixty-four batches, unless its rows are known."""

    __slots__ = ()
    _path = "torch.utils.data.DataLoader"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        for name, value in self._note.given.items():
            put(self, name, value)

    def _batches(self) -> int | None:
        rows, size = self._note.given.get("dataset"), self._note.given.get("batch_size", 1)
        known = rows._rows is not None if isinstance(rows, Dataset) else isinstance(rows, list)
        return -(-len(rows) // size) if known and isinstance(size, int) and size > 0 else None

    def __len__(self) -> int:
        known = self._batches()
        return ORACLE.number("length of the DataLoader") if known is None else known

    def __iter__(self) -> Iterator[Any]:
        tried(self._note.given.get("collate_fn"), [Unknown("row")])
        known = self._batches()
        for index in range(ROWS if known is None else min(known, 4 * ROWS)):
            CURRENT[:] = [self]
            yield Unknown(f"batch[{index}]")
