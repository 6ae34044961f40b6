"""Command lines and settings: parsers of transformers, TRL, fire, tyro and OmegaConf."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
import types
from typing import Any

from tuner.program.standins.configs import RENAMED, Config, config
from tuner.program.standins.trainers import Parameters
from tuner.program.standins.unknown import Absent, Unknown

_OF_MODEL = re.compile(
    "torch_dtype|lora_|load_in_|bnb_|use_(peft|flash|bnb)|attn_|model_|tokenizer_"
)
"""Names of arguments that older releases had beside the model's name."""


def truth(text: Any) -> bool:
    for value, words in ((True, "yes true t y 1"), (False, "no false f n 0")):
        if str(text).lower() in words.split():
            return value
    raise argparse.ArgumentTypeError(f"truth value expected: got {text}")


def converter(kind: Any) -> dict[str, Any]:
    """The arguments by which argparse reads a field of this type, or of the text of one."""
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        words = [each.value for each in kind.__members__.values()]
        return {"type": type(words[0]), "choices": words}
    text = kind.__name__ if type(kind) is type else str(kind)
    text = re.sub(r"\b(typing|builtins|t)\.|'(?=\w+\[)", "", text).strip("'\" ")
    text = re.sub(r"^(Optional|Annotated)\[(.*)\]$", r"\2", text)
    if text.startswith("Literal"):
        words = [eval(word) for word in re.findall(r"'[^']*'|\"[^\"]*\"|-?[\d.]+", text)]
        return {"type": type(words[0]), "choices": words} if words else {}
    text = re.sub(r"^Union\[(.*)\]$", lambda m: m[1].replace(", ", " | "), text)
    kinds = [part.strip() for part in re.split(r"\|(?![^\[]*\])", text)]
    known = [each for each in kinds if each not in ("None", "NoneType")] or ["str"]
    name, _, inner = ("str" if "str" in known else known[0]).lower().partition("[")
    if name == "bool":
        return {"type": truth, "nargs": "?", "const": True}
    numbers: dict[str, Any] = {"int": int, "float": float}
    if name in ("list", "tuple", "sequence"):
        return {"nargs": "+", "type": numbers.get(re.split(r"\W", inner)[0], str)}
    return {"type": json.loads if name == "dict" else numbers.get(name, str)}


def _yaml(path: Any) -> Any:
    import yaml

    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def _give(configs: list[Any], name: str, given: Any) -> None:
    """Gives it to the class that has it under its name today, or whose names begin like it."""
    newest = RENAMED.get(name, name)
    has = "model_name_or_path" if _OF_MODEL.match(name) else "output_dir"
    for each in configs:
        each.__dict__.setdefault(name, given)
    owners = [each for key in (newest, has) for each in configs if key in each._fields]
    owner = [*owners, *configs][0]
    if newest in owner._fields and newest not in owner._note.given:
        owner.__dict__[newest] = owner._note.extra["built"][newest] = given
    owner._note.given[name] = given


def _fields(cls: Any) -> list[Any]:
    """The fields that a parser reads; none are known of a library that is not installed."""
    found = () if Absent in getattr(cls, "__mro__", ()) else dataclasses.fields(cls)
    return [each for each in found if each.init]


