"""Programs that are made at random, each with the settings that it trains with.

A base program has objects (the model, its quantization, LoRA, the trainer's arguments), an object
has settings, and each setting gets its value in one of the ways of `reader_ways.txt`, or in one
within another. `generate(seed)` makes the same program each time; `str(program)` prints it whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from string import Template
from typing import Any

UNKNOWN = "<unknown>"
"""The truth of a setting that only data or the hub decide: a definite answer would be wrong."""
INSTALLED = "try_missing_module"
"""The way whose value depends on what is installed: that it is unknown is right as well."""

MODELS = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-1.7B")
ARGUMENTS: Mapping[str, Sequence[Any]] = {
    "per_device_train_batch_size": (1, 2, 4, 6, 12, 16),
    "gradient_accumulation_steps": (1, 2, 4, 8, 16),
    "gradient_checkpointing": (True, False),
    "optim": ("adamw_torch", "adamw_torch_fused", "paged_adamw_8bit", "adafactor"),
    "bf16": (True, True, False),
    "learning_rate": (0.0001, 0.0002, 0.0005),
    "num_train_epochs": (1, 2, 3),
    "max_steps": (100, 500),
    "weight_decay": (0.0, 0.01, 0.1),
}
OF_TRL: Mapping[str, Sequence[Any]] = {"max_length": (512, 1024, 2048, 4096)}
OF_SFT: Mapping[str, Sequence[Any]] = {**OF_TRL, "packing": (True, False)}
OF_DPO: Mapping[str, Sequence[Any]] = {**OF_TRL, "beta": (0.05, 0.1, 0.3)}
ADAPTER: Mapping[str, Sequence[Any]] = {
    "r": (4, 8, 16, 32, 64),
    "lora_alpha": (8, 16, 32, 128),
    "lora_dropout": (0.0, 0.05, 0.1),
    "use_rslora": (True, False),
}
LOADED: Mapping[str, Sequence[Any]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "attn_implementation": ("sdpa", "eager", "flash_attention_2"),
}
QUANTIZATION: Mapping[str, Sequence[Any]] = {
    "load_in_4bit": (True, True, False),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_use_double_quant": (True, False),
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to give a value: its lines and expression, and what it puts elsewhere."""

    name: str
    types: frozenset[str]
    lines: str
    expression: str
    files: Mapping[str, str]
    others: Mapping[str, Sequence[str]]

    def suits(self, value: Any) -> bool:
        kind = type(value).__name__
        groups = {"num": {"int", "float"}, "text": {"int", "float", "str"}}
        return bool(self.types & {"any", kind}) or any(
            kind in groups.get(one, ()) for one in self.types
        )

    @property
    def needs(self) -> set[str]:
        """The parsers that have to be made for it."""
        return {name for name in ("option", "field") if self.others[name]}


def _read(text: str) -> Way:
    head, _, body = text.partition("\n")
    name, _, types = head.partition(":")
    lines: list[str] = []
    files: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {"option": [], "field": [], "argv": [], "env": []}
    expression, into = "", lines
    for line in body.split("\n"):
        word, _, rest = line.partition(" ")
        if word == "=>":
            expression = rest
        elif word == "file":
            into = files.setdefault(rest, [])
        elif word in others:
            others[word].append(rest)
        else:
            into.append(line)
    return Way(
        name,
        frozenset(types.split()),
        "\n".join(lines),
        expression,
        {path: "\n".join(inside) + "\n" for path, inside in files.items()},
        others,
    )


def all_ways() -> list[Way]:
    text = Path(__file__).with_name("reader_ways.txt").read_text()
    # The empty file of a package is the only empty line within a way.
    parts = re.split(r"\n\n(?=[a-z_]+: )", text)[1:]
    return [_read(part.strip("\n")) for part in parts]


WAYS = all_ways()
EXPRESSIONS = [way for way in WAYS if way.expression]
CLASSES = [way for way in WAYS if way.types & {"class", "config"}]
CHANGES = [way for way in WAYS if "change" in way.types]
DECOYS = [way for way in WAYS if "decoy" in way.types]


