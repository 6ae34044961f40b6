"""Trainers, loops of one's own, and what stands around a training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.program.standins.configs import config
from tuner.program.standins.models import LAST_CALLED, Model, described, model_class
from tuner.program.standins.record import LOOPS, TRAININGS, call, called, plain, told, unknown
from tuner.program.standins.unknown import (
    CALLS,
    CLASSES,
    ORACLE,
    Note,
    Thing,
    Unknown,
    put,
    thing,
    where,
)

ROWS = 64  # batches that a loader has where nothing tells
_SPECIAL: list[Note] = []  # calls that matter to every training after them


class Trainer(Thing):
    """A trainer: `train()` and `fit()` are recorded with everything as it is then."""

    __slots__ = ()
    _path = "Thing"
    __call__ = Unknown.__call__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        note = self._note
        note.take(args, kwargs)
        given = note.given
        for name, value in given.items():
            if not name.isdigit():
                put(self, name, value)
        if isinstance(given.get("model"), str):
            made = model_class("transformers.AutoModelForCausalLM")
            put(self, "model", made.from_pretrained(given["model"]))
        elif given.get("model") is None and callable(given.get("model_init")):
            put(self, "model", given["model_init"]())
        if given.get("args") is None and not self._fits():
            put(self, "args", _arguments_of(self._path))
        self.model_wrapped = self.__dict__.get("model")
        self._note.assigned.clear()

    def _fits(self) -> bool:
        return "lightning" in self._path.split(".")[0]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return self._trained("train", args, kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return self._trained("fit", args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._note.extra["evaluates"] = True
        for training in self._note.extra.get("trainings", ()):
            training["evaluates"] = True
        return Unknown("evaluate()")

    predict = evaluate

    def add_callback(self, callback: Any) -> None:
        self._note.extra.setdefault("callbacks", []).append(callback)

    def _trained(self, name: str, args: Any, kwargs: Any) -> Any:
        if len(TRAININGS) < 64:
            training = self._snapshot(name, args, kwargs)
            TRAININGS.append(training)
            self._note.extra.setdefault("trainings", []).append(training)
        return Unknown(f"{name}()")

    def _snapshot(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        given, held = self._note.given, self.__dict__
        arguments, model = held.get("args"), held.get("model")
        fit = call(f"{self._path}.{name}", args, kwargs)
        if name == "fit" and args:
            fit.given = {**dict(zip(("model", "train_dataloaders"), args)), **kwargs}
            model = args[0]
        lora = given.get("peft_config")
        adapted = model._note.extra.get("adapted") if isinstance(model, Model) else None
        stubs = frozenset(map(id, (arguments, model, lora))) - {id(None)}
        text = isinstance(given.get("model"), str)
        compiled = model._note.extra.get("compiled") if isinstance(model, Model) else None
        calls = [*_SPECIAL, *self._note.calls]
        if isinstance(model, Model):
            calls += model._note.calls
        callbacks = [*(given.get("callbacks") or ()), *self._note.extra.get("callbacks", ())]
        held_eval = getattr(arguments, "eval_strategy", None)
        return {
            "trainer": told(self, stubs),
            "arguments": described(arguments) if arguments is not None else None,
            "model": given["model"] if text else told_model(model),
            "reference": told_model(given.get("ref_model")),
            "lora": described(lora if lora is not None else adapted),
            "compiled": called(compiled) if compiled is not None else None,
            "evaluates": bool(self._note.extra.get("evaluates"))
            or (isinstance(held_eval, str) and held_eval in ("steps", "epoch")),
            "calls": [called(each) for each in calls],
            "callbacks": [plain(each) for each in callbacks],
            "train": {**called(fit, stubs), "data": _data(args, kwargs, stubs)},
        }


def _data(args: Any, kwargs: Any, stubs: frozenset[int]) -> Any:
    """The loader and the optimizer of a Lightning module or data module, asked for them."""
    found: dict[str, Any] = {}
    for holder in (*args, *kwargs.values()):
        for name in ("train_dataloader", "configure_optimizers"):
            method = getattr(type(holder), name, None)
            if isinstance(holder, Thing) and callable(method) and not isinstance(method, Unknown):
                try:
                    found[name] = plain(getattr(holder, name)(), stubs)
                except Exception as error:
                    found[name] = unknown(f"{name}(): {error}")
    return found


def told_model(model: Any) -> Any:
    if isinstance(model, Model):
        return model._told()
    return plain(model)


def _arguments_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    own = f"{module}.{name.replace('Trainer', 'Config')}"
    if own not in CLASSES or name == "Trainer":
        own = f"{module}.{name.replace('Trainer', 'TrainingArguments')}"
    return config(own if own in CLASSES else "transformers.TrainingArguments")(output_dir="out")


def passes(trainer: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A wrapper that returns the trainer that it gets."""
    if isinstance(getattr(trainer, "_note", None), Note):
        trainer._note.calls.append(call("unsloth.train_on_responses_only", (), kwargs))
    return trainer