class HfArgumentParser(argparse.ArgumentParser):
    """Only what is given reaches a class: a default of the class's own stays the class's."""

    _path = "transformers.HfArgumentParser"

    def __init__(self, dataclass_types: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(*args, **kwargs)
        types = dataclass_types or []
        self.dataclass_types = list(types) if isinstance(types, (list, tuple)) else [types]
        for cls in self.dataclass_types:
            for field in _fields(cls):
                self._add(field)

    def _add(self, field: Any) -> None:
        default, aliases = field.default, field.metadata.get("aliases", [])
        is_flag = field.type in (bool, "bool")
        # The library's parser does not look at the factory of a flag, which is False then.
        if field.default_factory is not dataclasses.MISSING and not is_flag:
            default = field.default_factory()
        words = [field.name, field.name.replace("_", "-")]
        options = [f"--{word}" for word in words]
        options += [aliases] if isinstance(aliases, str) else aliases
        options = [each for each in options if each not in self._option_string_actions]
        if not options:
            return
        how = converter(field.type)
        if isinstance(default, list):
            how = {"nargs": "+", "type": str, **how}
        if default is None and how.get("type") is truth:
            del how["nargs"], how["const"]  # `--bf16` alone ends with an error
        how |= {"dest": field.name, "default": argparse.SUPPRESS}
        if default is dataclasses.MISSING:
            how |= {"default": False} if is_flag else {"required": True}
        self.add_argument(*dict.fromkeys(options), **how)
        if default is True and how["type"] is truth:
            negated = f"--no_{words[0]}", f"--no-{words[1]}"
            self.add_argument(
                *negated, action="store_false", dest=field.name, default=argparse.SUPPRESS
            )

    def parse_args_into_dataclasses(
        self, args: Any = None, return_remaining_strings: bool = False, *_: Any, **more: Any
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        beside = more.get("args_filename") or os.path.splitext("".join(sys.argv[:1]))[0] + ".args"
        if more.get("look_for_args_file", True) and os.path.exists(beside):
            with open(beside) as file:
                words = file.read().split() + words
        namespace, rest = self.parse_known_args(words)
        made = self._made(vars(namespace))
        if vars(namespace):
            made.append(namespace)
        return (*made, rest) if return_remaining_strings else self._with_others(made, rest)

    def _made(self, values: dict[str, Any]) -> list[Any]:
        """The classes of these values, which are taken out."""
        made = []
        for cls in self.dataclass_types:
            names = [each.name for each in _fields(cls)]
            made.append(cls(**{name: values.pop(name) for name in names if name in values}))
        return made

    def _with_others(self, made: list[Any], words: list[str]) -> tuple[Any, ...]:
        """Words that this release lacks, kept as given: whoever reads the record tells them."""
        configs = [each for each in made if isinstance(each, Config)]
        absent = [each for each in made if isinstance(each, Absent)]
        if words and (not [*configs, *absent] or not words[0].startswith("--")):
            raise ValueError(f"Some specified arguments are not used: {words}")
        for word, after in zip(words, [*words[1:], "--"]):
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                given: Any = word[len(name) + 3 :] or ("true" if after.startswith("--") else after)
                with contextlib.suppress(ValueError):
                    given = json.loads(given)
                for each in absent:  # whichever has it
                    setattr(each, name.replace("-", "_"), given)
                if not absent:
                    _give(configs, name.replace("-", "_"), given)
        return tuple(made)

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> Any:
        values = dict(args)
        made = self._made(values)
        words = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items()]
        return self._with_others(made, [] if allow_extra_keys else words)

    def parse_json_file(self, json_file: Any, allow_extra_keys: bool = False) -> Any:
        with open(json_file, encoding="utf-8") as file:
            return self.parse_dict(json.load(file), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: Any, allow_extra_keys: bool = False) -> Any:
        return self.parse_dict(_yaml(yaml_file), allow_extra_keys)


class TrlParser(HfArgumentParser):
    _path = "trl.TrlParser"

    def parse_args_and_config(
        self, args: Any = None, return_remaining_strings: bool = False, *_: Any, **more: Any
    ) -> Any:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, words = finder.parse_known_args(args)
        values = _yaml(found.config) or {} if found.config is not None else {}
        os.environ.update({k: str(v) for k, v in (values.pop("env", None) or {}).items()})
        unused = self.set_defaults_with_config(**values)
        *made, rest = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        if return_remaining_strings:
            return (*made, rest + unused)
        fails = more.get("fail_with_unknown_args", True)
        return self._with_others(made, rest + unused if fails else [])

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        for action in self._actions:
            if action.dest in values:
                value = values[action.dest]
                if isinstance(value, str) and callable(action.type) and not action.nargs:
                    value = action.type(value)
                action.default, action.required = value, False
        known = {action.dest for action in self._actions}
        return [
            w
            for k, v in values.items()
            if k not in known
            for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))
        ]


def get_peft_config(model_args: Any, *args: Any, **kwargs: Any) -> Any:
    if not model_args.use_peft:
        return None
    named = "task_type r target_modules target_parameters modules_to_save".split()
    names = {f"lora_{name}": name for name in named}
    names |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
    given = {name: vars(model_args)[own] for own, name in names.items() if own in vars(model_args)}
    targets = given.get("target_modules")
    if isinstance(targets, list) and len(targets) == 1:
        given["target_modules"] = targets[0]
    return config("peft.LoraConfig")(bias="none", **given)


