"""One setting of a program: its names, its value, and the file or the word that sets it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.records import KnobValue
from tuner.program.edit.place import Location, Value
from tuner.program.edit.source import SourceFile
from tuner.program.parsed import Option
from tuner.space.apply import Path

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
    """True if the keyword arguments of a call are settings of a training."""
    return bool(_TRAINERS_CALLS.search(name))


def words_of(text: str) -> set[str]:
    """`train` and `loader` of `TrainLoader`."""
    return {word.lower() for word in _WORDS.findall(text)}


def is_other(names: Sequence[str]) -> bool:
    """True if one of these names belongs to evaluation or other data."""
    return any(words & _OTHER_DATA and "train" not in words for words in map(words_of, names))


def is_meant(knob: str, own: str, around: Sequence[str]) -> bool:
    """True if `own` means the parameter inside things that are named as in `around`."""
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


@dataclass(frozen=True, slots=True)
class Switch:
    """The words that turn an option on and off; without `off` it is off where it is not there."""

    on: str
    off: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One parameter of a program: the place of its value, or the problem with it.

    `name` is the program's own. The value stands in the command's word number `word`, or at
    `location` in `source`; `switch` marks an option without a value.
    """

    knob: str
    name: str
    value: Value = None
    source: SourceFile | None = None
    location: Location | None = None
    word: int | None = None
    problem: str | None = None
    switch: Switch | None = None

    @property
    def where(self) -> str:
        """For people: "train.py:12", or "the command line"."""
        if self.word is not None or self.source is None or self.location is None:
            return "the command line"
        return self.location.where(self.source.path)

    def written(self, value: KnobValue) -> KnobValue:
        """The program's value for one of the parameter."""
        return as_named(self.name, value)


def of_word(command: Sequence[str], number: int, knob: str, name: str) -> Setting:
    """The setting of a word that is a value, or `name=value`."""
    word = command[number]
    text = word.partition("=")[2] if names_itself(word) else word
    return Setting(knob, name, typed(text, knob), word=number)


def word_at(
    command: Sequence[str], path: Path, knob: str, name: str | None = None
) -> Setting | None:
    """The word that sets `path`: `--train.batch 4`, `train.batch=4`, `--batch=4`.

    A word may leave out the beginning of the path, and may have more before it.
    """
    wanted = [plain(str(step)) for step in path]
    found = None
    for number, word in enumerate(command[1:], 1):
        head, equals, _ = word.partition("=")
        parts = plain(head).split(".")
        dashed = word.startswith("--")
        length = min(len(parts), len(wanted))
        if parts[-length:] != wanted[-length:] or not (dashed or equals):
            continue
        if len(parts) > len(wanted) and is_other(parts[:-length]):
            continue
        if name is None and not is_meant(knob, parts[-1], parts[:-1]):
            continue
        named = name or str(path[-1])
        following = command[number + 1] if number + 1 < len(command) else "--"
        if equals:
            found = of_word(command, number, knob, named)
        elif knob in SWITCHES and following.lower() not in BOOLEANS:
            switch = Switch(word, f"{word}=false")
            found = Setting(knob, named, True, word=number, switch=switch)
        elif not following.startswith("--"):
            found = of_word(command, number + 1, knob, named)
    return found


def is_option(options: Iterable[Option], option: Option, word: str) -> bool:
    """True if a word of the command sets `option`, one of the `options` of its script."""
    head = word.partition("=")[0]
    if head in option.names:
        return True
    if option.action == "BooleanOptionalAction" and head.startswith("--no-"):
        return f"--{head.removeprefix('--no-')}" in option.names
    if head.startswith("--"):
        others = {n for o in options for n in o.names}
        full = [n for n in others if n.startswith(head)]
        return head not in others and len(full) == 1 and full[0] in option.names
    short = [n for n in option.names if len(n) == 2 and n.startswith("-")]
    return any(head.startswith(n) and head[2:].isdigit() for n in short)


def plain(option: str) -> str:
    """`max_length` of `--max-length`."""
    return option.lstrip("-+").replace("-", "_").lower()


def names_itself(word: str) -> bool:
    """True for `name=value`."""
    return bool(re.match(r"[-+]*[A-Za-z_][\w.-]*=", word))