# -- loops of one's own ---------------------------------------------------------------------------
_loader: list[Any] = []  # the loader that gave the last batch
_accelerators: list[Any] = []


class DataLoader(Thing):
    __slots__ = ()
    _path = "torch.utils.data.DataLoader"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        for name, value in self._note.given.items():
            put(self, name, value)

    def _batches(self) -> int | None:
        rows = self._note.given.get("dataset")
        size = self._note.given.get("batch_size", 1)
        known = isinstance(rows, (list, tuple)) or "rows" in _extra(rows)
        if known and isinstance(size, int) and size > 0:
            return -(-len(rows) // size)
        return None

    def __len__(self) -> int:
        known = self._batches()
        return ORACLE.number("length of the DataLoader") if known is None else known

    def __iter__(self) -> Iterator[Any]:
        known = self._batches()
        for index in range(min(known, 4 * ROWS) if known is not None else ROWS):
            _loader[:] = [self]
            yield Unknown(f"batch[{index}]")


def _extra(value: Any) -> dict[str, Any]:
    note = getattr(value, "_note", None)
    return note.extra if isinstance(note, Note) else {}


def _loop() -> dict[str, Any]:
    loader = _loader[0] if _loader else None
    frame_at = where()
    key = id(loader)
    if key not in LOOPS:
        LOOPS[key] = {
            "where": frame_at,
            "batch": None if loader is None else {"$object": told(loader)},
            "backwards": 0,
            "steps": 0,
            "optimizer": None,
            "accelerator": told(_accelerators[-1]) if _accelerators else None,
            "model": None,
        }
        model = LAST_CALLED[0] if LAST_CALLED else None
        LOOPS[key]["model"] = told_model(model)
        if isinstance(model, Model):
            LOOPS[key]["calls"] = [called(each) for each in model._note.calls]
    return LOOPS[key]


def backward(self: Any = None, args: Any = (), kwargs: Any = None) -> None:
    _loop()["backwards"] += 1


def step(self: Any, args: Any = (), kwargs: Any = None) -> None:
    optimizer = args[0] if args else self
    what = getattr(optimizer, "_what", "")
    if "sched" in what.lower() or "profil" in what.lower():
        return
    if not args and "optim" not in what.lower() and "engine" not in what.lower():
        return
    loop = _loop()
    loop["steps"] += 1
    if loop["optimizer"] is None and isinstance(getattr(optimizer, "_note", None), Note):
        loop["optimizer"] = told(optimizer)


CALLS["backward"] = backward
CALLS["step"] = step


class Optimizer(Thing):
    __slots__ = ()
    _path = "torch.optim.Optimizer"

    def step(self, *args: Any, **kwargs: Any) -> Any:
        step(self)

    @property
    def param_groups(self) -> Any:
        return [{"lr": self._note.given.get("lr"), "params": self._note.given.get("params")}]


class Accelerator(Thing):
    __slots__ = ()
    _path = "accelerate.Accelerator"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        _accelerators.append(self)
        accumulation = self._note.given.get("gradient_accumulation_steps", 1)
        put(self, "gradient_accumulation_steps", accumulation)
        for name in ("is_main_process", "is_local_main_process", "is_last_process"):
            put(self, name, True)
        put(self, "num_processes", 1)
        put(self, "process_index", 0)
        put(self, "local_process_index", 0)
        put(self, "mixed_precision", self._note.given.get("mixed_precision") or "no")

    def prepare(self, *values: Any, **kwargs: Any) -> Any:
        return values[0] if len(values) == 1 else values

    prepare_model = prepare_data_loader = prepare_optimizer = prepare

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model

    def backward(self, loss: Any = None, **kwargs: Any) -> None:
        backward()

    @property
    def sync_gradients(self) -> bool:
        every = self.__dict__["gradient_accumulation_steps"]
        return not isinstance(every, int) or _loop()["backwards"] % max(every, 1) == 0


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`: the engine is the model."""
    model = kwargs.get("model", args[1] if args[1:] else None)
    optimizer = kwargs.get("optimizer") or Optimizer()
    if isinstance(model, Thing):
        model._note.calls.append(call("deepspeed.initialize", (), kwargs))
        put(model, "backward", lambda *a, **k: backward())
        put(model, "step", lambda *a, **k: step(optimizer))
    return model, optimizer, Unknown("loader"), Unknown("scheduler")


def special(path: str) -> Any:
    """A call that matters to the memory of every training after it."""

    def record(*args: Any, **kwargs: Any) -> Any:
        _SPECIAL.append(call(path, args, kwargs))
        return Unknown(f"{path}(...)")

    return record


# -- data ------------------------------------------------------------------------------------------
class Dataset(Thing):
    """A dataset of `datasets`; one that was made of the program's own rows knows its length."""

    __slots__ = ()
    _path = "datasets.Dataset"

    @classmethod
    def _of(cls, rows: Any, how: str) -> Any:
        made = cls.__new__(cls)
        put(made, "_note", Note(f"datasets.Dataset.{how}", where()))
        if isinstance(rows, dict):
            columns = list(rows.values())
            rows = [dict(zip(rows, row)) for row in zip(*columns)]
        made._note.extra["rows"] = rows
        return made

    @classmethod
    def from_list(cls, mapping: Any = (), *args: Any, **kwargs: Any) -> Any:
        return cls._of(mapping, "from_list") if isinstance(mapping, list) else cls()

    @classmethod
    def from_dict(cls, mapping: Any = None, *args: Any, **kwargs: Any) -> Any:
        known = isinstance(mapping, dict) and all(
            isinstance(each, (list, tuple)) for each in mapping.values()
        )
        return cls._of(mapping, "from_dict") if known else cls()

    def __len__(self) -> int:
        rows = self._note.extra.get("rows")
        return ORACLE.number(f"length of {self._what}") if rows is None else len(rows)

    def __iter__(self) -> Iterator[Any]:
        rows = self._note.extra.get("rows")
        return super().__iter__() if rows is None else iter(rows)

    def __getitem__(self, key: Any) -> Any:
        rows = self._note.extra.get("rows")
        if rows is not None and isinstance(key, int):
            return rows[key]
        if rows is not None and isinstance(key, str):
            return [row[key] for row in rows]
        return super().__getitem__(key)

    def select(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self._note.extra.get("rows")
        if isinstance(indices, range) and (rows is None or len(rows) >= len(indices)):
            return self._of([Unknown(f"row[{i}]") for i in indices], "select")
        return Dataset()

    def map(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._note.extra.get("rows")
        if rows is None or kwargs.get("batched"):
            return Dataset()
        return self._of([Unknown(f"row[{i}]") for i in range(len(rows))], "map")

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        return self

    rename_column = rename_columns = remove_columns = shuffle
    with_format = cast_column = add_column = flatten_indices = shuffle


def trainer_class(path: str) -> Any:
    """A trainer; those of Hugging Face's libraries derive from each other."""
    root, first = path.partition(".")[0], "transformers.Trainer"
    if path in ("unsloth.UnslothTrainer", "unsloth.UnslothVisionTrainer"):
        first = "trl.SFTTrainer"
    elif root not in ("transformers", "trl", "sentence_transformers") or path == first:
        return thing(path, Trainer)
    return thing(path, trainer_class(first))