def get_quantization_config(model_args: Any, *args: Any, **kwargs: Any) -> Any:
    made = config("transformers.BitsAndBytesConfig")
    if model_args.load_in_4bit:
        return made(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_args.dtype,
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
            bnb_4bit_quant_storage=vars(model_args).get("bnb_4bit_quant_storage"),
        )
    return made(load_in_8bit=True) if model_args.load_in_8bit else None


# -- libraries that are not installed ------------------------------------------------------------


def _literal(text: str) -> Any:
    """A word as fire reads it."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        if text[:1] + text[-1:] in ("[]", "()"):
            return [_literal(word.strip()) for word in text[1:-1].split(",")]
        return Unknown(text) if text[:1] == "{" else text


def _called(function: Any, words: list[str], kind: Any) -> Any:
    """Calls a function or class of the program's with the words of its command line.

    Where they say more than its parameters have, those that they don't name are unknown.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parameters = inspect.signature(function, eval_str=True).parameters
    for name, each in parameters.items():
        how = kind(each.annotation)
        words_of = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*words_of, dest=name, **how)
        if how.get("const") is True:
            no = [f"--no-{word[2:]}" for word in words_of] + [f"--no{name}"]
            parser.add_argument(*dict.fromkeys(no), dest=name, action="store_const", const=False)
    found, rest = parser.parse_known_args(words)
    values, more = vars(found), [word for word in rest if word[:1] != "-"]
    options = rest[len(more) :]
    for name in [name for name in parameters if name not in values][: len(more)]:
        values[name] = kind(parameters[name].annotation).get("type", str)(more.pop(0))
    for name, each in parameters.items():
        if more or options or isinstance(each.default, Absent):  # typer.Option(...)
            values.setdefault(name, Unknown(name))
    return function(**values)


def Fire(component: Any = None, *args: Any, **kwargs: Any) -> Any:
    words = sys.argv[1:]
    if isinstance(component, dict) and words[:1] and words[0] in component:
        component = component[words.pop(0)]
    if not inspect.isfunction(component):
        return Unknown("fire.Fire(...)")
    how = {"type": _literal, "nargs": "?", "const": True}
    return _called(component, words, lambda _: how)


def cli(component: Any = None, *args: Any, **options: Any) -> Any:
    """`tyro.cli` and its like, of a function or a dataclass."""
    is_known = inspect.isfunction(component) or dataclasses.is_dataclass(component)
    if not is_known or "default" in options:
        return Unknown("cli(...)")
    return _called(component, sys.argv[1:], converter)


run = CLI = auto_cli = parse = cli


class Settings(Parameters):
    """OmegaConf's mapping; a value that refers to another one is unknown."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__({str(k): self._held(v) for k, v in dict(values or {}).items()})

    def _held(self, value: Any) -> Any:
        if isinstance(value, dict):
            return type(self)(value)
        if isinstance(value, (list, tuple)):
            return [self._held(each) for each in value]
        return Unknown(value) if isinstance(value, str) and "${" in value else value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = self._held(value)


def _dotted(words: Any) -> Settings:
    import yaml

    made = Settings()
    for word in words:
        path, _, text = word.partition("=")
        *above, last = path.split(".")
        inner = made
        for name in above:
            inner = inner.setdefault(name, Settings())
        inner[last] = inner._held(yaml.safe_load(text))
    return made


def _merged(*several: Any) -> Any:
    if not all(isinstance(each, dict) for each in several):
        return Unknown("OmegaConf.merge(...)")
    made = Settings(several[0])
    for each in several[1:]:
        for name, value in each.items():
            old = made.get(name)
            both = isinstance(old, dict) and isinstance(value, dict)
            made[name] = _merged(old, value) if both else made._held(value)
    return made


class _OmegaConf(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return Unknown(f"omegaconf.OmegaConf.{name}")


OmegaConf = _OmegaConf(
    load=lambda path: Settings(_yaml(path)),
    create=lambda values=None, **_: (
        Settings(values) if isinstance(values, (dict, types.NoneType)) else Unknown("OmegaConf")
    ),
    merge=_merged,
    unsafe_merge=_merged,
    from_dotlist=_dotted,
    from_cli=lambda words=None: _dotted(sys.argv[1:] if words is None else words),
    to_container=lambda values, *_, **__: Settings()._held(values),
    to_object=Settings()._held,
    is_config=lambda value: isinstance(value, Settings),
    **dict.fromkeys("resolve set_struct register_new_resolver save".split(), lambda *_, **__: None),
)
