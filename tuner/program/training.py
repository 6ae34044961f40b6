"""What a program says of its training: the arguments of its trainer, its model and its adapters.

`tuner.program.settings` finds the few that are changed; here is all that decides memory, under the
names that the program has for it. The program is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.apply.source import PYTHON
from tuner.errors import Problem
from tuner.program.argument_classes import (
    base_in,
    class_of,
    fields_of,
    parsed_classes,
    said_values,
)
from tuner.program.arguments import (
    COMMAND_LINE,
    Argument,
    Arguments,
    Found,
    values_of_files,
    values_of_words,
)
from tuner.program.knob_names import typed
from tuner.program.names import Literal, OptionValue, OutsideKeys, Script
from tuner.program.parsed import last_name
from tuner.program.program import Program
from tuner.program.settings import scripts_of
from tuner.space.schemas import SCHEMAS

DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
"""By the names that PyTorch has for them: tuner's."""

_MODEL_CLASSES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForImageTextToText",
    "ForSequenceClassification",
)


@dataclass(slots=True)
class ProgramTraining:
    """The training of one program.

    `trainer` is the class or the tool that runs it. Of a program that is a script there are the
    calls: "trainer", "arguments", "model", "lora", "quantization", "preparation" and "adapted",
    each once at most; of a tool's file all stands under "arguments".
    """

    trainer: str
    groups: Mapping[str, Arguments]
    found: Found
    model_by_name: str | None = None
    """The model, where the trainer itself loads it."""
    lengths: tuple[Argument, ...] = ()
    """What the calls of a script have as `max_length`, whatever they are."""

    def __getitem__(self, group: str) -> Arguments:
        return self.groups.get(group) or Arguments(group, {}, self.found)

    def has(self, group: str) -> bool:
        """Whether there is such a call."""
        return group in self.groups


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
        values = {**values_of_files(data), **values_of_words(program.command)}
        values.pop("config", None)
        arguments = Arguments(program.trainer, values, found)
        return ProgramTraining(program.trainer, {"arguments": arguments}, found)
    calls = [(script, call) for script in scripts for call in script.calls]
    groups: dict[str, Arguments] = {}
    trainers: list[tuple[Script, ast.Call]] = []
    for script, call in calls:
        name = last_name(call.func) or ""
        group = _CALLS.get(name) or ("model" if _loads_model(call) else None)
        if _is_other(call):
            problem = f"trains with {script.shown(call.func)}, whose memory is not predicted"
            found.problems.append(Problem(problem, _at(script, call)))
        if group is None:
            continue
        if group == "trainer":
            trainers.append((script, call))
        if group in groups:
            text = f"there are several calls like {name}: which of them counts is not known"
            found.problems.append(Problem(text, _at(script, call)))
            continue
        if group == "model":
            name = script.shown(call.func)
        groups[group] = Arguments(name, dict(_keywords(program, script, call)), found)
    if "arguments" not in groups:
        groups |= _parsed_arguments(program, scripts, found)
    lengths = tuple(
        argument
        for script, call in calls
        if last_name(call.func) not in _CALLS
        for _, argument in _keywords(program, script, call, only=_LENGTHS)
    )
    for script in scripts:
        found.problems += _freezes(script)
    training = ProgramTraining("", groups, found, lengths=lengths)
    if trainers:
        _read_trainer(training, program, *trainers[0])
    if "adapted" in groups and "lora" not in groups:
        text = "gets a configuration that is not seen to be a LoraConfig"
        found.problems.append(Problem(text, "get_peft_model"))
    return training


def _read_trainer(
    training: ProgramTraining, program: Program, script: Script, call: ast.Call
) -> None:
    """What the call of a trainer says: its class, its model, and what it gets that nobody sees."""
    training.trainer = last_name(call.func) or ""
    model = next((k.value for k in call.keywords if k.arg == "model"), None)
    model = model or (call.args[0] if call.args else None)
    value = _argument(program, script, model).value if model is not None else None
    training.model_by_name = value if isinstance(value, str) else None
    for name, group in (("args", "arguments"), ("1", "arguments"), ("peft_config", "lora")):
        given = training["trainer"].values.get(name)
        if given is None or training.has(group):
            continue
        if given.problem is not None or given.value is not None:
            text = given.problem or f"is {given.value}, {_why_unseen(str(given.value))}"
            training.found.problems.append(Problem(text, f"{given.where} {name}"))


def _parsed_arguments(
    program: Program, scripts: Sequence[Script], found: Found
) -> dict[str, Arguments]:
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
            field: _argument(program, script, value) for field, value in fields_of(node) if value
        }
    others = {
        field
        for other, definition in own.items()
        if other != name and definition is not None
        for field, _ in fields_of(definition[1])
    }
    said = {n: a for n, a in said_values(program).items() if n not in others and n != "config"}
    return {"arguments": Arguments(str(bases[name]), {**values, **said}, found)}


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
                          _at(script, node))  # fmt: skip