@dataclass(slots=True)
class Made:
    """A program in the making; `truth` is what it trains with."""

    random: Random
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    truth: dict[str, Any] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    parser: str = "option"
    names: int = 0

    def name(self) -> str:
        self.names += 1
        word = self.random.choice(("size", "cfg", "value", "run", "opts", "it", "setup", "param"))
        return f"{word}{self.names}"

    def words(self, value: Any, other: Any, inner: str) -> dict[str, str]:
        """What the `$` words of a way stand for."""
        names = {one: self.name() for one in "abc"}
        return {
            **names, "v": inner, "v0": repr(value), "w": repr(other), "j": json.dumps(value),
            "wj": json.dumps(other), "t": str(value), "wt": str(other),
            "bit": str(int(value is True)), "no": "" if value else "no-",
            "type": type(value).__name__,
        }  # fmt: skip

    def put(self, way: Way, words: Mapping[str, str], into: list[str]) -> str:
        """The way's lines, files and words; returns its expression."""
        self.used.append(way.name)
        lines = _filled(way.lines, words).strip("\n").split("\n") if way.lines.strip() else []
        for line in lines:
            (self.head if line.startswith(("import ", "from ")) else into).append(line)
        self.options += [_filled(line, words) for line in way.others["option"]]
        self.fields += [_filled(line, words) for line in way.others["field"]]
        for line in way.others["argv"]:
            self.argv += _filled(line, words).split(" ")
        for line in way.others["env"]:
            name, _, text = _filled(line, words).partition("=")
            self.env[name] = text
        for path, text in way.files.items():
            self.files[_filled(path, words)] = _filled(text, words)
        return _filled(way.expression, words)

    def expression(
        self, value: Any, other: Any, depth: int, only: Sequence[Way] | None = None
    ) -> tuple[str, bool]:
        """An expression of `value`, and whether it is known."""
        if depth <= 0:
            return repr(value), True
        ways = [
            way
            for way in only or EXPRESSIONS
            if way.suits(value)
            and not way.needs - {self.parser}
            and ("unknown" not in way.types or only or self.random.random() < 0.2)
        ]
        way = self.random.choice(ways)
        # Files and parsers hold values, not names of the program.
        closed = way.files or way.others["option"] or way.others["field"]
        uses_inner = "$v" in way.lines + way.expression and not closed
        inner, known = repr(value), True
        if uses_inner and self.random.random() < 0.5 and way.lines.count("$v") <= 1:
            inner, known = self.expression(value, other, depth - 1)
            inner = f"({inner})" if " " in inner else inner
        text = self.put(way, self.words(value, other, inner), self.head)
        return text, known and "unknown" not in way.types


def _filled(text: str, words: Mapping[str, str]) -> str:
    return Template(text).substitute(words)


def _other(random: Random, choices: Sequence[Any], value: Any) -> Any:
    others = [one for one in dict.fromkeys(choices) if one != value]
    return random.choice(others)


@dataclass(frozen=True, slots=True)
class Object:
    """An object of a base program, and the settings that it may get."""

    name: str
    call: str
    choices: Mapping[str, Sequence[Any]]
    always: Sequence[str] = ()
    fixed: str = ""
    is_dataclass: bool = True
    is_config: bool = True
    may_change: bool = True


def _construct(made: Made, one: Object, chosen: Mapping[str, Any], plain: bool) -> None:
    """Lines that make `one` with its settings, some in its call and some later."""
    random, given, later = made.random, [one.fixed] if one.fixed else [], []
    is_set_late = False
    for slot, value in chosen.items():
        other = _other(random, one.choices[slot], value)
        depth = 0 if plain else random.choice((0, 1, 1, 2, 3))
        text, known = made.expression(value, other, depth)
        made.truth[slot] = value if known else UNKNOWN
        changes = one.may_change and not plain and random.random() < 0.3
        # Only the construction of the arguments looks at these.
        is_fixed = slot in {"gradient_checkpointing", "bf16"}
        if not changes:
            given.append(f"{slot}={text}")
            continue
        ways = [
            way
            for way in CHANGES
            if ("dataclass" not in way.types or one.is_dataclass)
            and not ((is_fixed or is_set_late) and way.name == "set_replace")
            and ("unknown" not in way.types or random.random() < 0.2)
        ]
        way = random.choice(ways)
        if is_fixed or random.random() < 0.5:
            given.append(f"{slot}={other!r}")
        if is_fixed:
            made.truth[slot] = other
            is_set_late = True  # a construction that is repeated would see it
        elif "unknown" in way.types:
            made.truth[slot] = UNKNOWN
        later.append((way, {**made.words(value, other, text), "slot": slot, "obj": one.name}))
    ways = [way for way in CLASSES if "config" not in way.types or one.is_config]
    way = WAYS_BY_NAME["made"] if plain else random.choice(ways)
    words = made.words(None, None, "")
    made.put(
        way, {**words, "obj": one.name, "class": one.call, "given": ", ".join(given)}, made.body
    )
    for way, words in later:
        made.put(way, words, made.body)


