"""The training of a program: the arguments of its trainer, its model and its adapters.

`tuner.program.settings` finds the few parameters that are changed; this module reads all that
decide memory. The program is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.core.errors import Problem
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import (
    EMULATE,
    Argument,
    Arguments,
    Found,
    ProgramTraining,
    assignments_of,
    values_of_files,
    values_of_words,
)
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.filled import base_in, class_of, fields_of, parsed_classes, said_values
from tuner.program.keywords import CallReader, place_in
from tuner.program.linked import Unclear
from tuner.program.model_config import MADE_OF_IT, groups_of
from tuner.program.names import Script
from tuner.program.program import Program, words_behind_tool
from tuner.program.settings import scripts_of
from tuner.program.signatures import hold_calls, hold_file, hold_words, imports, signature
from tuner.program.trainer import trainer_named
from tuner.space.models.catalogue import HUB_ID, get_entry

_MODEL_CLASSES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForImageTextToText",
    "ForSequenceClassification",
)


_TRAINED = ("SFT", "DPO", "KTO", "ORPO", "CPO", "TPO", "Reward")
"""TRL's trainers that are read: each is a `Trainer`, and has a `Config`."""

_CALLS = {
    "Trainer": "trainer",
    "UnslothTrainer": "trainer",
    **{f"{name}Trainer": "trainer" for name in _TRAINED},
    "TrainingArguments": "arguments",
    "UnslothTrainingArguments": "arguments",
    **{f"{name}Config": "arguments" for name in _TRAINED},
    "ModelConfig": "model_config",
    "LoraConfig": "lora",
    "BitsAndBytesConfig": "quantization",
    "prepare_model_for_kbit_training": "preparation",
    "get_peft_model": "adapted",
    "gradient_checkpointing_enable": "enabled",
    "activation_checkpointing_enable": "enabled",
}
_ARGUMENTS = tuple(name for name, group in _CALLS.items() if group == "arguments")

_REFERRING = ("DPOTrainer", "KTOTrainer")
"""Trainers whose second argument is the reference model."""

UNSLOTH = ("FastLanguageModel", "FastModel")
_OF_UNSLOTH = {"from_pretrained": "model", "get_peft_model": "lora"}
"""The methods of Unsloth's classes that count; the others change nothing that is predicted."""

_LENGTHS = ("max_length", "model_max_length")
"""Names of the length of examples in calls of tokenisers."""

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

_OTHERS = ("FastVisionModel", "Accelerator", "LightningModule", "deepspeed")
"""Names of libraries that train in ways of their own."""


def read_training(program: Program, *, has_bf16: bool = True) -> ProgramTraining:
    """The training of `program`, with problems noted, not raised.

    `has_bf16` says whether its GPU computes in bf16.
    """
    found = Found()
    scripts = scripts_of(program)
    if not scripts:
        return _of_files(program, found)
    reader = CallReader(program, found, has_bf16=has_bf16)
    filled = _filled(reader, scripts)
    calls = [(script, call) for script in scripts for call in script.calls]
    of_config = _of_model_config(reader, filled, calls)
    if of_config:
        reader.absent = frozenset(f for f, group in MADE_OF_IT.items() if group not in of_config)
    groups, trainers = _groups(reader, scripts, calls)
    for function, group in MADE_OF_IT.items():
        if group in of_config and any(last_name(call.func) == function for _, call in calls):
            groups.setdefault(group, of_config[group])
    if "arguments" not in groups and "arguments" in filled:
        given = filled["arguments"]
        values = {**given.values, **dict(_assigned(reader, calls))}
        groups["arguments"] = Arguments(given.title, values, found)
    lengths = tuple(
        argument
        for script, call in calls
        if last_name(call.func) not in _CALLS
        for _, argument in reader.keywords(script, call, only=_LENGTHS)
    )
    for script in scripts:
        found.problems += _freezes(script)
    training = ProgramTraining("", groups, found, lengths=lengths, has_bf16=has_bf16)
    training.trainer = next(iter(trainers), "") or _other_trainer(calls)
    if trainers:
        _read_trainer(training)
    training.evaluates = any(
        _is_evaluation(call) and not reader.is_dead(script, call) for script, call in calls
    )
    found.left_out += [
        f"{place_in(script, call)} {last_name(call.func)}"
        for script, call in calls
        if last_name(call.func) in _MERGES and not reader.is_dead(script, call)
    ]
    found.problems += [
        Problem(f"{what} is not predicted: {EMULATE}", f"{place_in(script, call)} {name}")
        for script, call in calls
        if (what := _NOT_PREDICTED.get(name := last_name(call.func) or ""))
        and not reader.is_dead(script, call)
    ]
    hold_calls(scripts, training.trainer, found)
    if trainers and groups.get("model", Arguments("", {}, found)).title.startswith(UNSLOTH):
        own = training.trainer.replace("UnslothTrainer", "SFTTrainer")
        training.trainer = f"Unsloth {own}"
    hold_words(program, scripts, found)
    if "adapted" in groups and "lora" not in groups:
        text = "couldn't find the LoraConfig passed to get_peft_model"
        found.problems.append(Problem(text))
    return training


