"""Arguments of a training by name, as a call, a file or a command line has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuner.core.aliases import meanings
from tuner.core.errors import Problem
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.edit.place import read_number, truth
from tuner.program.edit.source import SourceFile

TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("trainers.json").read_text("utf-8"))
"""Tables of the trainers' settings, by name."""

WITHOUT_MEMORY = {name: tuple(text.split()) for name, text in TABLES["without_memory"].items()}
"""Beginnings of names that have no part in the memory and time of a training step, by trainer or
class; those under "" of every trainer."""

EMULATE = "`tuner check` emulates it where PyTorch's CUDA build and the trainer are installed"
"""The advice for a setting that is not predicted."""

DTYPES: Mapping[str, str] = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
}  # fmt: skip
"""By the names that PyTorch has for them: tuner's."""

_KNOBS = {"peft_config": "lora_rank", "quantization_config": "precision"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument as it arrives; `problem` says what is wrong with its value.

    `is_made` marks an object, by its class, and `is_unknown` a value that only the run knows.
    """

    value: Any
    where: str
    problem: str | None = None
    is_made: bool = False
    is_unknown: bool = False


Effect = Literal["", "saves", "adds"]


@dataclass(frozen=True, slots=True)
class Undecided(Problem):
    """A value that only the run knows; `knob` is the parameter that decides it, or empty.

    Without it a prediction is an upper bound if it "saves" memory, a lower one if it "adds" some.
    """

    knob: str = ""
    effect: Effect = ""


ANY = "**"
"""The argument that stands for those of an unknown mapping, and the parameters that they set."""
OWN_MODULE = "module"
"""In place of a parameter: the model itself is only known when the program runs."""


def knob_of(name: str) -> str:
    """The parameter that an argument of this name sets; "" if there is none."""
    terms, own = SCHEMAS["causal_lm"].terms, name.rpartition(".")[2]
    for meaning in (_KNOBS.get(own, own), *meanings(own)):
        knob = meaning.removeprefix("not ").partition("=")[0]
        if knob in terms:
            return knob
    return ""


def decided_by(knob: str) -> str:
    """The advice for an unknown value: "--set micro_batch=1 decides"."""
    if not knob:
        return EMULATE
    return f"--set {knob}={show(SCHEMAS['causal_lm'].terms[knob].default)} or another value decides"


@dataclass(slots=True)
class Found:
    """The results of reading: problems, assumed defaults, and settings that were left out.

    `at_most` are those of the left out that only save memory: a prediction without them is an upper
    bound as far as the rest is exact.
    """

    problems: list[Problem] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    at_most: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Arguments:
    """The arguments of one call, or the values of one file; what is taken of them is noted.

    `defaults` are those of the release that the program uses.
    """

    title: str
    values: dict[str, Argument]
    found: Found
    defaults: Mapping[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def take(self, name: str, default: Any = None, *, quietly: bool = False) -> Any:
        """The value of `name`, else the release's default, else `default`.

        A default is noted unless `default` is None, or `quietly`.
        """
        self.taken.add(name)
        argument = self.values.get(name)
        if argument is None:
            own = self.defaults.get(name)
            chosen = default if own is None else own
            if default is not None and not quietly:
                self.found.assumed.append(f"{name}={show(chosen)}")
            return chosen
        if argument.is_unknown:
            self.undecided(name)
            return default
        if argument.problem is not None:
            self.found.problems.append(Problem(argument.problem, self.where(name)))
            return default
        return default if argument.value is None else argument.value

    def is_unknown(self, name: str) -> bool:
        """True for an argument whose value only the run knows."""
        return name in self.values and self.values[name].is_unknown

    def undecided(self, name: str, effect: Effect = "") -> None:
        """Note that only the run knows the value of `name`."""
        self.taken.add(name)
        knob = knob_of(name)
        text = f"{self.values[name].problem}: {decided_by(knob)}"
        self.found.problems.append(Undecided(text, self.where(name), knob, effect))

    def where(self, name: str) -> str:
        """For people: "train.py:12 max_length"."""
        argument = self.values.get(name)
        shown = f"{self.title}(...)" if name.isdigit() else name
        return f"{argument.where} {shown}" if argument is not None else f"{self.title} {name}"

    def refuse(self, name: str, why: str) -> None:
        """Note that the value of `name` cannot be predicted."""
        self.found.problems.append(Problem(why, self.where(name)))

    def adds(self, name: str, what: str, knob: str = "") -> None:
        """Note that `name` may take memory in a way that is not modelled."""
        text = f"{what} isn't modelled, and takes more memory: {decided_by(knob)}"
        self.found.problems.append(Undecided(text, self.where(name), knob, "adds"))

    def bound(self, name: str, what: str) -> None:
        """Note that `name` saves memory in a way that is not modelled."""
        text = f"{self.where(name)}: {what} isn't modelled, and only saves memory"
        self.found.at_most.append(text)

    def leave_out(self, *tables: str, more: Sequence[str] = ()) -> None:
        """Name the settings not taken, without those of `tables` of `WITHOUT_MEMORY` and `more`."""
        prefixes = [*more, *(one for table in tables for one in WITHOUT_MEMORY[table])]
        for name, argument in self.values.items():
            outer = {name[:end] for end, letter in enumerate(name) if letter == "."}
            if {name, *outer} & self.taken or name.startswith(tuple(prefixes)):
                continue
            if name == ANY and argument.problem is not None:
                self.found.problems.append(Undecided(argument.problem, argument.where, ANY))
            else:
                self.found.left_out.append(self.where(name))


@dataclass(slots=True)
class ProgramTraining:
    """The training of a program, run by the class or tool `trainer`.

    Of a script `groups` has what arrives: "trainer", "arguments", "model", "reference", "lora",
    "quantization", "preparation", "enabled", "compiled" and "loader". Of a tool's file
    all is in "arguments".
    """

    trainer: str
    groups: dict[str, Arguments]
    found: Found
    model_by_name: str | None = None
    """The model, where the trainer itself loads it."""
    lengths: tuple[Argument, ...] = ()
    """The values of `max_length` in the calls of tokenizers."""
    has_bf16: bool = True
    """The GPU computes in bf16."""
    evaluates: bool = False
    """A script calls `evaluate` of its trainer."""
    where: str = ""
    """The place of the trainer."""
    resized: Argument | None = None
    """The rows that `resize_token_embeddings` gives the embeddings; None if it isn't called."""
    new_tokens: list[Argument] = field(default_factory=list)
    """The tokens that the program adds to its tokenizers."""
    accumulation: int | None = None
    """Backward passes per step of the program's own loop."""
    is_split: bool = False
    """The loop has several backward passes of one batch between two steps."""

    def __getitem__(self, group: str) -> Arguments:
        return self.groups.get(group) or Arguments(group, {}, self.found)

    def has(self, group: str) -> bool:
        """True if there is such a call."""
        return group in self.groups


COMMAND_LINE = "the command line"
"""The place of a word."""


def values_of_files(files: Sequence[SourceFile]) -> dict[str, Argument]:
    """The values of files by key, those of nested keys with dots between them."""
    values: dict[str, Argument] = {}
    for source in files:
        for place in source.places:
            name = ".".join(map(str, place.path))
            if not name:
                continue  # the file itself
            where, problem = place.where(source.path), place.problem
            if place.kind in ("list", "mapping"):
                # What stands in it has places of its own.
                values[name] = Argument(place.value or True, where)
            else:
                values[name] = Argument(place.value, where, problem)
    return values


SWITCHES = ("gradient_checkpointing", "use_reentrant", "packing", "fused_kernels")
"""Parameters that words such as "yes" set."""


def typed(text: str, name: str) -> KnobValue:
    """The value that a word of a command line stands for; "no" and 0 are false of a switch."""
    said = truth(text) if name in SWITCHES or text.lower() in ("true", "false") else None
    number = read_number(text) if said is None else None
    return said if said is not None else text if number is None else number


def values_of_words(words: Sequence[str]) -> dict[str, Argument]:
    """The values of options by name: true for `--bf16`, both words for `--modules q k`.

    The items of a dictionary in JSON follow it, as `name.key`.
    """
    said: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            head, equals, text = word.lstrip("-").partition("=")
            name = head.replace("-", "_")
            said |= {name: [text] if equals else []} if name else {}
        elif name:
            said[name].append(word)
    values: dict[str, Argument] = {}
    for name, texts in said.items():
        read = tuple(typed(text, name) for text in texts)
        values[name] = Argument(read[0] if len(read) == 1 else read or True, COMMAND_LINE)
        if len(texts) == 1 and texts[0].startswith("{"):
            try:
                items = json.loads(texts[0]).items()
                values |= {f"{name}.{key}": Argument(one, COMMAND_LINE) for key, one in items}
            except ValueError:
                why = f"is {texts[0]}, which is no JSON"
                values[name] = Argument(None, COMMAND_LINE, why)
    return values


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """The values of options by name."""
    return {name: argument.value for name, argument in values_of_words(words).items()}


def assignments_of(words: Sequence[str]) -> dict[str, Argument]:
    """The values of words such as `optimizer.lr=1e-4`."""
    pairs = (word.partition("=") for word in words if "=" in word and not word.startswith("-"))
    return {name: Argument(typed(text, name), COMMAND_LINE) for name, _, text in pairs}


def file_in(word: str) -> str:
    """The part of a word that may name a file: "a.yaml" of `--config=a.yaml`."""
    return word.partition("=")[2] if word.startswith("-") else word
