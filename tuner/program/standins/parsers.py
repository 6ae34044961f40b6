"""`HfArgumentParser` and `TrlParser`, and TRL's functions of a `ModelConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from typing import Any

from tuner.program.standins.configs import RENAMED, Config, config


def truth(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    if str(text).lower() in ("yes", "true", "t", "y", "1"):
        return True
    if str(text).lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"truth value expected: got {text}")


def _fields(cls: Any) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """Name, text of the type, default (or MISSING) and metadata of each field."""
    if isinstance(cls, type) and issubclass(cls, Config) and "__init__" not in vars(cls):
        missing = dataclasses.MISSING
        told = cls._fields.items()
        return [(n, t.get("type", ""), t.get("default", missing), {}) for n, t in told]
    fields = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default, kind = field.default, field.type
        # The library's parser does not look at the factory of a flag, which is False then.
        if field.default_factory is not dataclasses.MISSING and kind not in (bool, "bool"):
            default = field.default_factory()
        text = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        if not isinstance(kind, (str, type)) or getattr(kind, "__args__", None):
            text = str(kind)
        if isinstance(kind, type) and hasattr(kind, "__members__"):
            members: Any = kind
            text = f"Literal[{', '.join(repr(each.value) for each in members)}]"
        fields.append((field.name, text, default, dict(field.metadata)))
    return fields


def converter(text: str) -> dict[str, Any]:
    """How argparse reads a field, by the text of its type."""
    text = re.sub(r"\b(typing|builtins|t)\.|'(?=\w+\[)", "", text).strip("'\" ")
    text = re.sub(r"^(Optional|Annotated)\[(.*)\]$", r"\2", text)
    text = re.sub(r"^Union\[(.*)\]$", lambda m: m[1].replace(", ", " | "), text)
    if not text.startswith("Literal"):
        parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", text)]
        parts = [part for part in parts if part not in ("None", "NoneType")]
        text = next((part for part in parts if part == "str"), parts[0] if parts else "str")
    if text.startswith("Literal"):
        words = [eval(word) for word in re.findall(r"'[^']*'|\"[^\"]*\"|-?[\d.]+", text)]
        kind = type(words[0]) if words else str
        return {"type": kind, "choices": words} if words else {}
    if text == "bool":
        return {"type": truth, "nargs": "?", "const": True}
    if text.lower().startswith(("list", "tuple", "sequence")):
        inner = re.search(r"\[(\w+)", text)
        return {
            "nargs": "+",
            "type": {"int": int, "float": float}.get(inner[1] if inner else "", str),
        }
    if text.lower().startswith("dict"):
        return {"type": json.loads}
    return {"type": {"int": int, "float": float}.get(text, str)}


_OF_MODEL = re.compile(
    "torch_dtype|lora_|load_in_|bnb_|use_(peft|flash|bnb)|attn_|model_|tokenizer_"
)
"""Names of arguments that older releases had beside the model's name."""


