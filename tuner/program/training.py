"""The trainings of a program: what their trainers, models and adapters were given.

A program runs with stand-ins (`tuner.program.recorded`), and an object counts because it arrives:
a `LoraConfig` of the trainer or of its model, a `BitsAndBytesConfig` of the call that loads it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.errors import Problem
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import (
    COMMAND_LINE,
    DTYPES,
    EMULATE,
    Argument,
    Arguments,
    Found,
    ProgramTraining,
    Undecided,
    decided_by,
)
from tuner.program.calls import own_methods, own_optimizer, read_calls
from tuner.program.fp16 import has_bf16
from tuner.program.places import Places, Row, last, the_object
from tuner.program.program import Program, tool_settings
from tuner.program.recorded import SEEDS, Recorded, record
from tuner.program.releases import IGNORING, lacks, meant, names_of
from tuner.program.trainer import trainer_named

_TRAINERS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "trl": ("SFT", "DPO", "KTO", "ORPO", "CPO", "TPO", "Reward"),
    "unsloth": ("UnslothTrainer",),
}
"""By library: its trainers that are read; TRL's without "Trainer"."""

MODEL_KEYS = (
    "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id",
    "base_model_name", "model_path", "model",
)  # fmt: skip
"""Names of the argument that names a model."""


def read_trainings(
    program: Program, *, gpu: Gpu | None = None, seeds: int = SEEDS
) -> list[ProgramTraining]:
    """The trainings of `program`, with problems noted, not raised; none for a loop of its own."""
    tool = trainer_named(program.trainer)
    if tool and not tool.script:
        return [_of_files(program)]
    if not program.main:
        return []
    recorded = record(program, gpu=gpu, seeds=seeds)
    reader = _Reader(Places(program), recorded, has_bf16(gpu))
    trainings = [reader.training(row) for row in recorded.trainings]
    for training in trainings if program.trainer else ():
        _of_tool(program, training.found)
    return trainings


def read_loops(program: Program, *, seeds: int = SEEDS) -> list[ProgramTraining]:
    """The loops of one's own: their model, the loader that they iterate, and the accumulation."""
    recorded = record(program, seeds=seeds)
    reader = _Reader(Places(program), recorded, has_bf16=True)
    return [reader.loop(row) for row in recorded.loops]


def _of_files(program: Program) -> ProgramTraining:
    found = Found()
    arguments = Arguments(program.trainer, _of_tool(program, found), found)
    return ProgramTraining(program.trainer, {"arguments": arguments}, found)


def _of_tool(program: Program, found: Found) -> dict[str, Argument]:
    """The settings of a tool's file and words, by their newest names; others are noted."""
    tool, kept = program.trainer, dict[str, Argument]()
    values = tool_settings(program)
    for name, argument in values.items():
        text = lacks(tool, name, show(argument.value))
        if text is None or "plugins" in values:  # which have keys of their own
            kept[name] = argument
        elif "." in name or (argument.where == COMMAND_LINE and _is_option(tool, name)):
            continue
        elif instead := meant(tool, name, argument.value):
            found.notes.append(f"{argument.where}: {text}")
            kept.setdefault(instead.argument, replace(argument, value=instead.value))
        elif tool in IGNORING or any(say in text for say in ("did you mean", "until", "since")):
            found.notes.append(f"{argument.where}: {text}")
        else:
            text = f"{text}; what it changes isn't known"
            found.problems.append(Undecided(text, argument.where))
    return kept


def _is_option(tool: str, name: str) -> bool:
    """True for --launcher, which is no setting, and for the beginning of a name."""
    return tool == "Axolotl" or any(one.startswith(name) for one in names_of(tool) or ())


