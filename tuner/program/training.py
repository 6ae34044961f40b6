"""The training of a program: the arguments of its trainer, its model and its adapters.

`tuner.program.settings` finds the few parameters that are changed; this module reads all that
decide memory. The program is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import Problem
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import (
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
from tuner.program.keywords import (
    CallReader,
    base_in,
    class_of,
    fields_of,
    parsed_classes,
    place_in,
    said_values,
)
from tuner.program.names import Script
from tuner.program.program import Program, words_behind_tool
from tuner.program.settings import scripts_of
from tuner.program.signatures import hold_calls, hold_file, hold_words, signature
from tuner.program.trainer import trainer_named
from tuner.space.models.catalogue import HUB_ID, get_entry

_MODEL_CLASSES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForImageTextToText",
    "ForSequenceClassification",
)


_CALLS = {
    "SFTTrainer": "trainer",
    "DPOTrainer": "trainer",
    "Trainer": "trainer",
    "SFTConfig": "arguments",
    "DPOConfig": "arguments",
    "TrainingArguments": "arguments",
    "LoraConfig": "lora",
    "BitsAndBytesConfig": "quantization",
    "prepare_model_for_kbit_training": "preparation",
    "get_peft_model": "adapted",
    "gradient_checkpointing_enable": "enabled",
    "activation_checkpointing_enable": "enabled",
}
_ARGUMENTS = tuple(name for name, group in _CALLS.items() if group == "arguments")

_LENGTHS = ("max_length", "model_max_length")
"""Names of the length of examples in calls of tokenisers."""

_OTHERS = ("FastLanguageModel", "FastModel", "Accelerator", "LightningModule", "deepspeed")
"""Names of libraries that train in ways of their own."""


def read_training(program: Program) -> ProgramTraining:
    """The training of `program`, with problems noted, not raised."""
    found = Found()
    scripts = scripts_of(program)
    data = [source for source in program.sources if source.path.suffix not in PYTHON]
    if not scripts:
        words = words_behind_tool(program)
        values = {**values_of_files(data), **values_of_words(words)}
        tool = trainer_named(program.trainer)
        if tool and tool.file and tool.file.takes_assignments:
            values |= assignments_of(words)
        values.pop("config", None)
        known = hold_file(program.trainer, values, found)
        arguments = Arguments(program.trainer, known, found)
        return ProgramTraining(program.trainer, {"arguments": arguments}, found)
    reader = CallReader(program, found)
    calls = [(script, call) for script in scripts for call in script.calls]
    groups: dict[str, Arguments] = {}
    trainers: list[str] = []
    for script, call in calls:
        name = last_name(call.func) or ""
        group = _CALLS.get(name) or ("model" if loads_model(call) else None)
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
        if group == "model":
            name = script.shown(call.func)
        held = signature(name)
        values = {
            one: argument
            for one, argument in reader.keywords(script, call)
            if held is None or held.takes(one) or not one[0].isalpha()
        }
        groups[group] = Arguments(name, values, found)
    if "arguments" not in groups:
        groups |= _parsed_arguments(reader, scripts)
    lengths = tuple(
        argument
        for script, call in calls
        if last_name(call.func) not in _CALLS
        for _, argument in reader.keywords(script, call, only=_LENGTHS)
    )
    for script in scripts:
        found.problems += _freezes(script)
    training = ProgramTraining("", groups, found, lengths=lengths)
    training.trainer = next(iter(trainers), "") or _other_trainer(calls)
    if trainers:
        _read_trainer(training)
    hold_calls(scripts, training.trainer, found)
    hold_words(program, scripts, found)
    if "adapted" in groups and "lora" not in groups:
        text = "couldn't find the LoraConfig passed to get_peft_model"
        found.problems.append(Problem(text))
    return training


def _other_trainer(calls: Sequence[tuple[Script, ast.Call]]) -> str:
    names = (last_name(call.func) or "" for _, call in calls)
    return next((name for name in names if name.endswith("Trainer") and signature(name)), "")


def _read_trainer(training: ProgramTraining) -> None:
    values = training["trainer"].values
    model = values.get("model", values.get("0"))
    if model is not None and isinstance(model.value, str) and not model.is_made:
        training.model_by_name = model.value
    for name, group in (("args", "arguments"), ("1", "arguments"), ("peft_config", "lora")):
        given = training["trainer"].values.get(name)
        if given is None or training.has(group):
            continue
        if given.problem is not None or given.value is not None:
            text = given.problem or f"is {given.value}, {_why_unseen(str(given.value))}"
            training.found.problems.append(Problem(text, f"{given.where} {name}"))


def _parsed_arguments(reader: CallReader, scripts: Sequence[Script]) -> dict[str, Arguments]:
    classes = list(parsed_classes(scripts))
    own = {name: class_of(scripts, name) for name in classes}
    bases = {name: base_in(_ARGUMENTS, scripts, name) for name in classes}
    name = next((name for name in classes if bases[name] is not None), None)
    if name is None:
        return {}
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
    said = {n: a for n, a in said_values(reader.program).items() if n not in others}
    said.pop("config", None)
    return {"arguments": Arguments(str(bases[name]), {**values, **said}, reader.found)}


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


_KEYS = (
    "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id",
    "base_model_name", "model_path", "model",
)  # fmt: skip

_BELOW = ("name", "path", "id", "name_or_path")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as it is named, with the place for people: "train.py:12"."""

    name: str
    where: str


def named_models(program: Program | None, sources: Sequence[SourceFile]) -> list[NamedModel]:
    """The models that the program loads, or that its files and `sources` name; each once."""
    files = {source.path.resolve(): source for source in sources}
    folder = Path() if program is None else program.folder
    found = list(_in_calls(program)) if program is not None else []
    if program is not None:
        files |= {source.path.resolve(): source for source in program.sources}
    found += [one for source in files.values() for one in _in_file(source)]
    named: dict[str, NamedModel] = {}
    for one in found:
        path = folder / one.name
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
            given = next((keywords[key] for key in _KEYS if key in keywords), None)
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
        is_named = is_below or (steps and steps[-1] in _KEYS)
        if is_named and isinstance(place.value, str):
            yield NamedModel(place.value, source.at(place))