WAYS_BY_NAME = {way.name: way for way in WAYS}


def _choose(random: Random, one: Object) -> dict[str, Any]:
    names = [name for name in one.choices if name in one.always or random.random() < 0.5]
    random.shuffle(names)
    return {name: random.choice(one.choices[name]) for name in names}


def _argument_object(call: str, choices: Mapping[str, Sequence[Any]]) -> Object:
    always = ("per_device_train_batch_size", "bf16")
    return Object("training_args", call, {**ARGUMENTS, **choices}, always, 'output_dir="out"')


def _with_model(made: Made, plain: bool) -> bool:
    """Lines that load the model; True if it is, or may be, quantized."""
    random = made.random
    quantized = random.random() < 0.4
    fixed = ""
    made.truth["load_in_4bit"] = made.truth["load_in_8bit"] = False
    if quantized:
        bnb = Object("bnb", "BitsAndBytesConfig", QUANTIZATION, ("load_in_4bit",),
                     is_dataclass=False, is_config=False)  # fmt: skip
        _construct(made, bnb, _choose(random, bnb), plain)
        fixed = "quantization_config=bnb"
    name = random.choice(MODELS)
    text, known = made.expression(name, _other(random, MODELS, name), 0 if plain else 1)
    made.truth["model"] = name if known else UNKNOWN
    first = f"pretrained_model_name_or_path={text}"
    model = Object("model", "AutoModelForCausalLM.from_pretrained", LOADED,
                   fixed=f"{first}, {fixed}".strip(", "),
                   is_config=False, may_change=False)  # fmt: skip
    _construct(made, model, _choose(random, model), plain)
    if "attn_implementation" in made.truth:
        made.truth["attention"] = made.truth.pop("attn_implementation")
    return quantized


def _with_lora(made: Made, plain: bool, needed: bool) -> bool:
    random = made.random
    made.truth["lora"] = needed or random.random() < 0.6
    if made.truth["lora"]:
        lora = Object("lora", "LoraConfig", ADAPTER, ("r",),
                      'target_modules="all-linear", task_type="CAUSAL_LM"')  # fmt: skip
        _construct(made, lora, _choose(random, lora), plain)
    return bool(made.truth["lora"])


IMPORTS = """\
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer"""
DATA = 'dataset = load_dataset("trl-lib/Capybara", split="train")'


def _of_trl(made: Made, kind: str, choices: Mapping[str, Sequence[Any]], plain: bool) -> str:
    """Lines up to the trainer of TRL, whose argument for adapters is returned."""
    made.truth["trainer"] = f"trl.{kind}Trainer"
    quantized = _with_model(made, plain)
    lora = _with_lora(made, plain, quantized)
    arguments = _argument_object(f"{kind}Config", choices)
    _construct(made, arguments, _choose(made.random, arguments), plain)
    made.body += [DATA]
    return ", peft_config=lora" if lora else ""


def _sft(made: Made, plain: bool) -> None:
    peft = _of_trl(made, "SFT", OF_SFT, plain)
    _train(made, f"SFTTrainer(model=model, args=training_args, train_dataset=dataset{peft})")


def _dpo(made: Made, plain: bool) -> None:
    peft = _of_trl(made, "DPO", OF_DPO, plain)
    made.body += ['tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")']
    given = "model, args=training_args, train_dataset=dataset, processing_class=tokenizer"
    _train(made, f"DPOTrainer({given}{peft})")


