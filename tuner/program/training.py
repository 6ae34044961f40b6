"""What a program says of its training: the arguments of its trainer, its model and its adapters.

`tuner.program.settings` finds the few that are changed; here is all that decides memory, under the
names that the program has for it. The program is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tuner.core.errors import Problem
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.argument_classes import (
    base_in,
    class_of,
    fields_of,
    parsed_classes,
    said_values,
)
from tuner.program.arguments import (
    Argument,
    Arguments,
    Found,
    ProgramTraining,
    assignments_of,
    values_of_files,
    values_of_words,
)
from tuner.program.edit.source import PYTHON
from tuner.program.keywords import CallReader, place_in
from tuner.program.names import Script
from tuner.program.parsed import last_name
from tuner.program.program import Program, words_behind_tool
from tuner.program.settings import scripts_of
from tuner.program.signatures import signature
from tuner.program.trainer import trainer_named
from tuner.program.unexpected import hold_calls, hold_file, hold_words

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
"""Classes of a trainer's arguments."""

_LENGTHS = ("max_length", "model_max_length")
"""What tokenisers are told of the length of examples."""

_OTHERS = ("FastLanguageModel", "FastModel", "Accelerator", "LightningModule", "deepspeed")
"""Names of libraries that train in ways of their own."""


def read_training(program: Program) -> ProgramTraining:
    """What `program` says of its training; problems are noted, nothing is raised for them."""
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
        text = "gets a configuration that is not seen to be a LoraConfig"
        found.problems.append(Problem(text, "get_peft_model"))
    return training


def _other_trainer(calls: Sequence[tuple[Script, ast.Call]]) -> str:
    """The class of a trainer whose behaviour is not known; "" where there is none."""
    names = (last_name(call.func) or "" for _, call in calls)
    return next((name for name in names if name.endswith("Trainer") and signature(name)), "")


def _read_trainer(training: ProgramTraining) -> None:
    """What the call of a trainer says: its model, and what it gets that cannot be read."""
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
    """The trainer's arguments, where a parser makes them of a dataclass and the command line."""
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
    """Why a configuration says nothing: nobody sees it, or it is of adapters that are refused."""
    kind = made.partition("(")[0].rpartition(".")[2].removesuffix("Config").lower()
    refused = SCHEMAS["causal_lm"].terms["adapter"].refused
    nearest = {name.replace("_", ""): text for name, text in refused.items()}.get(kind)
    return f"not predicted: {nearest}" if nearest else "and what it is made with is not seen"


def _freezes(script: Script) -> Iterator[Problem]:
    """Weights that are frozen or trained one by one: which, nobody knows before it runs."""
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
    """Whether a call loads a model that is trained: `AutoModelForCausalLM.from_pretrained`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = last_name(owner) if owner is not None else None
    return last_name(call.func) == "from_pretrained" and (name or "").endswith(_MODEL_CLASSES)
