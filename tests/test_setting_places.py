"""The place of each setting in programs as people write them, which is known: they are made here.

With another value, as the editor writes it, a program must be the text that its template makes
with that value, character for character.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from program_samples import make_tools

from tuner.core.records import KnobValue
from tuner.program.changes import change
from tuner.program.program import read_program
from tuner.program.settings import Settings, see, settings_of

# Setting, its name in the trainer's arguments, a person's name of it, its value, another value.
SETTINGS = {
    "micro_batch": ("per_device_train_batch_size", "batch_size", 8, 2),
    "grad_accum": ("gradient_accumulation_steps", "accum", 8, 3),
    "max_length": ("max_length", "seq_len", 1024, 512),
    "optimizer": ("optim", "optimizer", "adamw_torch", "adafactor"),
    "gradient_checkpointing": ("gradient_checkpointing", "checkpointing", True, False),
    "fused_kernels": ("use_liger_kernel", "liger", True, False),
    "packing": ("packing", "packed", False, True),
    "lora_rank": ("", "lora_r", 8, 32),
    "attention": ("", "attn", "sdpa", "eager"),
    "use_reentrant": ("", "reentrant", False, True),
}

BODY = """\
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", attn_implementation=<=:attention>)
lora = LoraConfig(r=<=:lora_rank>, lora_alpha=8, target_modules="all-linear")
args = SFTConfig(
    "out",
    logging_steps=8,
    per_device_eval_batch_size=8,
+     {t}=<=>,
    gradient_checkpointing_kwargs={"use_reentrant": <=:use_reentrant>},
    bf16=True,
)
SFTTrainer(model, args=args, peft_config=lora).train()
"""
VALUES = {knob: value for knob, (*_, value, _) in SETTINGS.items()}
TABLE = Path(__file__).with_name("setting_places.txt").read_text(encoding="utf-8")
PROGRAMS = dict(part.split("\n", 1) for part in TABLE.split("\n==== ")[1:])


def template(name: str) -> dict[str, str]:
    """By file its text with places such as `<v:packing>`, the command under "$"."""
    text, expression = PROGRAMS[name], ""
    if found := re.search(r"^=> (.*)\n( *)BODY$", text, re.M):
        expression = found[1]
        body = re.sub(r"^([+] )?", lambda line: line[0] + found[2], BODY, flags=re.M)
        text = text.replace(found[0], body.rstrip(" "))

    def filled(line: str, knob: str) -> str:
        own, name, *_ = SETTINGS[knob]
        line = line.replace("<=>", expression).replace("{t}", own)
        line = line.replace("{n}", name).replace("{N}", name.upper())
        return re.sub("<(.)>", rf"<\1:{knob}>", line)

    kinds = {"*": object, "+": object, "i": int, "s": str, "b": bool}
    lines = []
    for line in text.split("\n"):
        kind = kinds.get(line[0]) if line[1:2] == " " else None
        for knob, (own, _, value, _) in SETTINGS.items() if kind else ():
            if (type(value) is kind or kind is object) and (own or line[0] != "+"):
                lines.append(filled(line[2:], knob))
        if kind is None:
            every = line.replace("{ns}", ", ".join(n for _, n, *_ in SETTINGS.values()))
            every = every.replace("{vs}", ", ".join(f"<v:{knob}>" for knob in SETTINGS))
            lines.append(re.sub("<=:(.*?)>", lambda one: filled(expression, one[1]), every))
    main, *others = "\n".join(lines).split("--> ")
    files = {"train.py": main, **dict(other.split("\n", 1) for other in others)}
    if "%%" in main:
        cells = [cell.splitlines(keepends=True) for cell in files.pop("train.py").split("%%\n")]
        code = [{"cell_type": "code", "metadata": {}, "source": one} for one in cells]
        files["run.ipynb"] = json.dumps({"cells": code, "metadata": {}, "nbformat": 4}, indent=1)
    return {"$": f"{next(iter(files))}\n", **files}


def knobs_in(files: Mapping[str, str]) -> list[str]:
    """The settings with a known place."""
    return [knob for knob in SETTINGS if f":{knob}>" in "".join(files.values())]


def rendered(text: str, values: Mapping[str, KnobValue]) -> str:
    """The text of a template with the values of the settings."""

    def one(place: re.Match[str]) -> str:
        value = SETTINGS[place[2]][3] if place[1] == "o" else values[place[2]]
        if place[1] == "i":
            return json.dumps(not value)
        if place[1] == "b" and isinstance(value, bool):
            return str(int(value))
        if place[1] == "f":
            return f"--{SETTINGS[place[2]][1]}" if value else ""
        if place[1] == "j" or (place[1] == "y" and isinstance(value, bool)):
            return json.dumps(value)
        return str(value) if place[1] in "yb" else repr(value)

    return re.sub(r"<(\w):(\w+)>", one, text)


def shown(files: Mapping[str, str], knob: str) -> str:
    """The place for people."""
    file, text = next((file, text) for file, text in files.items() if f":{knob}>" in text)
    if file.endswith(".ipynb"):
        cells = enumerate(json.loads(text)["cells"], 1)
        return next(
            f"cell {n}, line {m}"
            for n, cell in cells
            for m, line in enumerate(cell["source"], 1)
            if re.search(f"<[^o]:{knob}>", line)
        )
    line = text[: re.search(f"<[^o]:{knob}>", text).start()].count("\n") + 1
    return "the command line" if file == "$" else f"{file}:{line}"


def written(name: str, folder: Path) -> tuple[dict[str, str], Settings]:
    """The template of a program, and the program with its values in `folder`."""
    files = template(name)
    for file in files.keys() - {"$"}:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(rendered(files[file], VALUES))
    return files, settings_of(read_program(rendered(files["$"], VALUES).split()))


def examine(files: Mapping[str, str], settings: Settings, knob: str) -> None:
    """The place of a setting is the known one, and another value changes it alone."""
    wanted = {**VALUES, knob: SETTINGS[knob][3]}
    found = settings[knob]
    assert (found.knob, found.value, found.where) == (knob, VALUES[knob], shown(files, knob))
    after = change(settings, {knob: wanted[knob]}).after
    for source in after.sources:
        assert source.data.decode() == rendered(files[os.path.relpath(source.path)], wanted)
    words = rendered(files["$"], wanted).split()
    assert list(after.command)[-len(words) :] == words
    seen = see(after)
    assert seen.values[knob] == wanted[knob]
    assert settings.trial.seen.differing(seen) <= {knob}


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.proof) for n in range(1, 6))]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_place_of_a_setting_is_found_and_changed(name, first, tmp_path, monkeypatch):
    make_tools(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.chdir(tmp_path)
    files, settings = written(name, tmp_path)
    for knob in knobs_in(files)[first::6]:
        examine(files, settings, knob)


def test_there_are_twenty_programs_and_three_hundred_places():
    assert len(PROGRAMS) >= 20
    assert sum(len(knobs_in(template(name))) for name in PROGRAMS) >= 300