def _trainer(made: Made, plain: bool) -> None:
    made.truth["trainer"] = "transformers.Trainer"
    quantized = _with_model(made, plain)
    if quantized and made.random.random() < 0.5:
        made.body.append("model = prepare_model_for_kbit_training(model)")
    if _with_lora(made, plain, quantized):
        made.body.append("model = get_peft_model(model, lora)")
    arguments = _argument_object("TrainingArguments", {})
    _construct(made, arguments, _choose(made.random, arguments), plain)
    made.body += [
        'tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")',
        'dataset = load_dataset("text", data_files="data/*.txt", split="train")',
        'dataset = dataset.map(lambda row: tokenizer(row["text"]), batched=True)',
        "collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)",
    ]
    given = "model=model, args=training_args, train_dataset=dataset, data_collator=collator"
    _train(made, f"Trainer({given})")


def _train(made: Made, call: str) -> None:
    """Lines that make the trainer and train, in one of a few ways."""
    random = made.random
    form = random.randrange(12)
    if form == 0:
        made.body.append(f"{call}.train()")
        return
    if form == 5:
        name, _, given = call.partition("(")
        made.head += [
            f"class Mine({name}):",
            "    def log(self, logs, *args, **kwargs):",
            "        super().log({**logs, 'mine': 1}, *args, **kwargs)",
        ]
        call = f"Mine({given}"
    made.body.append(f"trainer = {call}")
    if form == 6:
        made.body.append("trainer.args.per_device_train_batch_size = 24  # too late")
    elif form == 7 and "lora = " in "\n".join(made.body):
        made.body.append("lora.r = 512")  # too late
    elif form == 8:
        made.body += ["def fit(it):", "    return it.train()", "fit(trainer)"]
        return
    elif form == 9:
        made.body += ["do_train = True", "if do_train:", "    trainer.train()"]
        return
    elif form == 10:
        made.body += ["for stage in [trainer]:", "    stage.train()"]
        return
    elif form == 11:
        made.body += [
            "try:",
            "    trainer.train()",
            "except KeyboardInterrupt:",
            '    trainer.save_model("stopped")',
        ]
        return
    if form == 1:
        made.body.append("print(trainer.train())")
    elif form == 2:
        made.body += ["result = trainer.train(resume_from_checkpoint=None)", "metrics = result"]
    elif form == 3:
        made.body += ["start = trainer.train", "start()"]
    else:
        made.body += ["trainer.train()", 'trainer.save_model("out")']


def _words_of(name: str, value: Any) -> list[str]:
    return [f"--{name}", str(value)]


def _parsed(made: Made, plain: bool) -> None:
    """A script of TRL's kind: its settings come from words and from YAML."""
    random = made.random
    made.parser = ""
    made.truth.update(trainer="trl.SFTTrainer", load_in_4bit=False, load_in_8bit=False)
    choices = {**ARGUMENTS, **OF_SFT}
    arguments = Object("", "", choices, ("per_device_train_batch_size", "bf16"))
    model = Object("", "", {"model_name_or_path": MODELS, "dtype": LOADED["dtype"]},
                   ("model_name_or_path",))  # fmt: skip
    lora = random.random() < 0.5
    adapter = {"lora_r": ADAPTER["r"], "lora_alpha": ADAPTER["lora_alpha"]}
    chosen = {**_choose(random, arguments), **_choose(random, model)}
    if lora:
        chosen |= {"use_peft": True, "lora_target_modules": "all-linear"}
        chosen |= _choose(random, Object("", "", adapter, ("lora_r",)))
    if lora and random.random() < 0.5:
        chosen["load_in_4bit"] = True
    in_file = {name: value for name, value in chosen.items() if random.random() < 0.6}
    lines = [f"{name}: {json.dumps(value)}" for name, value in in_file.items()]
    for name, value in chosen.items():
        before = name in choices and random.random() < 0.2  # a word goes before the file
        said = random.choice(choices[name]) if before else value
        if before or name not in in_file:
            made.argv += _words_of(name, said)
        made.truth[name] = said
    if in_file:
        made.files["recipe.yaml"] = "\n".join([*lines, 'output_dir: "out"', ""])
        made.argv = ["--config", "recipe.yaml", *made.argv]
    else:
        made.argv += ["--output_dir", "out"]
    for name, to in {"model_name_or_path": "model", "lora_r": "r"}.items():
        if name in made.truth:
            made.truth[to] = made.truth.pop(name)
    for name in ("use_peft", "lora_target_modules"):
        made.truth.pop(name, None)
    made.truth["lora"] = lora
    made.head += [
        "from trl import ModelConfig, ScriptArguments, TrlParser",
        "from trl import get_peft_config, get_quantization_config",
    ]
    made.body += [
        "parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))",
        "script_args, training_args, model_args = parser.parse_args_and_config()",
        "model = AutoModelForCausalLM.from_pretrained(",
        "    model_args.model_name_or_path, dtype=model_args.dtype,",
        "    quantization_config=get_quantization_config(model_args),",
        ")",
        DATA,
    ]
    slot = "per_device_train_batch_size"
    if not plain and random.random() < 0.4:
        value = random.choice(choices[slot])
        other = _other(random, choices[slot], value)
        text, known = made.expression(value, other, 2)
        made.body.append(f"training_args.{slot} = {text}")
        made.truth[slot] = value if known else UNKNOWN
    _train(
        made,
        "SFTTrainer(model=model, args=training_args, train_dataset=dataset, "
        "peft_config=get_peft_config(model_args))",
    )


