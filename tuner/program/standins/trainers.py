"""Trainers, loops of one's own, and the calls that matter to every training after them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

from tuner.program.standins import record, unknown
from tuner.program.standins.configs import Config, as_now, config
from tuner.program.standins.datasets import CURRENT, DataLoader, Holder, named, tokenized
from tuner.program.standins.models import LAST_CALLED, Model, model_class, passes, wraps
from tuner.program.standins.unknown import CALLS, CLASSES, Note, Thing, Unknown, put, thing, where

_EARLY = "per_device_train_batch_size max_length packing padding_free max_prompt_length"
"""Arguments that a trainer reads when it is made, and no more after that."""
_BUILT = ("bf16", "fp16", "gradient_checkpointing")
"""Arguments that only their construction reads; the last one in transformers 5.23 and later."""
_UNSLOTH = ("UnslothTrainer", "UnslothVisionTrainer")
_accelerators: list[Any] = []
_SPECIAL: list[Note] = []  # calls that matter to every training after them


def _with(function: Any, value: Any) -> Any:
    """The result of a function, which gets the value if it takes one."""
    return function(*[value][: getattr(getattr(function, "__code__", None), "co_argcount", 0)])


class Trainer(Holder):
    """A trainer: `train()` and `fit()` are recorded with everything as it is then."""

    _path = "Thing"
    __call__ = Unknown.__call__

    @unknown.Signed  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        held, build = self.__dict__, self._note.given.get("model_init")
        if isinstance(held.get("model"), str):
            loaded = model_class("transformers.AutoModelForCausalLM").from_pretrained
            held["model"] = loaded(held["model"])
        elif held.get("model") is None and callable(build):
            held["model"] = _with(build, Unknown("trial"))
        if held.get("args") is None and "lightning" not in self._path.split(".")[0]:
            kinds = [self._path.replace("Trainer", k) for k in ("Config", "TrainingArguments")]
            known = [each for each in kinds if each in CLASSES and each != "transformers.Config"]
            held["args"] = config([*known, "transformers.TrainingArguments"][0])(output_dir="out")
        held["model_wrapped"] = held.get("model")
        if isinstance(own := held.get("args"), Config) and "output_dir" in own._fields:
            put(self, "_train_batch_size", own.train_batch_size)
        if (lora := self._note.given.get("peft_config")) is not None:
            self._note.given["peft_config"] = as_now(lora)
            own, is_trl = held.get("model"), self._path.startswith("trl.")
            if is_trl and isinstance(own, Model) and own.wraps_adapters():
                release = str(importlib.import_module("trl").__version__)
                if release[:2] != "0." and not own._path.startswith("unsloth"):
                    raise ValueError("the model has adapters already: leave out peft_config")
        self._note.extra["early"] = record.described(held.get("args"))
        self._note.assigned.clear()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return self._trained("train", args, kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        given = self._note.given
        scaling = getattr(given.get("scaling_config"), "_note", Note("", None)).given
        if self._path[:4] == "ray." and scaling.get("num_workers", 1) == 1:  # in this process
            loop = given.get("train_loop_per_worker", given.get("0"))
            return _with(loop, given.get("train_loop_config", {}))
        return self._trained("fit", args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        for held in (self._note.extra, *self._note.extra.get("trainings", ())):
            held["evaluates"] = True
        return Unknown("evaluate()")

    predict = evaluate

    def _trained(self, name: str, args: Any, kwargs: Any) -> Any:
        if len(record.TRAININGS) < 64:
            record.TRAININGS.append(self._snapshot(name, args, kwargs))
            model = self.__dict__.get("model")
            for each in (self, model) if isinstance(model, Model) else (self,):
                each._note.extra.setdefault("trainings", []).append(record.TRAININGS[-1])
        return Unknown(f"{name}()")

    def _arguments(self, arguments: Any) -> Any:
        """The arguments as they are, but for those that only the making of the trainer reads."""
        now, early = record.described(arguments), self._note.extra.get("early")
        if all(isinstance(each, dict) and "values" in each for each in (now, early)):
            for name in set(_EARLY.split()) & early["values"].keys():
                for part in ("values", "assigned"):
                    now[part].pop(name, None)
                    if name in early[part]:
                        now[part][name] = early[part][name]
        if isinstance(arguments, Config) and "output_dir" in arguments._fields:
            built = arguments._note.extra["built"]
            is_new = "activation_checkpointing" in arguments._fields
            for name in built.keys() & (_BUILT if is_new else _BUILT[:2]):
                now["values"][name] = record.plain(built[name])
                now["assigned"].pop(name, None)
            # A class of the program's own may make other sizes of them.
            read = {"train": self._train_batch_size, "eval": arguments.eval_batch_size}
            for kind, value in read.items():
                name, size = f"per_device_{kind}_batch_size", record.plain(value)
                if now["values"].get(name, size) != size:
                    now["values"][name] = size
                    now["assigned"][name] = [size, self._note.where]
        return now

    def add_callback(self, callback: Any) -> None:
        self._note.extra.setdefault("callbacks", []).append(callback)

    def _begin(self, arguments: Any, model: Any) -> None:
        """Calls what the program's own callbacks do before the first step."""
        given, added = self._note.given.get("callbacks"), self._note.extra.get("callbacks", ())
        calls = model._note.calls if isinstance(model, Model) else []
        before = len(calls)
        for each in (*(given if isinstance(given, (list, tuple)) else ()), *added):
            callback = each() if isinstance(each, type) else each
            for name in ("on_init_end", "on_train_begin"):
                own = getattr(type(callback), name, None)
                if isinstance(own, types.FunctionType):
                    with contextlib.suppress(Exception):
                        own(callback, arguments, Unknown("state"), Unknown("control"), model=model)
        is_off = any(each.path.endswith("checkpointing_disable") for each in calls[before:])
        if is_off and isinstance(arguments, Config):  # by which the trainer had turned it on
            names = {"gradient_checkpointing", "activation_checkpointing"}
            for name in names & {*arguments._fields}:
                setattr(arguments, name, False)
                arguments._note.extra.get("built", {})[name] = False

    def _snapshot(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        given, held, extra = self._note.given, self.__dict__, self._note.extra
        arguments, model, text = held.get("args"), held.get("model"), given.get("model")
        if name == "fit" and args:
            model = args[0]
        of_model = model._note if isinstance(model, Model) else Note("", None)
        lora = given.get("peft_config")
        stubs = frozenset(map(id, (arguments, model, lora))) - {id(None)}
        rows = tokenized(*map(given.get, ("train_dataset", "data_collator", "eval_dataset")))
        self._begin(arguments, model)
        calls = [*_SPECIAL, *rows, *self._note.calls, *of_model.calls]
        when = getattr(arguments, "eval_strategy", None)
        return {
            "trainer": record.told(self, stubs),
            "arguments": self._arguments(arguments),
            "model": record.plain(text) if isinstance(text, str) else record.told_model(model),
            "reference": record.told_model(given.get("ref_model")),
            "lora": record.described(of_model.extra.get("adapted") if lora is None else lora),
            "compiled": record.described(of_model.extra.get("compiled")),
            "evaluates": "evaluates" in extra or (type(when) is str and when in ("steps", "epoch")),
            "calls": [record.called(each) for each in calls],
            "loader": _loader([*args, *kwargs.values()], stubs),
        }


def _loader(holders: list[Any], stubs: frozenset[int]) -> Any:
    """The loader of a Lightning module or data module, asked for it."""
    for holder in [each for each in holders if isinstance(each, Thing)]:
        own = getattr(type(holder), "train_dataloader", None)
        if callable(own) and not isinstance(own, Unknown):
            try:
                return record.plain(own(holder), stubs)
            except Exception as error:
                return record.unknown(f"train_dataloader(): {error}")
    return None


def special(path: str) -> Any:
    """A call that matters to the memory of every training after it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        _SPECIAL.append(record.call(path, args, kwargs))
        return Unknown(f"{path}(...)")

    return noted


class Autocast(Thing):
    """`torch.autocast`: it matters to the trainings inside."""

    _path = "torch.autocast"

    def __enter__(self) -> Any:
        _SPECIAL.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _SPECIAL.remove(self._note)

    def __call__(self, function: Any, *args: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


def trainer_class(path: str) -> Any:
    """A trainer; those of Hugging Face's libraries derive from each other."""
    root, _, last = path.partition(".")
    above = "trl.SFTTrainer" if root == "unsloth" else "transformers.Trainer"
    derives = root in ("transformers", "trl", "sentence_transformers") or last in _UNSLOTH
    return thing(path, trainer_class(above) if derives and path != above else Trainer)


class LightningModule(Thing):
    """A module of Lightning's: `save_hyperparameters()` keeps what its `__init__` got."""

    _path = "lightning.LightningModule"

    def save_hyperparameters(self, *names: Any, **kwargs: Any) -> None:
        held = sys._getframe(1).f_locals
        values = {k: v for k, v in held.items() if k not in ("self", "__class__", "args", "kwargs")}
        values.update(held.get("kwargs") or {})
        chosen = [name for name in names if isinstance(name, str) and name in values] or values
        self.__dict__["hparams"] = Parameters({name: values[name] for name in chosen})


class Parameters(dict[str, Any]):
    __setattr__ = dict.__setitem__

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name] if name[:2] != "__" else super().__getattribute__(name)
        except KeyError:
            raise AttributeError(name) from None


