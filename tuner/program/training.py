"""The trainings of a program: what their trainers, models and adapters were given.

A program runs with stand-ins (`tuner.program.recorded`), and an object counts because it arrives:
a `LoraConfig` of the trainer or of its model, a `BitsAndBytesConfig` of the call that loads it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.errors import InputError, Problem
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.setup.common import OPTIMIZERS
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import (
    ANY,
    COMMAND_LINE,
    DTYPES,
    EMULATE,
    OWN_MODULE,
    TABLES,
    Argument,
    Arguments,
    Effect,
    Found,
    ProgramTraining,
    Undecided,
    decided_by,
)
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.places import Places, Row, last, made
from tuner.program.program import Program, tool_settings
from tuner.program.recorded import SEEDS, Recorded, record
from tuner.program.releases import IGNORING, default, lacks, meant, names_of
from tuner.program.standins import NOT_INSTALLED
from tuner.program.trainer import trainer_named
from tuner.space.models.catalogue import HUB_ID, get_entry

_KINDS: Mapping[tuple[str, str], str] = {
    ("transformers", "Trainer"): "Trainer", ("transformers", "Seq2SeqTrainer"): "Trainer",
    ("unsloth", "UnslothTrainer"): "SFTTrainer",
}  # fmt: skip
"""By library and class: the trainer as it is read. Others are read by the name of their class."""

MODEL_KEYS = (
    "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id",
    "base_model_name", "model_path", "model",
)  # fmt: skip
"""Names of the argument that names a model."""


def read_trainings(
    program: Program, *, gpu: Gpu | None = None, seeds: int = SEEDS
) -> list[ProgramTraining]:
    """The trainings of `program`, with problems noted, not raised; none for a loop of its own."""
    tool, found = trainer_named(program.trainer), Found()
    if tool and not tool.script:
        arguments = Arguments(program.trainer, _of_tool(program, found), found)
        return [ProgramTraining(program.trainer, {"arguments": arguments}, found)]
    if not program.main:
        return []
    recorded = record(program, gpu=gpu, seeds=seeds)
    reader = _Reader(Places(program), recorded, gpu is None or gpu.has_bf16)
    trainings = [reader.training(row) for row in recorded.trainings]
    for training in trainings if program.trainer else ():
        _of_tool(program, training.found)
    return trainings


def read_loops(
    program: Program, *, gpu: Gpu | None = None, seeds: int = SEEDS
) -> list[ProgramTraining]:
    """The loops of one's own: their model, the loader that they iterate, and the accumulation."""
    recorded = record(program, gpu=gpu, seeds=seeds)
    return [_Reader(Places(program), recorded).loop(row) for row in recorded.loops]


def _of_tool(program: Program, found: Found) -> dict[str, Argument]:
    """The settings of a tool's file and words, by their newest names; others are noted."""
    tool, kept = program.trainer, dict[str, Argument]()
    values, names = tool_settings(program), names_of(tool) or ()
    for name, argument in values.items():
        text = lacks(tool, name, show(argument.value))
        # --launcher is no setting, and a word may be the beginning of a name.
        is_option = tool == "Axolotl" or any(one.startswith(name) for one in names)
        if text is None or "plugins" in values:  # which have keys of their own
            kept[name] = argument
        elif "." in name or (argument.where == COMMAND_LINE and is_option):
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


_LENGTHS = ("max_length", "model_max_length")
"""Names of the length of examples in calls of tokenizers."""

_MERGES = ("merge_and_unload", "save_pretrained_merged")
"""Calls after the training that make weights on the GPU, which are not predicted."""

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of models that change the dtype of their weights."""

_SHAPES = re.compile(
    r"n_(layer|embd|head|inner|positions)|num_.*(layers|heads|experts|experts_per_tok)"
    r"|(?!max_lora_).*_(size|dim|rank|layers)|layer_types|tie_word_embeddings"
)
"""Settings of a model's configuration that are shapes of its weights or of what they compute."""

_ATTENTION = ("attn_implementation", "_attn_implementation")
"""Names of the attention in a call and in a configuration."""

_GENERIC = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
"""Linear layers that a stand-in lists for any model: a program that lists them means them all."""


