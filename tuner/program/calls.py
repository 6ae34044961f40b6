"""The actions of a program beside its settings: methods and optimizers of its own, and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tuner.core.errors import Problem
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.program.arguments import (
    DTYPES,
    EMULATE,
    Argument,
    Arguments,
    Effect,
    Found,
    ProgramTraining,
    Undecided,
    decided_by,
)
from tuner.program.places import Places, Row, last, the_object

Read = Callable[[Row, Found], Arguments]
"""Reads what a call was given."""

_LENGTHS = ("max_length", "model_max_length")
"""Names of the length of examples in calls of tokenizers."""

_MERGES = ("merge_and_unload", "save_pretrained_merged")
"""Calls after the training that make weights on the GPU, which are not predicted."""

_NOT_PREDICTED = {
    "register_post_accumulate_grad_hook": "work on each gradient in the backward pass",
    "save_on_cpu": "keeping activations on the host",
    "CPUOffloadOptimizer": "an optimizer on the host",
    "OffloadActivations": "offloading of activations",
    "GaLoreAdamW": "GaLore",
    "GaLoreAdamW8bit": "GaLore",
    "APOLLOAdamW": "APOLLO",
    "Lomo": "LOMO",
    "AdaLomo": "LOMO",
}
"""Calls that change what a step keeps, whatever the trainer's settings say of it."""

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of models that change the dtype of their weights."""

_OVERRIDES = {
    "compute_loss": "",
    "training_step": "",
    "create_optimizer": "optimizer",
    "create_optimizer_and_scheduler": "optimizer",
    "get_train_dataloader": "micro_batch",
}
"""Methods of trainers that decide memory, by the parameter that says what one's own does."""


def own_methods(places: Places, trainer: Row, found: Found) -> None:
    """Methods of a trainer that the program replaces by its own."""
    what = "is the program's own, and what it takes is known only when it runs"
    for method, knob in _OVERRIDES.items():
        if method in (trainer.get("methods") or ()):
            effect: Effect = "" if knob else "adds"
            where = f"{places.at(trainer.get('where'))} {last(trainer['class'])}.{method}"
            problem = Undecided(f"{what}: {decided_by(knob)}", where, knob, effect)
            found.problems.append(problem)


def own_optimizer(trainer: Row, training: ProgramTraining) -> None:
    """`optimizers=(optimizer, None)` of a trainer is what counts, whatever `optim` says."""
    given = (trainer.get("given") or {}).get("optimizers")
    made = the_object(given[0]) if isinstance(given, list) and given else None
    if not isinstance(made, Mapping) or "class" not in made:
        return
    root, _, name = made["class"].partition(".")
    said = {**(made.get("values") or {}), **(made.get("given") or {})}
    named = [
        (len(one.recipe), label)
        for label, one in OPTIMIZERS.items()
        if (one.path.split(".")[0], one.path.rpartition(":")[2]) == (root, last(name))
        and all(bool(said.get(key)) == value for key, value in one.recipe.items())
    ]
    where = training["trainer"].where("optimizers")
    training["trainer"].taken.add("optimizers")
    if not named:
        text = f"is {made['class']}, which is not predicted: {EMULATE}"
        training.found.problems.append(Problem(text, where))
        return
    own = training["arguments"]
    values = {**own.values, "optim": Argument(max(named)[1], where.rpartition(" ")[0])}
    arguments = Arguments(own.title, values, own.found, own.defaults)
    training.groups = {**training.groups, "arguments": arguments}


def read_calls(places: Places, read: Read, row: Row, training: ProgramTraining) -> None:
    """Read calls: lengths of examples, merges, frozen weights, and others that aren't predicted."""
    found, lengths = training.found, list[Argument]()
    for call in row.get("calls") or ():
        name, at = last(call["class"]), places.at(call.get("where"))
        given = read(call, found).values
        lengths += [given[n] for n in _LENGTHS if n in given and given[n].value is not None]
        if name in _MERGES:
            found.left_out.append(f"{at} {name}")
        elif name in _NOT_PREDICTED:
            text = f"{_NOT_PREDICTED[name]} is not predicted: {EMULATE}"
            found.problems.append(Problem(text, f"{at} {name}"))
        elif name.startswith("requires_grad"):
            _freezes(f"{at} {name}", given, training)
        elif call["class"] == "parameter.data":
            text = f"weights of another dtype may take more memory: {EMULATE}"
            found.problems.append(Undecided(text, f"{at} data", "", "adds"))
        elif name == "compile":
            training.groups = {"compiled": read(call, found), **training.groups}
        elif name in _CASTS or name == "to":
            _cast(name, given, training["model"])
    training.lengths = tuple(lengths)


def _cast(name: str, given: Mapping[str, Argument], model: Arguments) -> None:
    """`model.half()`, `model.to(torch.bfloat16)`: the dtype that the weights have then."""
    said = [Argument(_CASTS[name], "")] if name in _CASTS else given.values()
    dtypes = [one for one in said if str(one.value) in DTYPES]
    if dtypes and "of" not in given and "quantization_config" not in model:
        model.values = {**model.values, "dtype": dtypes[0]}


def _freezes(where: str, given: Mapping[str, Argument], training: ProgramTraining) -> None:
    names = ("value", "requires_grad", "0")
    said = next((given[name] for name in names if name in given), Argument(True, where))
    effect: Effect = "adds" if training.has("lora") else "saves"  # peft freezes the others
    if said.is_unknown or said.value is (effect == "adds"):
        text = f"says which weights are trained, and that isn't modelled: {EMULATE}"
        training.found.problems.append(Undecided(text, where, "", effect))