class Tracked(Parameters):
    """`wandb.config`: what the program gives it; the rest is unknown."""

    def __missing__(self, name: str) -> Any:
        return Unknown(f"wandb.config.{name}")

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def update(self, given: Any = None, **options: Any) -> None:  # type: ignore[override]
        given = vars(given) if type(given).__name__ == "Namespace" else given
        if isinstance(given, Mapping):
            self.pop("**", None)
            super().update(given)
        else:
            super().update({name: Unknown(f"wandb.config.{name}") for name in (*self, "**")})


def start_wandb(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """`wandb.init`, whose configuration holds outside of a sweep."""
    module, run = importlib.import_module("wandb"), Unknown("wandb.run")
    put(run, "config", module.config)
    if config is not None and isinstance(module.config, Tracked):
        module.config.update(config)
    module.__dict__["run"] = run
    return run


def sweep_wandb(sweep_id: Any = None, function: Any = None, *args: Any, **kwargs: Any) -> None:
    """`wandb.agent`: a sweep may set any value."""
    importlib.import_module("wandb").__dict__["config"] = Unknown("wandb.config")
    runs()(function)


_MOST_STEPS = 128  # of a loop without a loader, which may be endless


def _loop() -> dict[str, Any]:
    loader = CURRENT[0] if CURRENT else None
    if id(loader) not in record.LOOPS:
        model = LAST_CALLED[0] if LAST_CALLED else None
        record.LOOPS[id(loader)] = {
            **{"where": where(), "backwards": 0, "steps": 0, "is_split": False, "rounds": []},
            "batch": None if loader is None else {"$object": record.told(loader)},
            "model": record.told_model(model),
            "accelerator": record.told(_accelerators[-1]) if _accelerators else None,
        }
    return record.LOOPS[id(loader)]


def backward(self: Any = None, *args: Any, **kwargs: Any) -> None:
    loop = _loop()
    loop["backwards"] += 1
    loop["is_split"] |= CURRENT[1:] == [1]
    CURRENT[1:2] = [1] * len(CURRENT[1:])


def step(self: Any, args: Any = (), kwargs: Any = None) -> None:
    """`optimizer.step()`, `scaler.step(optimizer)`; a schedule's or a profiler's counts nothing."""
    optimizer = args[0] if args else self
    what = (
        optimizer._what.lower().replace("optim.lr_", "") if isinstance(optimizer, Unknown) else ""
    )
    if "optim" in what.split("sched")[0]:
        loop = _loop()
        CURRENT[1:2] = [0] * len(CURRENT[1:])
        if all(each.sync_gradients for each in _accelerators):
            loop["steps"] += 1
            passes = loop["backwards"] - sum(loop["rounds"])
            loop["rounds"] += [passes] if passes else []
        if loop["batch"] is None and loop["steps"] >= _MOST_STEPS:
            raise SystemExit


CALLS.update(backward=backward, step=step)


class Optimizer(Thing):
    _path = "torch.optim.Optimizer"

    def step(self, *args: Any, **kwargs: Any) -> Any:
        step(self)


class Accelerator(Holder):
    """`Accelerator` and Lightning's `Fabric`: what is prepared is what was given."""

    _path = "accelerate.Accelerator"
    backward, unwrap_model = backward, staticmethod(passes)

    is_main_process = is_local_main_process = is_last_process = is_global_zero = True
    process_index = local_process_index = global_rank = local_rank = 0
    num_processes = world_size = property(lambda self: int(os.environ.get("WORLD_SIZE", "1")))
    gradient_accumulation_steps, mixed_precision = 1, "no"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _accelerators.append(self)

    def prepare(self, *values: Any, **kwargs: Any) -> Any:
        return values[0] if len(values) == 1 else values

    prepare_model = prepare_data_loader = prepare_optimizer = prepare
    setup = setup_module = setup_optimizers = setup_dataloaders = prepare

    def accumulate(self, *models: Any) -> Any:
        """In its context, all but every nth `optimizer.step()` do nothing."""
        self.__dict__["accumulates"] = True
        return Unknown("accumulate()")

    @property
    def sync_gradients(self) -> bool:
        every = self.gradient_accumulation_steps if "accumulates" in vars(self) else 1
        return not isinstance(every, int) or bool(_loop()["backwards"] % max(every, 1) == 0)


class Engine(Holder):
    _path = "deepspeed.DeepSpeedEngine"
    backward = backward

    def step(self, *args: Any, **kwargs: Any) -> None:
        step(self.optimizer)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`."""
    given = named("args model optimizer model_parameters training_data", args, kwargs)
    optimizer = given.get("optimizer")
    if optimizer is None:
        optimizer = thing("deepspeed.optim.Optimizer", Optimizer)()
    wraps("deepspeed.initialize")(**given)
    LAST_CALLED[:] = [given.get("model", Unknown("model"))]
    engine = Engine(module=LAST_CALLED[0], optimizer=optimizer)
    return engine, optimizer, DataLoader(given.get("training_data")), Unknown("scheduler")


def finds_batch(function: Any = None, starting_batch_size: int = 128, *_: Any, **__: Any) -> Any:
    """`find_executable_batch_size`: only a run finds it."""
    size = Unknown(f"what find_executable_batch_size finds, {starting_batch_size} or less")
    how = functools.partial(finds_batch, starting_batch_size=starting_batch_size)
    return functools.partial(function, size) if callable(function) else how


def runs(*first: Any) -> Any:
    """A launcher that runs a function of the user's, given at a place or by its name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = named("function args", args, kwargs)
        function, more = given.get("function", given.get("fn")), given.get("args")
        more = more if isinstance(more, tuple) else ()
        return function(*first, *more) if callable(function) else None

    return run