@dataclass(slots=True)
class _Reader:
    """Reads the record of one program."""

    places: Places
    recorded: Recorded
    has_bf16: bool = True

    def training(self, row: Row) -> ProgramTraining:
        """The groups of one training."""
        found, trainer, model = Found(), row["trainer"], row.get("model")
        call = self.arguments(trainer, found)
        groups = {"trainer": call, **self._groups(row, found, ("arguments",))}
        where, path = self.places.at(trainer.get("where")), self._library(trainer)
        word = last(path)
        kind = _KINDS.get((path.partition(".")[0], word), path if word == "Trainer" else word)
        training = ProgramTraining(
            kind, groups, found, has_bf16=self.has_bf16, where=where,
            evaluates=row.get("evaluates") is True,
        )  # fmt: skip
        if "args" in call.values and (unknown := call.values.pop(ANY, None)) is not None:
            own = "train_dataset max_length" if kind == "Trainer" else "peft_config lora_rank"
            for name, knob in (own.split(), ("optimizers", "optimizer")):
                if name not in call:
                    text = f"{unknown.problem}, and may have {name}: {decided_by(knob)}"
                    found.problems.append(Undecided(text, f"{unknown.where} {knob}", knob))
        self._undecided(found, row.get("arguments"), call.where("args"))
        self._undecided(found, model, call.where("model"), "model")
        if isinstance(model, Mapping) and "$unknown" in model:  # and all that was done to it
            for knob in ("precision", *(("lora_rank",) if row.get("lora") is None else ())):
                text = f"is known only when it runs, as its model is: {decided_by(knob)}"
                found.problems.append(Undecided(text, f"{where} {knob}", knob))
        if isinstance(model, str):
            training.model_by_name = model
        elif loaded := made(model):
            groups |= self._loaded(loaded, found)
            if self._library(loaded).startswith("torch."):
                text = "is a module of the program's own, and only a run tells its memory"
                text = f"{last(loaded['class'])} {text}"
                found.problems.append(Undecided(text, call.where("model"), OWN_MODULE))
            if loaded["class"].startswith("unsloth."):
                training.trainer = f"Unsloth {training.trainer}"
        groups |= self._groups(row, found, ("reference", "compiled", "loader"))
        is_listed = bool((made(model) or {}).get("listed"))
        self._adapt(row.get("lora"), training, is_listed=is_listed)
        self._quantize(row, groups, found)
        if not training.trainer.startswith("Unsloth"):  # whose classes take more
            self._of_releases(row, groups, found)
        self._own_parts(trainer, training)
        self._calls(row, training)
        found.notes += [
            f"{self.places.at(dropped['where'])} isn't run: {why.splitlines()[0]}"
            for dropped in self.recorded.dropped
            if (why := dropped["what"].partition(", which ends with ")[2])
        ]
        absent = ", ".join(
            f"{dropped['what'].removesuffix(NOT_INSTALLED)} ({self.places.at(dropped['where'])})"
            for dropped in self.recorded.dropped
            if dropped["what"].endswith(NOT_INSTALLED)
        )
        if absent:
            found.notes.append(f"not installed here, so what it does isn't known: {absent}")
        if row.get("unsure"):
            lines = ", ".join(map(self.places.at, row["unsure"]))
            found.notes.append(f"{lines}: decides whether the training at {where} happens")
        return training

    def loop(self, row: Row) -> ProgramTraining:
        """The groups of one loop of the program's own."""
        found, model = Found(), made(row.get("model"))
        groups = self._loaded(model, found) if model else {}
        parts = {"loader": row.get("batch"), "trainer": row.get("accelerator")}
        groups |= self._groups(parts, found, parts)
        training = ProgramTraining("", groups, found, where=self.places.at(row["where"]))
        training.is_split = bool(row.get("is_split"))
        if isinstance(rounds := row["rounds"], int) and not training.is_split:
            training.accumulation = rounds
        return training

    # -- groups ----------------------------------------------------------------------------

    def _groups(self, row: Row, found: Found, names: Iterable[str]) -> dict[str, Arguments]:
        parts = {name: one for name in names if (one := made(row.get(name)))}
        return {name: self.arguments(one, found) for name, one in parts.items()}

    def arguments(self, one: Row, found: Found, title: str = "") -> Arguments:
        """The values that an object or a call was given, and the defaults of its release."""
        call = self.places.call(one.get("where"))
        final, values = one.get("values") or {}, dict[str, Argument]()
        for name, value in (one.get("given") or {}).items():
            where = self.places.of_argument(name, one, call)
            values.update(self._flat(name, final.get(name, value), where))
        for name, (value, where) in (one.get("assigned") or {}).items():
            for old in [old for old in values if old.partition(".")[0] == name]:
                del values[old]
            values.update(self._flat(name, final.get(name, value), self.places.at(where)))
        defaults = {}
        for name, value in final.items():
            if name in values:
                continue
            if not isinstance(value, Mapping):
                if (usual := self._argument(value, "").value) is not None:
                    defaults[name] = usual
            elif value and not any(key[0] == "$" for key in value):  # by a script of the library's
                values.update(self._flat(name, value, self.places.at(one.get("where"))))
        return Arguments(title or last(self._library(one)), values, found, defaults)

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
            case {"$object": one}:
                return Argument(one["class"], where, is_made=True)
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
        config = made((model.get("given") or {}).get("config"))
        self._changed(model, config, loaded)
        if _is_own(model) and config:
            # Weights of one's own, of the shapes that a configuration has, and of its dtype.
            is_stored = "pretrained_model_name_or_path" in (config.get("given") or {})
            word = "auto" if is_stored else "float32"
            dtype = {"dtype": Argument(word, loaded.where("0"))}
            loaded.values = {**dtype, **loaded.values, **self.arguments(config, found).values}
        if "pretrained_model_name_or_path" in loaded:
            loaded.values["0"] = loaded.values.pop("pretrained_model_name_or_path")
        if (named := loaded.values.get("0")) is not None and named.is_made:
            del loaded.values["0"]
            loaded.values.setdefault("dtype", Argument("float32", named.where))
            text = f"the model is made of {last(str(named.value))}(...)"
            how = "save that with config.save_pretrained(FOLDER) and pass --model FOLDER"
            found.problems.append(Undecided(f"{text}: {how}", named.where, "model"))
        calls = {"preparation": model.get("prepared"), "enabled": model.get("enabled")}
        return {"model": loaded, **self._groups(calls, found, calls)}

    def _changed(self, model: Row, config: Row | None, loaded: Arguments) -> None:
        """Note shapes and attention that a program sets, and parts of its model that it replaces.

        What a configuration gets once the model is loaded changes no weights.
        """
        problems = loaded.found.problems
        for one in (config or {}, {**model, "assigned": {}}):
            at = one.get("where")
            told = {name: [value, at] for name, value in (one.get("given") or {}).items()}
            for name, (value, line) in {**told, **(one.get("assigned") or {})}.items():
                where = self.places.at(line)
                if name in _ATTENTION:
                    loaded.values[_ATTENTION[0]] = self._argument(value, where)
                elif _SHAPES.fullmatch(name):
                    how = "save its configuration with config.save_pretrained(FOLDER) and pass"
                    text = f"sets {name}, and the model has other shapes: {how} --model FOLDER"
                    problems.append(Undecided(text, where, "model"))
        for name, (value, line) in (model.get("assigned") or {}).items():
            where = self.places.at(line)
            if name.startswith("config."):
                if last(name) in _ATTENTION:
                    loaded.values[_ATTENTION[0]] = self._argument(value, where)
            elif name == "generation_config" or not isinstance(value, Mapping):
                continue
            elif "$unknown" in value or made(value):
                text = f"another part takes the place of model.{name}: {EMULATE}"
                problems.append(Undecided(text, where, OWN_MODULE))

    def _adapt(self, given: Any, training: ProgramTraining, *, is_listed: bool) -> None:
        """The adapters: `peft_config` of the trainer, or those that its model has."""
        where, lora = training["trainer"].where("peft_config"), made(given)
        self._undecided(training.found, given, where, "lora_rank")
        if lora and self._library(lora).endswith((".LoraConfig", ".get_peft_model")):
            training.groups["lora"] = arguments = self.arguments(lora, training.found)
            targets = arguments.values.get("target_modules")
            if is_listed and targets and set(targets.value or ()) == _GENERIC:
                arguments.values["target_modules"] = replace(targets, value="all-linear")
        elif lora and last(lora["class"]) == "from_pretrained":
            text = f"has the rank of a saved adapter: {decided_by('lora_rank')}"
            where = f"{self.places.at(lora.get('where'))} {lora['class']}"
            training.found.problems.append(Undecided(text, where, "lora_rank"))
        elif lora:
            kind = last(lora["class"])
            term = SCHEMAS["causal_lm"].terms["adapter"]
            estimated = "`tuner estimate` with `--set adapter={}` predicts its kind"
            near = {name: estimated.format(name) for name in term.allowed} | {**term.refused}
            named = {name.replace("_", ""): text for name, text in near.items()}
            text = named.get(kind.removesuffix("Config").lower(), EMULATE)
            training.found.problems.append(Problem(f"is {kind}, not predicted: {text}", where))

    def _quantize(self, row: Row, groups: dict[str, Arguments], found: Found) -> None:
        """Only the configuration that the trained model is loaded with counts."""
        name, words = "quantization_config", ("load_in_4bit", "load_in_8bit")
        trainer, model = row["trainer"].get("given") or {}, row.get("model")
        options = (made(row.get("arguments")) or {}).get("values") or {}
        chosen = trainer.get(name) or (options.get("model_init_kwargs") or {}).get(name)
        if isinstance(model, Mapping):
            chosen = (made(model) or {}).get("quantization")
        loaded = groups.get("model", groups["trainer"])
        if isinstance(chosen, Mapping) and any(chosen.get(word) for word in words):
            chosen = {"class": "transformers.BitsAndBytesConfig", "given": chosen}
        self._undecided(found, chosen, loaded.where(name), "precision")
        if not isinstance(chosen, Mapping):
            bits = {word: loaded.values[word] for word in words if word in loaded}
            if any(one.value for one in bits.values()) and not loaded.title.startswith("Fast"):
                groups["quantization"] = Arguments("BitsAndBytesConfig", bits, found)
                text = f"use BitsAndBytesConfig({next(iter(bits))}=True) in transformers 5"
                found.notes.append(f"{loaded.where(next(iter(bits)))}: {text}")
        elif (one := made(chosen)) and (one.get("given") or {}).get("dequantize") is True:
            loaded.values.pop(name, None)  # of Mxfp4Config and others: it is loaded in 16 bits
        elif one and self._library(one).endswith(".BitsAndBytesConfig"):
            quantization = self.arguments(one, found)
            if any(quantization.take(word) or quantization.is_unknown(word) for word in words):
                groups["quantization"] = quantization
            else:
                loaded.values.pop(name, None)
                text = f"transformers loads it in 4 bits all the same: pass {name}=None"
                found.at_most.append(f"{quantization.where(words[0])}: false, and {text}")

    def _of_releases(self, row: Row, groups: dict[str, Arguments], found: Found) -> None:
        """Note what the program's releases lack, and read it as what has taken its place."""
        for group in ("arguments", "lora", "trainer"):  # whose arguments may move to the first
            one, own = made(row.get(group)), groups.get(group)
            if own is None or one is None or one["class"] != self._library(one):
                continue  # of the program's own class, which has fields of its own
            path = f"{one['class'].partition('.')[0]}.{last(one['class'])}"
            for name, argument in list(own.values.items()):
                text = lacks(path, name, show(argument.value)) if name.isidentifier() else None
                if text is None:
                    if argument.problem is None and argument.value == default(path, name):
                        own.taken.add(name)  # no need to name it
                    continue
                del own.values[name]
                if group == "trainer" and name in (one.get("assigned") or {}):
                    continue  # an attribute, and no argument
                if name in (one.get("assigned") or {}):
                    shown = f"{name}={show(argument.value)}"
                    found.notes.append(f"{argument.where}: {shown} has no effect: {text}")
                    continue
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

    def _undecided(self, found: Found, value: Any, where: str, knob: str = "") -> None:
        """Note a value that only the run knows."""
        if isinstance(value, Mapping) and "$unknown" in value:
            text = self._argument(value, where).problem
            how = "pass --model" if knob == "model" else decided_by(knob)
            found.problems.append(Undecided(f"{text}: {how}", where, knob))

    # -- what a program does beside its settings ---------------------------------------------

    def _own_parts(self, trainer: Row, training: ProgramTraining) -> None:
        """Methods of a trainer that the program replaces by its own, and its own optimizer."""
        what = "is the program's own, and what it takes is known only when it runs"
        assigned = trainer.get("assigned") or {}
        for method, knob in TABLES["overrides"].items():
            if method in (*(trainer.get("methods") or ()), *assigned):
                effect: Effect = "" if knob else "adds"
                where = f"{self.places.at(trainer.get('where'))} {last(trainer['class'])}.{method}"
                problem = Undecided(f"{what}: {decided_by(knob)}", where, knob, effect)
                training.found.problems.append(problem)
        # `optimizers=(optimizer, None)` of a trainer counts, whatever `optim` says.
        given = (trainer.get("given") or {}).get("optimizers")
        chosen = given[0] if isinstance(given, list) and given else given
        chosen = assigned.get("optimizer", [chosen])[0]
        one, call = made(chosen), training["trainer"]
        if one is None:
            self._undecided(training.found, chosen, call.where("optimizers"), "optimizer")
            return
        root, name = one["class"].partition(".")[0], last(one["class"])
        said = {**(one.get("values") or {}), **(one.get("given") or {})}
        named = [
            (len(known.recipe), label)
            for label, known in OPTIMIZERS.items()
            if (known.path.split(".")[0], known.path.rpartition(":")[2]) == (root, name)
            and all(bool(said.get(key)) == value for key, value in known.recipe.items())
        ]
        arguments = training["arguments"]
        call.taken.add("optimizers")
        if named:
            where = call.where("optimizers").rpartition(" ")[0]
            arguments.values["optim"] = Argument(max(named)[1], where)
            training.groups["arguments"] = arguments
        else:
            call.refuse("optimizers", f"is {one['class']}, which is not predicted: {EMULATE}")

    def _calls(self, row: Row, training: ProgramTraining) -> None:
        """Calls: lengths of examples, merges, frozen weights, and others that aren't predicted."""
        found, is_own = training.found, _is_own(made(row.get("model")) or {})
        for call in row.get("calls") or ():
            name, at = last(call["class"]), self.places.at(call.get("where"))
            read = self.arguments(call, found)
            given = read.values
            training.lengths += tuple(
                one for n in _LENGTHS if (one := given.get(n)) and (one.problem or one.value)
            )
            if name == "add_tokens":
                training.new_tokens += list(given.values())
            elif name == "resize_token_embeddings":
                size = next(iter(given.values()), Argument(None, at))
                training.resized = replace(size, where=f"{at} {name}")
            elif name in _MERGES:
                found.left_out.append(f"{at} {name}")
            elif what := TABLES["calls"].get(name):
                text = f"{what} is not predicted: {EMULATE}"
                found.problems.append(Problem(text, f"{at} {name}"))
            elif name.startswith("requires_grad"):
                _freezes(f"{at} {name}", given, training)
            elif call["class"] == "parameter.data":
                text = f"weights of another dtype may take more memory: {EMULATE}"
                found.problems.append(Undecided(text, f"{at} data", "", "adds"))
            else:
                self._of_model(name, at, given, training, is_own=is_own)

    def _of_model(
        self,
        name: str,
        at: str,
        given: Mapping[str, Argument],
        training: ProgramTraining,
        *,
        is_own: bool,
    ) -> None:
        """Calls that change a model's dtype, its attention or its kernels."""
        if name in _CASTS or name == "to":
            _cast(name, at, given, training)
        elif name == "set_attn_implementation" and given:
            training["model"].values["attn_implementation"] = next(iter(given.values()))
        elif name == "get_peft_model":
            if (said := given.get("autocast_adapter_dtype")) and not said.value:
                text = f"{at}: adapters in the dtype of the weights only save memory"
                training.found.at_most.append(text)
        elif name == "autocast":
            _autocast(given, at, training)
        elif name == "set_default_dtype" and given and is_own:
            training["model"].values["dtype"] = next(iter(given.values()))
        elif name.startswith("apply_liger_kernel_to_"):
            is_whole = all(one.value is (n != "cross_entropy") for n, one in given.items())
            if is_whole and training.trainer == "Trainer":
                training["arguments"].values["use_liger_kernel"] = Argument(True, at)
            else:
                text = f"{at}: Liger's kernels that are named only save memory"
                training.found.at_most.append(text)

    # -- names -----------------------------------------------------------------------------------

    def _library(self, one: Row) -> str:
        """The class of an object, or the first class of a library that one's own is made from."""
        trained = ("transformers", "trl", "unsloth", "peft")
        libraries = {*self.recorded.standins, *self.recorded.absent, *trained}
        names: list[str] = [one["class"], *(one.get("bases") or ())]
        return next((name for name in names if name.split(".")[0] in libraries), names[0])


