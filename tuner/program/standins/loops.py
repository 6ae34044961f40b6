"""Loops of one's own: the loader that gives batches while `.backward()` is called."""

from __future__ import annotations

import types
from typing import Any

from tuner.program.standins.data import CURRENT, DataLoader
from tuner.program.standins.models import LAST_CALLED, Model
from tuner.program.standins.record import LOOPS, call, called, told, told_model
from tuner.program.standins.unknown import CALLS, Note, Thing, Unknown, put, thing, where

_accelerators: list[Any] = []


def _loop() -> dict[str, Any]:
    loader = CURRENT[0] if CURRENT else None
    loop = LOOPS.get(id(loader))
    if loop is None:
        model = LAST_CALLED[0] if LAST_CALLED else None
        loop = LOOPS[id(loader)] = {
            "where": where(),
            "batch": None if loader is None else {"$object": told(loader)},
            "backwards": 0,
            "steps": 0,
            "optimizer": None,
            "model": told_model(model),
            "accelerator": told(_accelerators[-1]) if _accelerators else None,
            "calls": list(map(called, model._note.calls)) if isinstance(model, Model) else [],
            "compiled": isinstance(model, Model) and "compiled" in model._note.extra,
        }
    return loop


def backward(self: Any = None, args: Any = (), kwargs: Any = None) -> None:
    _loop()["backwards"] += 1


def step(self: Any, args: Any = (), kwargs: Any = None) -> None:
    """`optimizer.step()`, `scaler.step(optimizer)`; a schedule's or a profiler's counts nothing."""
    optimizer = args[0] if args else self
    if isinstance(optimizer, Unknown) and "optim" in optimizer._what.lower().split("sched")[0]:
        loop = _loop()
        loop["steps"] += all(each.sync_gradients for each in _accelerators)
        if loop["optimizer"] is None and isinstance(optimizer._note, Note):
            loop["optimizer"] = told(optimizer)


CALLS.update(backward=backward, step=step)


class Optimizer(Thing):
    __slots__ = ()
    _path = "torch.optim.Optimizer"

    def step(self, *args: Any, **kwargs: Any) -> Any:
        step(self)

    @property
    def param_groups(self) -> Any:
        return [{"lr": self._note.given.get("lr"), "params": self._note.given.get("params")}]


class Accelerator(Thing):
    """`Accelerator` and Lightning's `Fabric`: what is prepared is what was given."""

    __slots__ = ()
    _path = "accelerate.Accelerator"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        _accelerators.append(self)
        known: dict[str, Any] = dict.fromkeys(
            ("is_main_process", "is_local_main_process", "is_last_process", "is_global_zero"), True
        )
        known |= {"num_processes": 1, "process_index": 0, "local_process_index": 0}
        known |= {"world_size": 1, "global_rank": 0, "local_rank": 0, "mixed_precision": "no"}
        for name, value in {"gradient_accumulation_steps": 1, **known, **self._note.given}.items():
            put(self, name, value)

    def prepare(self, *values: Any, **kwargs: Any) -> Any:
        return values[0] if len(values) == 1 else values

    prepare_model = prepare_data_loader = prepare_optimizer = prepare
    setup = setup_module = setup_optimizers = setup_dataloaders = prepare

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model

    def backward(self, loss: Any = None, **kwargs: Any) -> None:
        backward()

    def accumulate(self, *models: Any) -> Any:
        """In its context, all but every nth `optimizer.step()` do nothing."""
        self.__dict__["accumulates"] = True
        return Unknown("accumulate()")

    @property
    def sync_gradients(self) -> bool:
        every = self.__dict__["gradient_accumulation_steps"] if "accumulates" in vars(self) else 1
        return not isinstance(every, int) or _loop()["backwards"] % max(every, 1) == 0


class Engine(Thing):
    """DeepSpeed's engine."""

    __slots__ = ()
    _path = "deepspeed.DeepSpeedEngine"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LAST_CALLED[:] = [self.module]
        return Unknown("engine(...)")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        backward()

    def step(self, *args: Any, **kwargs: Any) -> None:
        step(self.optimizer)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`."""
    names = "args model optimizer model_parameters training_data".split()
    given = {**dict(zip(names, args)), **kwargs}
    engine, model = Engine(), given.get("model", Unknown("model"))
    put(engine, "module", model)
    made = given.get("optimizer")
    put(
        engine,
        "optimizer",
        thing("deepspeed.optim.Optimizer", Optimizer)() if made is None else made,
    )
    if isinstance(getattr(model, "_note", None), Note):
        model._note.calls.append(call("deepspeed.initialize", (), given))
    return engine, engine.optimizer, DataLoader(given.get("training_data")), Unknown("scheduler")


def find_executable_batch_size(*args: Any, **kwargs: Any) -> Any:
    """Calls the function with the size that it begins with."""

    def decorated(function: Any) -> Any:
        size = kwargs.get("starting_batch_size", 128)
        return lambda *args, **kwargs: function(size, *args, **kwargs)

    return decorated(args[0]) if args and isinstance(args[0], types.FunctionType) else decorated


def runs(*names: str, first: Any = ()) -> Any:
    """A launcher that runs a function of the user's, given at a place or by one of these names."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("function", "args"), args)), **kwargs}
        function = next((given[name] for name in names if callable(given.get(name))), None)
        more = given.get("args", ())
        more = more if isinstance(more, tuple) else ()
        return None if function is None else function(*first, *more)

    return run