def _is_other(call: ast.Call) -> bool:
    return any(last_name(node) in _OTHERS for node in (call.func, getattr(call.func, "value", None))
               if isinstance(node, ast.expr))  # fmt: skip


def _loads_model(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = last_name(owner) if owner is not None else None
    return last_name(call.func) == "from_pretrained" and (name or "").endswith(_MODEL_CLASSES)


def _at(script: Script, node: ast.AST) -> str:
    return f"{script.source.path}:{script.place_of(node).line}"


def _keywords(
    program: Program, script: Script, call: ast.Call, only: Sequence[str] = ()
) -> Iterator[tuple[str, Argument]]:
    """The arguments of a call by name; those in a dictionary as "its name.its key"."""
    for number, value in enumerate(call.args if not only else ()):
        yield str(number), _argument(program, script, value)
    for keyword in call.keywords:
        if keyword.arg is None:
            if not only:
                text = f"has **{script.shown(keyword.value)}, whose keys are not known"
                yield "**", Argument(None, _at(script, keyword.value), text)
        elif not only or keyword.arg in only:
            value = keyword.value
            if isinstance(value, ast.Dict):
                for key, item in zip(value.keys, value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield f"{keyword.arg}.{key.value}", _argument(program, script, item)
            yield keyword.arg, _argument(program, script, value)


def _argument(program: Program, script: Script, node: ast.expr) -> Argument:
    """The one value that an expression has."""
    where = _at(script, node)
    if isinstance(node, ast.Call | ast.Dict) and last_name(getattr(node, "func", node)) not in (
        "int", "float", "str", "bool",
    ):  # fmt: skip
        return Argument(script.shown(node), where)  # an object: what it is made with is read there
    values = [_end(program, script, end) for end in script.ends(node)]
    distinct = {repr(value.value): value for value in values}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    shown = script.shown(node)
    return Argument(None, where, f"is {shown}, which is set in several places")


def _end(program: Program, script: Script, end: Any) -> Argument:
    node = end.option.call if isinstance(end, OptionValue) else end.node
    script = script.home_of(node)  # which another one may import
    where = _at(script, node)
    if isinstance(end, Literal):
        try:
            return Argument(ast.literal_eval(end.node), where)
        except ValueError:
            return Argument(None, where, f"is {script.shown(end.node)}, which is computed")
    if isinstance(end, OptionValue):
        return _option_value(program, script, end, where)
    keys = end.keys if isinstance(end, OutsideKeys) else ("",)
    if keys[0] == "argv" and isinstance(keys[-1], int):
        return _word(program, script, keys[-1], where)
    said = _parsed_value(program, script, str(keys[0])) if len(keys) == 1 else None
    if said is None and (str(keys[-1]) in DTYPES or isinstance(end.node, ast.Call | ast.Dict)):
        return Argument(str(keys[-1]) or script.shown(end.node), where)
    return said or Argument(None, where, f"is {script.shown(end.node)}, which cannot be read")


def _parsed_value(program: Program, script: Script, name: str) -> Argument | None:
    """The value of a field of a dataclass that a parser fills; None for what is no such field."""
    scripts = [script, *script.others.values()]
    if next(parsed_classes(scripts), None) is None:
        return None
    said = said_values(program).get(name)
    if said is not None:
        return said
    defaults = [(one, literal) for one in scripts for literal in one.class_values(name)]
    found = {(one.source.path, literal.node): _end(program, one, literal)
             for one, literal in defaults}  # fmt: skip
    return next(iter(found.values())) if len(found) == 1 else None


def _word(program: Program, script: Script, number: int, where: str) -> Argument:
    names = [word for word, source in program.files.items() if source is script.source]
    at = program.command.index(names[0]) + number if names else len(program.command)
    if at < len(program.command):
        return Argument(typed(program.command[at], ""), COMMAND_LINE)
    return Argument(None, where, f"is word {number} behind the script, and there is none")


def _option_value(program: Program, script: Script, end: OptionValue, where: str) -> Argument:
    command, option = program.command, end.option
    for number, word in enumerate(command):
        head, equals, text = word.partition("=")
        if head in option.names:
            text = text if equals else (command[number + 1] if number + 1 < len(command) else "")
            return Argument(typed(text, option.dest), COMMAND_LINE)
    if option.default is None or option.is_positional:
        return Argument(None, where, f"is the option {option.names[0]}, which has no default")
    return _argument(program, script, option.default)
