"""Which of the names that trainers and people have for the knobs are about a training."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.records import KnobValue
from tuner.program.edit.place import Value

NAMES = PROGRAM_NAMES
"""By knob: what a program's files and options call it, the most certain name first."""

_TRAINERS_CALLS = re.compile(
    r"(Config|Arguments|Args)$|^(DataLoader|get_peft_model|from_pretrained"
    r"|prepare_model_for_kbit_training|gradient_checkpointing_enable|Accelerator|Trainer"
    r"|SFTTrainer)$"
)
"""Calls whose keyword arguments are settings of a training."""

_ONLY_IN = {("lora_rank", "r"), ("lora_rank", "rank")}
"""Names that mean the knob only inside of something that has LoRA in its name."""

_LORA = re.compile("lora|peft", re.IGNORECASE)

_OTHER_DATA = frozenset((
    "eval", "evaluate", "evaluation", "evaluator", "val", "valid", "validate", "validation",
    "dev", "test", "testing", "infer", "inference", "generate", "generation", "predict",
    "prediction", "valloader", "valset", "valdata", "testloader", "testset", "testdata",
    "evalloader", "evalset", "evaldata", "validloader",
))  # fmt: skip
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

SWITCHES = ("gradient_checkpointing", "use_reentrant", "packing", "fused_kernels")
"""Knobs that an option may turn on without a value."""

_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
BOOLEANS = (*_TRUE, *_FALSE)
"""Words of a command line that say yes or no."""


def as_named(name: str, value: KnobValue) -> KnobValue:
    """The value of a knob under a name that may turn it off: disable_gradient_checkpointing."""
    return not value if isinstance(value, bool) and name.startswith("disable_") else value


def is_trainers_call(name: str) -> bool:
    """Whether the keyword arguments of a call are settings of a training."""
    return bool(_TRAINERS_CALLS.search(name))


def words_of(text: str) -> set[str]:
    """`train` and `loader` of `TrainLoader`."""
    return {word.lower() for word in _WORDS.findall(text)}


def is_other(names: Sequence[str]) -> bool:
    """Whether one of these names says that it is not about the training."""
    return any(words & _OTHER_DATA and "train" not in words for words in map(words_of, names))


def is_meant(knob: str, own: str, around: Sequence[str]) -> bool:
    """Whether `own` is a name of the knob inside of what is called as in `around`."""
    return (knob, own) not in _ONLY_IN or any(_LORA.search(name) for name in around)


def typed(text: str, knob: str) -> Value:
    """The value of a knob that a word of a command line stands for."""
    if knob in SWITCHES and text.lower() in BOOLEANS:
        return text.lower() in _TRUE
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