def _cast(name: str, at: str, given: Mapping[str, Argument], training: ProgramTraining) -> None:
    """`model.half()`, `model.to(torch.bfloat16)`: the dtype that the weights have then.

    Of a part of the model: that it saves memory, or may add some.
    """
    said = [Argument(_CASTS[name], at)] if name in _CASTS else given.values()
    dtypes = [one for one in said if str(one.value) in DTYPES]
    part, model = given.get("of"), training["model"]
    if not dtypes:
        return
    if part is None:
        if "quantization_config" not in model:
            model.values["dtype"] = dtypes[0]
    elif DTYPES[str(dtypes[0].value)] != "fp32":
        training.found.at_most.append(f"{at}: parts in {dtypes[0].value} only save memory")
    elif "norm" not in str(part.value):  # whose weights are small
        text = f"weights of another dtype may take more memory: {EMULATE}"
        training.found.problems.append(Undecided(text, f"{at} {name}", "", "adds"))


def _autocast(given: Mapping[str, Argument], at: str, training: ProgramTraining) -> None:
    """A training inside of `torch.autocast`, as one with mixed precision."""
    dtype, enabled = given.get("dtype"), given.get("enabled")
    arguments = training["arguments"]
    training.groups["arguments"] = arguments
    if (enabled is not None and enabled.value is False) or arguments.take("bf16", quietly=True):
        return
    word = DTYPES.get(str(dtype.value) if dtype else "float16", "")
    if word in ("bf16", "fp16"):
        arguments.values[word] = Argument(True, f"{at} dtype")