def _unsloth(made: Made, plain: bool) -> None:
    made.truth.update(trainer="trl.SFTTrainer", lora=True, load_in_8bit=False)
    made.head.append("from unsloth import FastLanguageModel")
    loaded = {
        "model_name": ("unsloth/Qwen3-8B", "unsloth/Llama-3.1-8B"),
        "max_seq_length": OF_TRL["max_length"],
        "load_in_4bit": (True, False),
    }
    model = Object("loaded", "FastLanguageModel.from_pretrained", loaded, tuple(loaded),
                   is_config=False, may_change=False)  # fmt: skip
    _construct(made, model, _choose(made.random, model), plain)
    made.body.append("model, tokenizer = loaded")
    adapter = Object("adapted", "FastLanguageModel.get_peft_model", ADAPTER, ("r",), "model=model",
                     is_config=False, may_change=False)  # fmt: skip
    _construct(made, adapter, _choose(made.random, adapter), plain)
    arguments = _argument_object("SFTConfig", {})
    _construct(made, arguments, _choose(made.random, arguments), plain)
    made.truth["model"] = made.truth.pop("model_name")
    made.body.append(DATA)
    given = "model=adapted, tokenizer=tokenizer, train_dataset=dataset, args=training_args"
    _train(made, f"SFTTrainer({given})")


BASES = {"sft": _sft, "dpo": _dpo, "trainer": _trainer, "parsed": _parsed, "unsloth": _unsloth}


@dataclass(frozen=True, slots=True)
class Generated:
    """A program, how it is started, and the truth of its settings."""

    seed: int
    base: str
    used: Sequence[str]
    files: Mapping[str, str]
    argv: Sequence[str]
    env: Mapping[str, str]
    truth: Mapping[str, Any]

    def __str__(self) -> str:
        start = [*(f"{name}={value}" for name, value in self.env.items()), "train.py", *self.argv]
        parts = [f"# {path}\n{text}" for path, text in self.files.items()]
        return "\n".join([f"seed {self.seed}: {' '.join(start)}", *parts, f"truth: {self.truth}"])

    def write(self, folder: Path) -> Path:
        """Its files in `folder`; returns the program's path."""
        for path, text in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder / "train.py"


