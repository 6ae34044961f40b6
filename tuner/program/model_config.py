"""TRL's ModelConfig as the calls that scripts make of it (1.16: model_config.py, utils.py)."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.program.arguments import Argument, Arguments

MADE_OF_IT = {"get_peft_config": "lora", "get_quantization_config": "quantization"}
"""Functions of TRL that make a configuration of a ModelConfig, or None."""

_WHERE = "TRL's ModelConfig"

_BITS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage")
_MODEL_NAMES = {
    "model_name_or_path": "0",
    "dtype": "dtype",
    "torch_dtype": "torch_dtype",
    "attn_implementation": "attn_implementation",
}
_LORA_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_NAMES = {*_BITS, *_MODEL_NAMES, *_LORA_NAMES, "use_peft", "use_bnb_nested_quant"}


def is_of_it(name: str) -> bool:
    """True for the fields of a ModelConfig."""
    return name in _NAMES or name.startswith("lora_")


def groups_of(flat: Arguments) -> dict[str, Arguments]:
    """The model, and its adapters and quantization if there are some."""
    found = flat.found
    model = _renamed(flat, _MODEL_NAMES)
    model.setdefault("dtype", Argument("float32", _WHERE))
    groups = {"model": Arguments(flat.title, model, found)}
    if flat.take("use_peft", False, quietly=True):
        defaults = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
        lora = {name: Argument(value, _WHERE) for name, value in defaults.items()}
        groups["lora"] = Arguments(flat.title, {**lora, **_renamed(flat, _LORA_NAMES)}, found)
    if flat.take("load_in_4bit", quietly=True) or flat.take("load_in_8bit", quietly=True):
        nested = flat.take("use_bnb_nested_quant", False, quietly=True)
        quantization = {
            "bnb_4bit_quant_type": Argument("nf4", _WHERE),
            "bnb_4bit_use_double_quant": Argument(nested, _WHERE),
            "bnb_4bit_compute_dtype": model["dtype"],
            **{name: argument for name, argument in flat.values.items() if name in _BITS},
        }
        groups["quantization"] = Arguments(flat.title, quantization, found)
    return groups


def _renamed(flat: Arguments, names: Mapping[str, str]) -> dict[str, Argument]:
    found = {}
    for name, argument in flat.values.items():
        first, dot, rest = name.partition(".")
        if first in names:
            found[f"{names[first]}{dot}{rest}"] = argument
    return found