@dataclass(slots=True)
class _Reader:
    """Reads the record of one program."""

    places: Places
    recorded: Recorded
    has_bf16: bool

    def training(self, row: Row) -> ProgramTraining:
        """The groups of one training."""
        found = Found()
        trainer, model = row["trainer"], row.get("model")
        groups = {"trainer": self.arguments(trainer, found)}
        if isinstance(row.get("arguments"), Mapping) and "class" in row["arguments"]:
            groups["arguments"] = self.arguments(row["arguments"], found)
        elif isinstance(row.get("arguments"), Mapping):
            where = groups["trainer"].where("args")
            self._undecided(found, row["arguments"], where, "")
        training = ProgramTraining(self._kind(trainer), groups, found, has_bf16=self.has_bf16)
        training.where = self.places.at(trainer.get("where"))
        training.releases = self.recorded.releases
        training.evaluates = row.get("evaluates") is True
        model = the_object(model)
        if isinstance(model, str):
            training.model_by_name = model
        elif isinstance(model, Mapping) and "class" in model:
            groups |= self._loaded(model, found)
            if model["class"].startswith("unsloth."):
                training.trainer = f"Unsloth {training.trainer}"
        elif isinstance(model, Mapping) and "$unknown" in model:
            self._undecided(found, model, groups["trainer"].where("model"), "model")
        for group in ("reference", "compiled"):
            if isinstance(one := the_object(row.get(group)), Mapping) and "class" in one:
                groups[group] = self.arguments(one, found)
        data = (row.get("train") or {}).get("data") or {}
        if isinstance(loader := the_object(data.get("train_dataloader")), Mapping):
            groups["loader"] = self.arguments(loader, found)
        self._adapt(row, groups, found)
        self._quantize(row, groups, found)
        if not training.trainer.startswith("Unsloth"):  # whose classes take more
            self._of_releases(row, groups, found)
        own_methods(self.places, trainer, found)
        own_optimizer(trainer, training)
        read_calls(self.places, self.arguments, row, training)
        found.notes += [
            f"{self.places.at(dropped['where'])} isn't run: {why.splitlines()[0]}"
            for dropped in self.recorded.dropped
            if (why := dropped["what"].partition(", which ends with ")[2])
        ]
        if row.get("unsure"):
            lines = ", ".join(map(self.places.at, row["unsure"]))
            found.notes.append(f"{lines}: decides whether the training at {training.where} happens")
        return training

    def loop(self, row: Row) -> ProgramTraining:
        """The groups of one loop of the program's own."""
        found, groups = Found(), dict[str, Arguments]()
        model = the_object(row.get("model"))
        if isinstance(model, Mapping) and "class" in model:
            groups |= self._loaded(model, found)
        for name, value in (("loader", row.get("batch")), ("trainer", row.get("accelerator"))):
            if isinstance(one := the_object(value), Mapping) and "class" in one:
                groups[name] = self.arguments(one, found)
        training = ProgramTraining("", groups, found)
        if rounds := row["rounds"]:
            training.accumulation = rounds[0] if len(rounds) == 1 else sum(rounds) / len(rounds)
        return training

    # -- groups ----------------------------------------------------------------------------

    def arguments(self, made: Row, found: Found, title: str = "") -> Arguments:
        """The values that an object or a call was given, and the defaults of its release."""
        call = self.places.call(made.get("where"))
        final, values = made.get("values") or {}, dict[str, Argument]()
        for name, value in (made.get("given") or {}).items():
            where = self.places.of_argument(name, made, call)
            values.update(self._flat(name, final.get(name, value), where))
        for name, (value, where) in (made.get("assigned") or {}).items():
            for old in [one for one in values if one.partition(".")[0] == name]:
                del values[old]
            values.update(self._flat(name, final.get(name, value), self.places.at(where)))
        for name, value in final.items():
            is_filled = isinstance(value, Mapping) and value and not any(k[0] == "$" for k in value)
            if name not in values and is_filled:  # by a script of the library's own
                values.update(self._flat(name, value, self.places.at(made.get("where"))))
        defaults = {
            name: value
            for name, given in final.items()
            if name not in values
            and not isinstance(given, Mapping)
            and (value := self._argument(given, "").value) is not None
        }
        title = title or last(self._library(made))
        return Arguments(title, values, found, defaults)

    def _flat(self, name: str, value: Any, where: str) -> Iterator[tuple[str, Argument]]:
        yield name, self._argument(value, where)
        if isinstance(value, str) and value.startswith("{"):
            with contextlib.suppress(ValueError):
                value = json.loads(value)  # a word of the command line
        if isinstance(value, Mapping) and not any(key.startswith("$") for key in value):
            for key, one in value.items():
                yield from self._flat(f"{name}.{key}", one, where)

    def _argument(self, value: Any, where: str) -> Argument:
        match value:
            case {"$unknown": what}:
                asked = [self.places.at(one) for one in value.get("where") or () if one]
                at = f" at {', '.join(dict.fromkeys(asked))}" if asked else ""
                text = f"is known only when it runs ({what}{at})"
                return Argument(None, where, text, is_unknown=True)
            case {"$object": made}:
                return Argument(made["class"], where, is_made=True)
            case {"$name": name}:
                word = last(str(name))
                return Argument(word if word in DTYPES else name, where, is_made=word not in DTYPES)
            case list():
                items = [self._argument(one, where) for one in value]
                unknown = next((one for one in items if one.problem), None)
                return unknown or Argument(tuple(one.value for one in items), where)
            case Mapping():
                return Argument(str(dict(value)), where, is_made=True)
        return Argument(value, where)

    def _loaded(self, model: Row, found: Found) -> dict[str, Arguments]:
        """The call that loads a model, and what was done to it before it trains."""
        how = model.get("made") or "from_pretrained"
        loaded = self.arguments(model, found, f"{last(model['class'])}.{how}")
        values = dict(loaded.values)
        config = the_object((model.get("given") or {}).get("config"))
        if how.endswith("from_config") and isinstance(config, Mapping) and "class" in config:
            # Weights of one's own, of the shapes that a configuration has.
            values = {"dtype": Argument("float32", loaded.where("0")), **values}
            values |= self.arguments(config, found).values
        if "pretrained_model_name_or_path" in values:
            values["0"] = values.pop("pretrained_model_name_or_path")
        groups = {"model": Arguments(loaded.title, values, found, loaded.defaults)}
        for name, group in (("prepared", "preparation"), ("enabled", "enabled")):
            if isinstance(one := the_object(model.get(name)), Mapping) and "class" in one:
                groups[group] = self.arguments(one, found)
        return groups

    def _adapt(self, row: Row, groups: dict[str, Arguments], found: Found) -> None:
        """The adapters: `peft_config` of the trainer, or those that its model has."""
        lora = the_object(row.get("lora"))
        if not isinstance(lora, Mapping):
            return
        where = groups["trainer"].where("peft_config")
        if "class" not in lora:
            self._undecided(found, lora, where, "lora_rank")
        elif self._library(lora).endswith((".LoraConfig", ".get_peft_model")):
            groups["lora"] = self.arguments(lora, found)
        else:
            kind = last(lora["class"])
            refused = SCHEMAS["causal_lm"].terms["adapter"].refused
            near = {name.replace("_", ""): text for name, text in refused.items()}
            text = near.get(kind.removesuffix("Config").lower(), EMULATE)
            found.problems.append(Problem(f"is {kind}, not predicted: {text}", where))

    def _quantize(self, row: Row, groups: dict[str, Arguments], found: Found) -> None:
        """Only the configuration that the trained model is loaded with counts."""
        model, trainer = the_object(row.get("model")), row["trainer"].get("given") or {}
        options = ((row.get("arguments") or {}).get("given") or {}).get("model_init_kwargs") or {}
        by_trainer = trainer.get("quantization_config") or options.get("quantization_config")
        is_loaded = isinstance(model, Mapping)
        chosen = the_object(model.get("quantization") if is_loaded else by_trainer)
        loaded = groups.get("model", groups["trainer"])
        if not isinstance(chosen, Mapping):
            bits = {n: a for n, a in loaded.values.items() if n in ("load_in_4bit", "load_in_8bit")}
            if any(one.value for one in bits.values()) and not loaded.title.startswith("Fast"):
                groups["quantization"] = Arguments("BitsAndBytesConfig", bits, found)
                text = f"use BitsAndBytesConfig({next(iter(bits))}=True) in transformers 5"
                found.notes.append(f"{loaded.where(next(iter(bits)))}: {text}")
        elif "$unknown" in chosen:
            where = loaded.where("quantization_config")
            self._undecided(found, chosen, where, "precision")
        elif self._library(chosen).endswith(".BitsAndBytesConfig"):
            quantization = self.arguments(chosen, found)
            bits = {n: quantization.take(n) for n in ("load_in_4bit", "load_in_8bit")}
            if any(bits.values()) or any(map(quantization.is_unknown, bits)):
                groups["quantization"] = quantization
            elif isinstance(loaded.values, dict):
                loaded.values.pop("quantization_config", None)
                text = "transformers loads it in 4 bits all the same: pass quantization_config=None"
                found.at_most.append(f"{quantization.where('load_in_4bit')}: false, and {text}")

    def _of_releases(self, row: Row, groups: dict[str, Arguments], found: Found) -> None:
        """Note what the program's releases lack, and read it as what has taken its place."""
        for group in ("arguments", "lora", "trainer"):  # whose arguments may move to the first
            one, own = the_object(row.get(group)), groups.get(group)
            if own is None or not isinstance(one, Mapping) or one["class"] != self._library(one):
                continue  # of the program's own class, which has fields of its own
            path = f"{one['class'].partition('.')[0]}.{last(one['class'])}"
            for name, argument in own.values.items():
                text = lacks(path, name, show(argument.value)) if "." not in name else None
                if text is None:
                    continue
                own.values = {n: a for n, a in own.values.items() if n != name}
                if "(until" not in text and "(since" not in text:
                    found.problems.append(Problem(f"{text} (TypeError)", argument.where))
                    continue
                found.notes.append(f"{argument.where}: {text}")
                instead = meant(path, name, argument.value)
                if instead is not None:
                    to = group if instead.name == path else "arguments"
                    held = groups.setdefault(to, Arguments(to, {}, found))
                    new = replace(argument, value=instead.value)
                    held.values = {instead.argument: new, **held.values}

    def _undecided(self, found: Found, value: Row, where: str, knob: str) -> None:
        text = self._argument(value, where).problem
        how = "pass --model" if knob == "model" else decided_by(knob)
        found.problems.append(Undecided(f"{text}: {how}", where, knob))

    # -- names -----------------------------------------------------------------------------------

    def _library(self, made: Row) -> str:
        """The class of an object, or the first class of a library that one's own is made from."""
        libraries = {*self.recorded.standins, *self.recorded.absent, *_TRAINERS, "peft"}
        names: list[str] = [made["class"], *(made.get("bases") or ())]
        return next((name for name in names if name.split(".")[0] in libraries), names[0])

    def _kind(self, trainer: Row) -> str:
        path = self._library(trainer)
        root, word = path.split(".", maxsplit=1)[0], last(path)
        if word.removesuffix("Trainer" if root == "trl" else "") in _TRAINERS.get(root, ()):
            return {"UnslothTrainer": "SFTTrainer", "Seq2SeqTrainer": "Trainer"}.get(word, word)
        return path if word == "Trainer" else word