def _of_files(program: Program, found: Found) -> ProgramTraining:
    data = [source for source in program.sources if source.path.suffix not in PYTHON]
    words = words_behind_tool(program)
    values = {**values_of_files(data), **values_of_words(words)}
    tool = trainer_named(program.trainer)
    if tool and tool.file and tool.file.takes_assignments:
        values |= assignments_of(words)
    values.pop("config", None)
    known = hold_file(program.trainer, values, found)
    arguments = Arguments(program.trainer, known, found)
    return ProgramTraining(program.trainer, {"arguments": arguments}, found)


def _of_model_config(
    reader: CallReader,
    filled: Mapping[str, Arguments],
    calls: Sequence[tuple[Script, ast.Call]],
) -> dict[str, Arguments]:
    """The groups that TRL makes of a ModelConfig, which a parser or a call fills; none without."""
    if "model_config" in filled:
        return groups_of(filled["model_config"])
    made = [(s, c) for s, c in calls if last_name(c.func) == "ModelConfig"]
    values = {name: one for s, c in made for name, one in reader.keywords(s, c)}
    return groups_of(Arguments("ModelConfig", values, reader.found)) if made else {}


def _groups(
    reader: CallReader, scripts: Sequence[Script], calls: Sequence[tuple[Script, ast.Call]]
) -> tuple[dict[str, Arguments], list[str]]:
    """The arguments of the calls that count, by group, and the names of the trainers."""
    found = reader.found
    by_unsloth = any(imports(one, "unsloth") for one in scripts)
    references = _references(scripts)
    groups: dict[str, Arguments] = {}
    trainers: list[str] = []
    for script, call in calls:
        name = last_name(call.func) or ""
        group = _group_of(call)
        if group == "model" and call in references:
            group = "reference"
        if (group is None and not _is_other(call)) or reader.is_dead(script, call):
            continue
        if _is_other(call):
            problem = f"trains with {script.shown(call.func)}, whose memory is not predicted"
            found.problems.append(Problem(problem, place_in(script, call)))
        if group is None:
            continue
        if group == "trainer":
            trainers.append(name)
        if group in groups:
            text = f"there are several calls like {name}: which of them counts is not known"
            found.problems.append(Problem(text, place_in(script, call)))
            continue
        if group in ("model", "reference"):
            name = script.shown(call.func)
        held = signature(name) if not by_unsloth else None
        values = {
            one: argument
            for one, argument in reader.keywords(script, call)
            if held is None or held.takes(one) or not one[0].isalpha()
        }
        groups[group] = Arguments(name, values, found)
    return groups, trainers


