"""Trainers, loops of one's own, and what stands around a training."""

from __future__ import annotations

import sys
from typing import Any

from tuner.program.standins.configs import as_now, config
from tuner.program.standins.data import TOKENIZED, tried
from tuner.program.standins.models import Model, model_class
from tuner.program.standins.record import (
    TRAININGS,
    call,
    called,
    described,
    plain,
    told,
    told_model,
    unknown,
)
from tuner.program.standins.unknown import CLASSES, Note, Thing, Unknown, put, thing

_SPECIAL: list[Note] = []  # calls that matter to every training after them


_EARLY = set(
    "per_device_train_batch_size max_length packing padding_free max_prompt_length".split()
)
"""Arguments that a trainer reads when it is made, and no more after that."""


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
            takes = getattr(getattr(given["model_init"], "__code__", None), "co_argcount", 0)
            put(self, "model", given["model_init"](*[Unknown("trial")] * min(takes, 1)))
        if given.get("args") is None and not self._fits():
            put(self, "args", _arguments_of(self._path))
        self.model_wrapped = self.__dict__.get("model")
        if "peft_config" in given:
            given["peft_config"] = as_now(given["peft_config"])
        self._note.extra["early"] = described(self.__dict__.get("args"))
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

    def hyperparameter_search(self, hp_space: Any = None, *args: Any, **kwargs: Any) -> Any:
        space = hp_space(Unknown("trial")) if callable(hp_space) else {}
        for name in space if isinstance(space, dict) else ():
            setattr(self.args, name, Unknown(f"hyperparameter_search: {name}"))
        return self._trained("hyperparameter_search", args, kwargs)

    def add_callback(self, callback: Any) -> None:
        self._note.extra.setdefault("callbacks", []).append(callback)

    def _trained(self, name: str, args: Any, kwargs: Any) -> Any:
        if callable(loop := self._note.given.get("train_loop_per_worker")):  # Ray Train
            config = self._note.given.get("train_loop_config")
            return loop() if config is None else loop(config)
        if len(TRAININGS) < 64:
            training = self._snapshot(name, args, kwargs)
            TRAININGS.append(training)
            model = self.__dict__.get("model")
            for held in (self, model) if isinstance(model, Model) else (self,):
                held._note.extra.setdefault("trainings", []).append(training)
        return Unknown(f"{name}()")

    def _arguments(self, arguments: Any) -> Any:
        """The arguments as they are, but for those that only the making of the trainer reads."""
        now, early = described(arguments), self._note.extra.get("early")
        if (
            isinstance(now, dict)
            and isinstance(early, dict)
            and "values" in now
            and "values" in early
        ):
            for name in _EARLY & early["values"].keys():
                for part in ("values", "assigned"):
                    now[part].pop(name, None)
                    if name in early[part]:
                        now[part][name] = early[part][name]
            for name, value in arguments._note.extra.get("fixed", {}).items():
                now["values"][name] = plain(value)
                now["assigned"].pop(name, None)
        return now

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
        tried(given.get("data_collator"), [Unknown("row")])
        calls = [*_SPECIAL, *TOKENIZED.values(), *self._note.calls]
        if isinstance(model, Model):
            calls += model._note.calls
        callbacks = [*(given.get("callbacks") or ()), *self._note.extra.get("callbacks", ())]
        held_eval = getattr(arguments, "eval_strategy", None)
        return {
            "trainer": told(self, stubs),
            "arguments": self._arguments(arguments),
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


def fit(model: Any, *args: Any, **kwargs: Any) -> None:
    """`SentenceTransformer.fit`, which needs no trainer."""
    note = call("sentence_transformers.SentenceTransformer.fit", args, kwargs)
    empty = dict.fromkeys(("arguments", "reference", "lora", "compiled"))
    calls = [called(each) for each in (*_SPECIAL, *model._note.calls)]
    told = {"trainer": called(note), "model": told_model(model), "calls": calls}
    TRAININGS.append({**empty, **told, "callbacks": [], "evaluates": "evaluator" in kwargs})


def _arguments_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    own = f"{module}.{name.replace('Trainer', 'Config')}"
    if own not in CLASSES or name == "Trainer":
        own = f"{module}.{name.replace('Trainer', 'TrainingArguments')}"
    return config(own if own in CLASSES else "transformers.TrainingArguments")(output_dir="out")


def special(path: str) -> Any:
    """A call that matters to the memory of every training after it."""

    def record(*args: Any, **kwargs: Any) -> Any:
        _SPECIAL.append(call(path, args, kwargs))
        return Unknown(f"{path}(...)")

    return record


def trainer_class(path: str) -> Any:
    """A trainer; those of Hugging Face's libraries derive from each other."""
    root, first = path.partition(".")[0], "transformers.Trainer"
    if path in ("unsloth.UnslothTrainer", "unsloth.UnslothVisionTrainer"):
        first = "trl.SFTTrainer"
    elif root not in ("transformers", "trl", "sentence_transformers") or path == first:
        return thing(path, Trainer)
    return thing(path, trainer_class(first))


class LightningModule(Thing):
    """A module of Lightning's: `save_hyperparameters()` keeps what its `__init__` got."""

    __slots__ = ()
    _path = "lightning.LightningModule"

    def save_hyperparameters(self, *names: Any, **kwargs: Any) -> None:
        held = sys._getframe(1).f_locals
        values = {k: v for k, v in held.items() if k not in ("self", "__class__", "args", "kwargs")}
        values.update(held.get("kwargs") or {})
        chosen = [name for name in names if isinstance(name, str)]
        put(self, "hparams", Parameters({k: values[k] for k in chosen or values if k in values}))


class Parameters(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(name)
        return self[name]
