"""Settings under the names of any trainer: `per_device_train_batch_size=4`, `load_in_4bit=true`.

The names are those of `tuner.core.aliases`. A name that is no parameter of tuner's is shown to the
readers of the trainers that take it: they know whether it has an effect on memory or time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.core.aliases import COMBINED, NO_EFFECT, meanings
from tuner.core.errors import InputError, Note, unknown
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.schema import KnobSchema
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import Argument, Arguments, Found, ProgramTraining, values_of_words
from tuner.program.edit.place import truth
from tuner.program.trainer import trainers
from tuner.space import SearchSpace
from tuner.space.settings import default_values, raise_all

_EXPONENT = re.compile(r"[0-9]+(\.[0-9]+)?[eE][0-9]+")

_OF_LOADING = ("dtype", "torch_dtype", "model_dtype")
"""Names of the dtype of loading: of a quantised model, that of its other weights."""

_PACKING = ("packing", "sample_packing", "neat_packing", "padding_free")
"""Names for batches that are one row. Without a flash kernel that row has a mask."""

_BOTH = {"dora", "rslora"}
"""Kinds of adapters that can be set both: the first decides what they take."""

_ASKED = (
    ("SFTTrainer", "arguments", "trl.SFTConfig"),
    ("SFTTrainer", "arguments", "trl.ModelConfig"),
    ("SFTTrainer", "lora", "peft.LoraConfig"),
    ("SFTTrainer", "quantization", "transformers.BitsAndBytesConfig"),
    ("SFTTrainer", "model", "transformers.from_pretrained"),
    ("Axolotl", "arguments", "Axolotl"),
    ("LLaMA-Factory", "arguments", "LLaMA-Factory"),
    ("DPOTrainer", "arguments", "trl.DPOConfig"),
)
"""The trainers that are asked about a name, by their reader, a group of arguments, and the class
or file that takes the group."""


def translate(
    given: Mapping[str, Any],
    terms: Mapping[str, KnobSchema],
    usual: Mapping[str, KnobValue] | None = None,
) -> dict[str, Any]:
    """The settings that people have `given` under any name, for the parameters `terms`.

    `usual` are the values of parameters that are not given, if they are known. A `Note` names
    settings without effect. Raises one `InputError` with every name that is unknown, contradicts
    another or is not modelled, and every value that is not allowed.
    """
    reader = _Reader(terms, usual or {}, knows_usual=usual is not None)
    for name, value in given.items():
        reader.read(str(name), value)
    reader.settle()
    if reader.without_effect:
        names = ", ".join(reader.without_effect)
        text = f"ignored: {names} (no effect on predicted memory or speed)"
        warnings.warn(text, Note, stacklevel=2)
    return reader.settings


def settings_for(space: SearchSpace, given: Mapping[str, Any]) -> dict[str, Any]:
    """As `translate`, for a space; settings of one's own code are as `given`."""
    if space.workload not in SCHEMAS:
        return dict(given)
    usual = default_values(space)
    found = translate(given, space.terms, usual)
    attention = found.get("attention", usual.get("attention"))
    if found.get("padding") == "packed" and attention == "flash_attention_2":
        del found["padding"]  # its samples stand side by side, as unpacked ones do
    return found