def _other_trainer(calls: Sequence[tuple[Script, ast.Call]]) -> str:
    names = (last_name(call.func) or "" for _, call in calls)
    return next((name for name in names if name.endswith("Trainer") and signature(name)), "")


def _read_trainer(training: ProgramTraining) -> None:
    values = training["trainer"].values
    model = values.get("model", values.get("0"))
    if model is not None and isinstance(model.value, str) and not model.is_made:
        training.model_by_name = model.value
    second = "reference" if training.trainer in _REFERRING else "arguments"
    for name, group in (("args", "arguments"), ("1", second), ("peft_config", "lora")):
        given = training["trainer"].values.get(name)
        if given is None or training.has(group):
            continue
        if given.problem is not None or given.value is not None:
            text = given.problem or f"is {given.value}, {_why_unseen(str(given.value))}"
            training.found.problems.append(Problem(text, f"{given.where} {name}"))


def _filled(reader: CallReader, scripts: Sequence[Script]) -> dict[str, Arguments]:
    """The trainer's arguments and the ModelConfig that a parser fills."""
    classes = list(parsed_classes(scripts))
    groups: dict[str, Arguments] = {}
    own = {one: class_of(scripts, one) for one in classes}
    for group, names in (("arguments", _ARGUMENTS), ("model_config", ("ModelConfig",))):
        bases = {name: base_in(names, scripts, name) for name in classes}
        name = next((name for name in classes if bases[name] is not None), None)
        if name is None:
            continue
        values: dict[str, Argument] = {}
        if (definition := own[name]) is not None:
            script, node = definition
            values = {
                field: reader.argument(script, value) for field, value in fields_of(node) if value
            }
        others = {
            field
            for other, definition in own.items()
            if other != name and definition is not None
            for field, _ in fields_of(definition[1])
        }
        held = signature(str(bases[name]))
        released = {o for o in classes if own[o] is None and o != name and signature(o)}
        said = {
            one: argument
            for one, argument in said_values(reader.program).items()
            if one not in others and one != "config"
            and (held is None or not released or held.takes(one) or one in values)
        }  # fmt: skip
        groups[group] = Arguments(str(bases[name]), {**values, **said}, reader.found)
    return groups


def _assigned(
    reader: CallReader, calls: Sequence[tuple[Script, ast.Call]]
) -> Iterator[tuple[str, Argument]]:
    """Assignments to the trainer's arguments, such as `training_args.bf16 = True`."""
    for script, call in calls:
        given = {k.arg: k.value for k in call.keywords}.get("args")
        if _CALLS.get(last_name(call.func) or "") != "trainer" or not isinstance(given, ast.Name):
            continue
        for name, _, keys, value in script.assigned:
            is_own = name == given.id and len(keys) == 1 and not reader.is_dead(script, value)
            if is_own and isinstance(value, ast.expr):
                yield from reader.named(script, str(keys[0]), value)