def _whole(made: Made) -> str:
    """The program's text, in one of the forms in which people write one."""
    random = made.random
    parsers: list[str] = []
    if made.options:
        parsers = ["import argparse", "parser = argparse.ArgumentParser()", *made.options]
        parse = ["cli = parser.parse_args()", "cli, _ = parser.parse_known_args()"]
        parsers.append(random.choice(parse))
    elif made.fields:
        end = ".parse_args_into_dataclasses()"
        parsers = [
            "from dataclasses import dataclass, field",
            "from typing import Optional",
            "from transformers import HfArgumentParser",
            "@dataclass",
            "class Own:",
            *(f"    {line}" for line in made.fields),
            random.choice(
                ("own = HfArgumentParser(Own)[0]", "own, = HfArgumentParser([Own])")
            ).replace(")", f"){end}", 1),
        ]
    lines = [*IMPORTS.split("\n"), *parsers, *made.head]
    future = [line for line in [*lines, *made.body] if "__future__" in line]
    body = [line for line in made.body if "__future__" not in line]
    lines = [line for line in lines if "__future__" not in line]
    form = random.randrange(4)
    inside = [f"    {line}" if line else line for line in body]
    if form == 1:
        body = ["def main():", *inside, "", 'if __name__ == "__main__":', "    main()"]
    elif form == 2:
        body = ['if __name__ == "__main__":', *inside]
    elif form == 3:
        deep = [f"    {line}" for line in inside]
        body = ["class Run:", "    def start(self):", *deep, "", "Run().start()"]
    return "\n".join([*dict.fromkeys(future), *lines, *body, ""])


def generate(seed: int, base: str | None = None, plain: bool = False) -> Generated:
    """The program of `seed`; `plain` writes each value where it is used."""
    random = Random(seed)
    chosen = base or random.choice(tuple(BASES))
    made = Made(random, parser=random.choice(("option", "field")))
    for _ in range(0 if plain else random.choice((0, 1, 2))):
        made.put(random.choice(DECOYS), made.words(None, None, ""), made.head)
    BASES[chosen](made, plain)
    if not plain and random.random() < 0.4:
        made.put(random.choice(DECOYS), made.words(None, None, ""), made.body)
    files = {"train.py": _whole(made), **made.files}
    return Generated(seed, chosen, made.used, files, made.argv, made.env, made.truth)


def single(way: Way, seed: int = 0) -> Generated:
    """A plain SFT program in which one setting is given its value in this one way."""
    made = Made(Random(f"{way.name} {seed}"), parser=next(iter(way.needs), "option"))
    slots = {**ARGUMENTS, **OF_SFT}
    values = [(slot, value) for slot, some in slots.items() for value in some if way.suits(value)]
    values = [(slot, value) for slot, value in values if slot not in {"bf16", "num_train_epochs"}]
    lora = Object("lora", "LoraConfig", ADAPTER, ("r",), 'target_modules="all-linear"')
    arguments = _argument_object("SFTConfig", OF_SFT)
    chosen = {"per_device_train_batch_size": 4, "bf16": True}
    made.truth.update(trainer="trl.SFTTrainer", model=MODELS[0], load_in_4bit=False, lora=True)
    if way in EXPRESSIONS:
        slot, value = made.random.choice(values)
        other = _other(made.random, slots[slot], value)
        text, known = made.expression(value, other, 1, [way])
        arguments = _argument_object("SFTConfig", OF_SFT)
        fixed = f'output_dir="out", {slot}={text}'
        chosen.pop(slot, None)
        arguments = Object(arguments.name, arguments.call, arguments.choices, fixed=fixed)
        made.truth[slot] = value if known else UNKNOWN
    elif way in DECOYS:
        made.put(way, made.words(None, None, ""), made.head)
    _construct(made, lora, {"r": 16}, True)
    words = {**made.words(8, 3, "8"), "obj": arguments.name, "slot": "per_device_train_batch_size"}
    if way in CLASSES:
        given = 'output_dir="out", per_device_train_batch_size=4, bf16=True'
        made.truth.update(per_device_train_batch_size=4, bf16=True)
        made.put(way, {**words, "class": "SFTConfig", "given": given}, made.body)
    else:
        _construct(made, arguments, chosen, True)
    if way in CHANGES:
        made.put(way, words, made.body)
        made.truth["per_device_train_batch_size"] = UNKNOWN if "unknown" in way.types else 8
    made.body += [f'model = AutoModelForCausalLM.from_pretrained("{MODELS[0]}")', DATA]
    given = "model=model, args=training_args, train_dataset=dataset, peft_config=lora"
    made.body.append(f"SFTTrainer({given}).train()")
    files = {"train.py": _whole(made), **made.files}
    return Generated(seed, "single", [way.name], files, made.argv, made.env, made.truth)