def _is_own(model: Row) -> bool:
    """True for a model of one's own weights, which is made of a configuration."""
    return str(model.get("made") or "").endswith("from_config")


def _freezes(where: str, given: Mapping[str, Argument], training: ProgramTraining) -> None:
    names = ("value", "requires_grad", "0")
    said = next((given[name] for name in names if name in given), Argument(True, where))
    effect: Effect = "adds" if training.has("lora") else "saves"  # peft freezes the others
    if said.is_unknown or said.value is (effect == "adds"):
        text = f"says which weights are trained, and that isn't modelled: {EMULATE}"
        training.found.problems.append(Undecided(text, where, "", effect))


# -- models --------------------------------------------------------------------------


def named_models(program: Program) -> dict[str, str]:
    """The models that the program trains, or that its files name, with the place of each."""
    found: list[tuple[str, str]] = []
    with contextlib.suppress(InputError):
        for training in read_trainings(program):
            if training.model_by_name:
                found.append((training.model_by_name, training.where))
            for name in ("0", "model_name"):
                argument = training["model"].values.get(name)
                if argument is not None and isinstance(argument.value, str):
                    found.append((argument.value, argument.where))
    found += [one for source in program.sources for one in _in_file(source)]
    named: dict[str, str] = {}
    for model, where in found:
        path = program.folder / model
        name = str(path) if path.is_dir() else model
        if path.is_dir() or get_entry(name) is not None or HUB_ID.fullmatch(name):
            named.setdefault(name, where)
    return named


def _in_file(source: SourceFile) -> Iterator[tuple[str, str]]:
    if source.path.suffix in PYTHON:
        return
    for place in source.places:
        *above, name = ["", "", *map(str, place.path)][-2:]
        is_below = above == ["model"] and name in ("name", "path", "id", "name_or_path")
        is_named = is_below or name in MODEL_KEYS
        if is_named and isinstance(place.value, str):
            yield place.value, source.at(place)
