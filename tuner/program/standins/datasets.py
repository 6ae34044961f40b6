"""Datasets, loaders and tokenizers, as far as a training's settings come from them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from tuner.program.standins.record import call
from tuner.program.standins.unknown import CALLS, ORACLE, Note, Thing, Unknown

ROWS = 64  # batches that a loader has where nothing tells
CURRENT: list[
    Any
] = []  # the loader of the last batch; 1 after a backward pass of it, 0 after a step
_LONG = (2**14 + 1, 2**15 + 1)  # tokens of rows that a cut to fewer makes alike
TOKENIZED: dict[str, Note] = {}  # calls of tokenizers, by path and line


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


def _tokenized(path: str, given: Any) -> Any:
    note = call(path, (), given)
    at = note.where or {}
    TOKENIZED[f"{path} {at.get('file')} {at.get('line')}"] = note
    return Unknown(f"{path}(...)")


class Tokenizer(Holder):
    """A tokenizer or processor; its calls tell how long rows get."""

    _path = "transformers.AutoTokenizer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._note.given:
            _tokenized(self._path, self._note.given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _tokenized("tokenizer", kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return _tokenized("tokenizer.apply_chat_template", kwargs)

    def add_tokens(self, new_tokens: Any = (), *args: Any, **kwargs: Any) -> Any:
        return _tokenized("tokenizer.add_tokens", {"new_tokens": new_tokens})

    def add_special_tokens(self, special_tokens_dict: Any = None, *args: Any, **kw: Any) -> Any:
        return _tokenized("tokenizer.add_tokens", {"new_tokens": special_tokens_dict})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith(("model_max", "padding_side", "truncation_side")):
            _tokenized(f"tokenizer.{name}", {name: value})


def tried(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the user's for the tokenizers that it calls; None if it fails.

    Its questions count only if it did.
    """
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        return None
    asked, times, before, made = len(ORACLE.asked), dict(ORACLE.times), dict(TOKENIZED), None
    try:
        made = function(*args, **kwargs)
    except Exception:
        pass
    if before == TOKENIZED:
        del ORACLE.asked[asked:]
        ORACLE.times = times
    return made


def _cut(function: Any, batched: bool, **kwargs: Any) -> int | None:
    """The length to which a function cuts rows of tokens; None if longer rows stay longer."""
    found = set()
    for tokens in _LONG:
        row = {name: [0] * tokens for name in ("input_ids", "attention_mask")}
        given = {name: [value] for name, value in row.items()} if batched else row
        made = tried(function, given, **kwargs)
        rows = made.get("input_ids") if isinstance(made, dict) else None
        rows = rows if batched else [rows]
        if not rows or not isinstance(rows, list) or not all(isinstance(r, list) for r in rows):
            return None
        found.add(max(map(len, rows)))
    return found.pop() if len(found) == 1 else None


def _mapped(self: Any, args: Any, kwargs: Any) -> None:
    function = args[0] if args else kwargs.get("function", kwargs.get("transform"))
    rows = [Unknown("row"), Unknown("index")][: 2 if kwargs.get("with_indices") else 1]
    given, before = kwargs.get("fn_kwargs") or {}, dict(TOKENIZED)
    tried(function, *rows, **given)
    if before == TOKENIZED and (tokens := _cut(function, kwargs.get("batched") is True, **given)):
        _tokenized("datasets.map", {"max_length": tokens})


CALLS.update(dict.fromkeys(("map", "filter", "with_transform", "set_transform"), _mapped))


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