@dataclass(slots=True)
class _Reader:
    terms: Mapping[str, KnobSchema]
    usual: Mapping[str, KnobValue]
    knows_usual: bool
    settings: dict[str, Any] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)
    by: dict[str, str] = field(default_factory=dict)
    """By parameter: the words that set it."""
    loaded: tuple[str, str, Any] | None = None
    """The dtype of loading, as the words, the parameter and the value."""
    tf32: str | None = None
    denied: list[tuple[str, str, str]] = field(default_factory=list)
    """Words such as load_in_4bit=false, with the parameter and the value that it has not."""

    def read(self, name: str, value: Any) -> None:
        said = name if value is True and name.startswith("--") else f"{name}={show(value)}"
        if name in _PACKING and "padding" in self.terms:
            if _truth(value):
                self._set("padding", "packed", said)
            return
        meaning = name if name in self.terms else self._meaning(name)
        if meaning is None:
            self._ask(name, value, said)
            return
        knob, _, implied = meaning.removeprefix("not ").partition("=")
        truth = _truth(value)
        if implied == "tf32":
            self.tf32 = name if truth else None
        elif implied and truth is not None:
            if truth != meaning.startswith("not "):
                self._set(knob, implied, said)
            else:
                self.denied.append((said, knob, implied))
        elif name.startswith("disable_") and truth is not None:
            self._set(knob, not truth, said)
        elif name.rpartition(".")[2] in _OF_LOADING:
            self.loaded = (said, knob, value)
        elif not (meaning != name and knob == "precision" and truth is False):
            # fsdp="full_shard auto_wrap"; and quantization_bit=none says nothing
            self._set(knob, str(value).split()[0] if implied else value, said)

    def _meaning(self, name: str) -> str | None:
        """The meaning of a name, or of the last part of one with dots."""
        for word in dict.fromkeys((name, name.rpartition(".")[2])):
            for meaning in (word, *meanings(word)):
                if meaning.partition("=")[0].removeprefix("not ") in self.terms:
                    return meaning
        return None

    def _set(self, knob: str, value: Any, said: str) -> None:
        combined = COMBINED.get(f"{knob}={show(value)}".lower())
        if combined is not None:
            knob, _, value = combined.partition("=")
        try:
            read = self.terms[knob].read(self._word(self.terms[knob], value))
        except InputError as error:
            self.errors.append(error)
            return
        if {self.settings.get(knob), read} == _BOTH:
            read = "dora"
        elif self.settings.get(knob, read) != read:
            text = f"{self.by[knob]} and {said} contradict each other: both set {knob}"
            self.errors.append(InputError(text, hint="leave one of them out"))
            return
        self.settings[knob] = read
        self.by.setdefault(knob, said)

    def _word(self, term: KnobSchema, value: Any) -> Any:
        """Tuner's word for a value, if people have another."""
        if term.kind == "names" and value in ("all", "linear"):
            return "all-linear"
        if term.kind == "int" and _EXPONENT.fullmatch(str(value)):
            return float(value)  # 5e8
        if term.kind != "word" or value in term.allowed:
            return value
        text = show(value).lower()
        lower = {word.lower(): word for word in term.allowed}
        return lower.get(text) or next((m for m in meanings(text) if m in term.allowed), value)

    def _ask(self, name: str, value: Any, said: str) -> None:
        answer = _answer(name, show(value))
        if answer is None:
            from tuner.program.releases import names_of

            names = frozenset(NO_EFFECT).union(*(names_of(of) or () for *_, of in _ASKED))
            self.errors.append(unknown("parameter", name, self.terms, spellings=names))
        elif answer:
            self.errors.append(InputError(f"{said} is not modelled", hint=answer))
        else:
            self.without_effect.append(name)

    def settle(self) -> None:
        """Read the names whose meaning depends on others. Raises all errors."""
        settings = self.settings
        if self.loaded is not None:
            said, knob, value = self.loaded
            kept = settings.get(knob, self.usual.get(knob))
            knob = "compute_dtype" if kept in QUANTIZED else knob
            if knob not in settings:
                self._set(knob, value, said)
        if self.tf32 is not None and settings.get("precision") == "fp32":
            settings["precision"] = "tf32"
        elif self.tf32 is not None:
            self.without_effect.append(self.tf32)  # of other dtypes
        for said, knob, value in self.denied:
            if knob == "mixed_precision":
                settings.setdefault(knob, "no")
            kept = settings.get(knob, self.usual.get(knob))
            is_unknown = kept is None and not self.knows_usual
            if is_unknown or (kept is not None and show(kept) == value):
                by = self.by.get(knob, f"{knob}={value}, which holds where nothing else is set")
                hint = f"set {knob} to the value that you want"
                why = f"does not say what {knob} is" if is_unknown else f"contradicts {by}"
                self.errors.append(InputError(f"{said} {why}", hint=hint))
        raise_all(self.errors)


def _truth(value: Any) -> bool | None:
    """True or false for the value of a switch, else None: also bf16=auto and load_in_4bit=none."""
    text = show(value).lower()
    return text == "auto" if text in ("auto", "none", "null") else truth(text)


def _answer(name: str, text: str) -> str | None:
    """Why a setting is not modelled; "" if it has no effect, and None for an unknown name."""
    from tuner.program.releases import RENAMED, takes
    from tuner.program.trainers.deepspeed import ZERO, zero_knobs

    first, _, rest = name.partition(".")
    if first == ZERO:
        _, problems = zero_knobs({"stage": 2, rest: _argument(rest, text).value}, first)
        return "; ".join(problem.message for problem in problems)
    for each in dict.fromkeys((name, RENAMED.get(name, name))):
        if each in NO_EFFECT or first in NO_EFFECT:
            return ""
        for trainer, group, of in _ASKED:
            if takes(of, each):
                is_unset = text.lower() in ("none", "null")
                return "" if is_unset else _of_reader(trainer, group, each, text)
    return None


def _of_reader(trainer: str, group: str, name: str, text: str) -> str:
    """The answer of a trainer's reader: the problems that it notes, or that it leaves it out."""
    reading = next(r for t in trainers() for r in t.readings if r.trainer == trainer)
    noted: list[list[str]] = []
    for values in ({}, {name: _argument(name, text)}):
        found = Found()
        reading.plan(ProgramTraining(trainer, {group: Arguments(group, values, found)}, found))
        left = ["predictions leave it out"] if any(name in one for one in found.left_out) else []
        problems = [problem.message for problem in found.problems]
        noted.append([*problems, *found.at_most, *([] if found.at_most else left)])
    return "; ".join(note for note in noted[1] if note not in noted[0])


def _argument(name: str, text: str) -> Argument:
    return values_of_words((f"--{name}={text}",))[name]