def _is_evaluation(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    owned = isinstance(owner, ast.expr) and "trainer" in (last_name(owner) or "").lower()
    return owned and last_name(call.func) in ("evaluate", "predict")


def _group_of(call: ast.Call) -> str | None:
    name, owner = last_name(call.func) or "", getattr(call.func, "value", None)
    if isinstance(owner, ast.expr) and last_name(owner) in UNSLOTH:
        return _OF_UNSLOTH.get(name)
    if name == "compile" and isinstance(owner, ast.expr):
        # `torch.compile(model)`, or `model.compile()`; patterns of `re` are no such calls.
        return "compiled" if last_name(owner) == "torch" or not call.args else None
    return _CALLS.get(name) or ("model" if loads_model(call) else None)


def _references(scripts: Sequence[Script]) -> set[ast.AST]:
    """The calls that load the reference model of preference training."""
    found: set[ast.AST] = set()
    for script in scripts:
        for call in script.calls:
            if last_name(call.func) not in _REFERRING:
                continue
            given = [k.value for k in call.keywords if k.arg == "ref_model"]
            ends = [end for node in (*given, *call.args[1:2]) for end in script.ends(node)]
            found |= {end.node for end in ends if isinstance(end, Unclear)}
    return found


def _why_unseen(made: str) -> str:
    """The reason why a configuration is not read, or its kind of adapters refused."""
    kind = made.partition("(")[0].rpartition(".")[2].removesuffix("Config").lower()
    refused = SCHEMAS["causal_lm"].terms["adapter"].refused
    nearest = {name.replace("_", ""): text for name, text in refused.items()}.get(kind)
    return f"not predicted: {nearest}" if nearest else "and what it is made with is not seen"


def _freezes(script: Script) -> Iterator[Problem]:
    """Problems with weights that are frozen one by one, known only when the program runs."""
    for node in script.scopes:
        is_set = isinstance(node, ast.Attribute) and node.attr == "requires_grad"
        is_called = isinstance(node, ast.Call) and last_name(node.func) == "requires_grad_"
        if is_called or (is_set and isinstance(getattr(node, "ctx", None), ast.Store)):
            yield Problem("says which weights are trained, and that is not predicted",
                          place_in(script, node))  # fmt: skip


def _is_other(call: ast.Call) -> bool:
    return any(last_name(node) in _OTHERS for node in (call.func, getattr(call.func, "value", None))
               if isinstance(node, ast.expr))  # fmt: skip


def loads_model(call: ast.Call) -> bool:
    """True for a call that loads a model to train: `AutoModelForCausalLM.from_pretrained`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = last_name(owner) if owner is not None else None
    return last_name(call.func) == "from_pretrained" and (name or "").endswith(_MODEL_CLASSES)


MODEL_KEYS = (
    "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id",
    "base_model_name", "model_path", "model",
)  # fmt: skip
"""Names of the argument that names a model."""

_BELOW = ("name", "path", "id", "name_or_path")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as it is named, with the place for people: "train.py:12"."""

    name: str
    where: str


def named_models(program: Program) -> list[NamedModel]:
    """The models that the program loads, or that its files name; each once."""
    found = [*_in_calls(program), *(one for source in program.sources for one in _in_file(source))]
    named: dict[str, NamedModel] = {}
    for one in found:
        path = program.folder / one.name
        name = str(path) if path.is_dir() else one.name
        if path.is_dir() or get_entry(name) is not None or HUB_ID.fullmatch(name):
            named.setdefault(name, NamedModel(name, one.where))
    return list(named.values())


def _in_calls(program: Program) -> Iterator[NamedModel]:
    reader = CallReader(program, Found())
    for script in scripts_of(program):
        for call in script.calls:
            if not _takes_model(call):
                continue
            keywords = {k.arg: k.value for k in call.keywords}
            given = next((keywords[key] for key in MODEL_KEYS if key in keywords), None)
            node = given if given is not None else next(iter(call.args), None)
            if isinstance(node, ast.expr):
                yield from _text(reader.argument(script, node))


def _takes_model(call: ast.Call) -> bool:
    name = last_name(call.func) or ""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_model = owner is not None and "Model" in (last_name(owner) or "")
    is_loaded = loads_model(call) or (name == "from_pretrained" and is_model)
    return is_loaded or name.endswith("Trainer") or name == "SentenceTransformer"


def _text(argument: Argument) -> Iterator[NamedModel]:
    if isinstance(argument.value, str) and not argument.is_made:
        yield NamedModel(argument.value, argument.where)


def _in_file(source: SourceFile) -> Iterator[NamedModel]:
    if source.path.suffix in PYTHON:
        return
    for place in source.places:
        steps = [str(step) for step in place.path[-2:]]
        is_below = len(steps) > 1 and steps[0] == "model" and steps[1] in _BELOW
        is_named = is_below or (steps and steps[-1] in MODEL_KEYS)
        if is_named and isinstance(place.value, str):
            yield NamedModel(place.value, source.at(place))