class HfArgumentParser(argparse.ArgumentParser):
    _path = "transformers.HfArgumentParser"

    def __init__(self, dataclass_types: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(*args, **kwargs)
        types = dataclass_types or []
        self.dataclass_types = list(types) if isinstance(types, (list, tuple)) else [types]
        self._own: dict[str, Any] = {}
        for cls in self.dataclass_types:
            for name, text, default, metadata in _fields(cls):
                self._add(name, text, default, metadata)

    def _add(self, name: str, text: str, default: Any, metadata: dict[str, Any]) -> None:
        options = [f"--{name}"]
        if "_" in name:
            options.append(f"--{name.replace('_', '-')}")
        aliases = metadata.get("aliases", [])
        options += [aliases] if isinstance(aliases, str) else aliases
        options = [each for each in options if each not in self._option_string_actions]
        if not options:
            return
        missing = default is dataclasses.MISSING
        how = converter(text)
        if isinstance(default, list) and "nargs" not in how:
            how = {"nargs": "+", "type": how.get("type", str)}
        if text == "bool" or text in ("<class 'bool'>", "Optional[bool]", "bool | None"):
            how = converter("bool")
            if default is True:
                negated = [f"--no_{name}", f"--no-{name.replace('_', '-')}"]
                self.add_argument(*dict.fromkeys(negated), action="store_false", dest=name)
                default = True
        if missing and text == "bool":
            self.add_argument(*options, dest=name, default=False, **how)
            return
        self._own[name] = None if missing else default
        self.add_argument(*options, dest=name, default=self._own[name], required=missing, **how)

    def _namespace(self, words: Any) -> tuple[argparse.Namespace, list[str]]:
        """Only what was given: a default of the class's own stays the class's."""
        kept = []
        for action in self._actions:
            if action.dest in self._own and action.default is self._own[action.dest]:
                kept.append((action, action.default))
                action.default = argparse.SUPPRESS
        try:
            return self.parse_known_args(words)
        finally:
            for action, default in kept:
                action.default = default

    def _made(self, values: dict[str, Any]) -> list[Any]:
        made = []
        for cls in self.dataclass_types:
            names = {name for name, *_ in _fields(cls)}
            made.append(cls(**{n: values.pop(n) for n in list(values) if n in names}))
        return made

    def parse_args_into_dataclasses(
        self,
        args: Any = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: Any = None,
        args_file_flag: Any = None,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        beside = args_filename
        if beside is None and look_for_args_file and sys.argv and sys.argv[0].endswith(".py"):
            beside = sys.argv[0][:-3] + ".args"
        if beside and os.path.exists(beside):
            with open(beside) as file:
                words = file.read().split() + words
        namespace, rest = self._namespace(words)
        values = vars(namespace)
        made = self._made(values)
        if values:
            made.append(argparse.Namespace(**values))
        if return_remaining_strings:
            return (*made, rest)
        return self._with_others(made, rest)

    def _with_others(self, made: list[Any], words: list[str]) -> tuple[Any, ...]:
        """Words that this release lacks, kept as given: whoever reads the record tells them."""
        configs = [each for each in made if isinstance(each, Config)]
        if words and (not configs or not words[0].startswith("--")):
            raise ValueError(f"Some specified arguments are not used: {words}")
        for at, word in enumerate(words):
            name, _, value = word.removeprefix("--").partition("=")
            follows = words[at + 1] if at + 1 < len(words) else "--"
            if word.startswith("--"):
                value = value or ("true" if follows.startswith("--") else follows)
                try:
                    given = json.loads(value)
                except ValueError:
                    given = value
                name = name.replace("-", "_")
                for each in configs:
                    each.__dict__.setdefault(name, given)
                # The class that had it is the one whose other names begin like it.
                has = "model_name_or_path" if _OF_MODEL.match(name) else "output_dir"
                owner = next((each for each in configs if has in each._fields), configs[0])
                newest = RENAMED.get(name, name)
                owner = next((each for each in configs if newest in each._fields), owner)
                if newest in owner._fields and newest not in owner._note.given:
                    owner.__dict__[newest] = given
                owner._note.given[name] = given
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


def _yaml(path: Any) -> Any:
    import yaml

    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


class TrlParser(HfArgumentParser):
    _path = "trl.TrlParser"

    def parse_args_and_config(
        self,
        args: Any = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        unused: list[str] = []
        at = next((i for i, w in enumerate(words) if w.split("=")[0] == "--config"), None)
        if at is not None:
            path = words[at].partition("=")[2] or words[at + 1]
            del words[at : at + (1 if "=" in words[at] else 2)]
            values = _yaml(path) or {}
            os.environ.update({k: str(v) for k, v in (values.pop("env", None) or {}).items()})
            unused = self.set_defaults_with_config(**values)
        *made, rest = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        if return_remaining_strings:
            return (*made, rest + unused)
        return self._with_others(made, rest + unused if fail_with_unknown_args else [])

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        unused = []
        for action in self._actions:
            if action.dest in values:
                value = values.pop(action.dest)
                if isinstance(value, str) and callable(action.type) and not action.nargs:
                    value = action.type(value)
                action.default, action.required = value, False
                self._own.pop(action.dest, None)
        for name, value in values.items():
            unused += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
        return unused


def get_peft_config(model_args: Any, *args: Any, **kwargs: Any) -> Any:
    if not model_args.use_peft:
        return None
    pairs = {
        "task_type": "lora_task_type",
        "r": "lora_r",
        "target_modules": "lora_target_modules",
        "target_parameters": "lora_target_parameters",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
        "modules_to_save": "lora_modules_to_save",
    }
    held = vars(model_args)
    given = {name: held[own] for name, own in pairs.items() if own in held}
    if isinstance(given.get("target_modules"), list) and len(given["target_modules"]) == 1:
        given["target_modules"] = given["target_modules"][0]
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
