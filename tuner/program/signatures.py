"""The arguments that training libraries take, and the keys of their files, by version.

`signatures.json` is written by `python -m benchmarks.signatures` from the source of the libraries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.errors import nearest
from tuner.program.knob_names import NAMES

FILE = Path(__file__).with_name("signatures.json")

_TITLES = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}

_RENAMED: Mapping[str, tuple[str, ...]] = {
    "evaluation_strategy": ("eval_strategy",),
    "tokenizer": ("processing_class",),
    "warmup_ratio": ("warmup_steps",),  # a share of all steps, where it is below 1
    "no_cuda": ("use_cpu",),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size",),
    "push_to_hub_model_id": ("hub_model_id",),
    "push_to_hub_token": ("hub_token",),
    "use_auth_token": ("token",),
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "alpha": ("lora_alpha",),
    "dropout": ("lora_dropout",),
    "targets": ("target_modules",),
    "lora_target": ("target_modules",),
    "lora_target_modules": ("target_modules",),
    "liger_kernel": ("use_liger_kernel",),
    "use_liger": ("use_liger_kernel",),
    "flash_attention": ("attn_implementation",),
}
"""Names of older versions and of other libraries: what has taken their place."""

_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "from_pretrained": {
        "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
        "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
        "use_flash_attention_2": 'attn_implementation="flash_attention_2"',
    },
    "LLaMA-Factory": dict.fromkeys(NAMES["max_length"], "cutoff_len"),
}
"""What to write in place of a name, where that is not the same everywhere."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What one class, function or file takes in one version of its library.

    `is_open` is whether it takes more names than these without an error.
    """

    name: str
    library: str
    version: str
    names: frozenset[str]
    is_open: bool = False

    @property
    def of(self) -> str:
        """For people: "SFTConfig in TRL 1.16"."""
        title = _TITLES.get(self.library, self.library)
        short = self.version.removesuffix(".0")
        return f"{self.name} in {title} {short}" if self.name != title else f"{title} {short}"

    def takes(self, name: str) -> bool:
        """Whether an argument of this name, or an item of it ("name.item"), is taken."""
        return name.partition(".")[0] in self.names

    def instead(self, name: str, shown: str, beside: Collection[Signature] = ()) -> str:
        """What to do about a name that is not taken; `beside` are calls that may take it.

        `shown` is its value as it is written.
        """
        own = _OTHERWISE.get(self.name.rpartition(".")[2], {})
        if name in own:
            return f"use {own[name]}"
        meant = [name, *_meaning(name)]
        for one in meant:
            if one in self.names:
                return f"use {one}"
        for other in beside:
            for one in meant:
                if one in other.names:
                    return f"use {other.name}({one}={shown})"
        near = nearest(name, self.names)
        return f"did you mean {near}?" if near is not None else "remove it"


def _meaning(name: str) -> Iterator[str]:
    """Other names of the same setting."""
    yield from _RENAMED.get(name, ())
    for names in NAMES.values():
        if name in names:
            yield from names


@functools.cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def held_versions() -> Mapping[str, str]:
    """The versions of the libraries whose signatures are held, by package."""
    return {name: part["version"] for name, part in _table().items() if name.isidentifier()}


@functools.cache
def signature(name: str) -> Signature | None:
    """What is taken by a class, a function or a tool's file of this name; None where not known."""
    for library, part in _table().items():
        if name in part["takes"]:
            row = part["takes"][name]
            bases = (signature(base) for base in row.get("bases", ()))
            names = frozenset(row["names"].split()).union(*(b.names for b in bases if b))
            return Signature(name, library, part["version"], names, row.get("open", False))
    return None


def beside(name: str, trainer: str = "") -> list[Signature]:
    """The signatures of a trainer for its arguments, and of the arguments for their trainer."""
    other = {"TrainingArguments": "Trainer", "Trainer": "TrainingArguments"}.get(name)
    if other is None:
        swap = ("Trainer", "Config") if name.endswith("Trainer") else ("Config", "Trainer")
        other = name.removesuffix(swap[0]) + swap[1]
    own = trainer.removesuffix("Trainer") + "Config" if name == "TrainingArguments" else ""
    return [found for one in (own, other, trainer) if (found := signature(one)) is not None]
