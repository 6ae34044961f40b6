"""A program runs with stand-ins: every way to set a value, and what is recorded of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tuner.program.releases import RENAMED, classes, releases

LIBRARIES = ["transformers", "trl", "peft", "accelerate", "torch", "bitsandbytes"]
GPU = {
    "name": "NVIDIA RTX A6000",
    "total_memory_bytes": 51033931776,
    "capability": [8, 6],
    "processors": 84,
    "count": 1,
    "has_bf16": True,
}
IMPORTS = """
import argparse, copy, dataclasses, functools, json, os, sys
from dataclasses import dataclass, field
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
"""
FILES = {
    "own.py": "B = 7\ndef joined(words): return ', '.join(words)\n"
    "def make(n=7):\n    from trl import SFTConfig\n"
    "    return SFTConfig(output_dir='o', per_device_train_batch_size=n)\n",
    "c.yaml": "per_device_train_batch_size: 7\noutput_dir: o\n",
    "c.json": '{"bs": 7, "train": {"per_device_train_batch_size": 7}, "output_dir": "o"}',
    "c.toml": "[train]\nbs = 7\n",
    "c.ini": "[train]\nbs = 7\n",
    "env.yaml": "per_device_train_batch_size: 7\noutput_dir: o\nenv:\n  X: '7'\n",
}


def read(folder: Any, text: str, *words: str, seed: int = 0, **request: Any) -> dict[str, Any]:
    """The record of one run."""
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "scratch").mkdir(exist_ok=True)
    main = folder / "train.py"
    main.write_text(text)
    asked = {
        "main": str(main),
        "module": "",
        "argv": [str(main), *words],
        "folder": str(folder),
        "parts": None,
        "files": {},
        "seed": seed,
        "gpu": GPU,
        "classes": _classes(),
        "releases": releases(LIBRARIES),
        "renamed": dict(RENAMED),
        "seconds": 20,
        "memory_bytes": 2**31,
        "scratch": str(folder / "scratch"),
        **request,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tuner.program.standins"],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


_classes = functools.cache(lambda: classes(LIBRARIES))

# Each leaves `args`, whose batch size is 7. Those of plain Python are in reader_ways.txt.
ARGUMENTS = """
args = SFTConfig("o", per_device_train_batch_size=7)
---
args = SFTConfig(output_dir="o"); args.__dict__["per_device_train_batch_size"] = 7
---
args, = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(["--output_dir", "o", "--per_device_train_batch_size", "7"])
---
args, = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(["--output-dir=o", "--per-device-train-batch-size=7"])
---
p = HfArgumentParser(SFTConfig); p.set_defaults(per_device_train_batch_size=7); args, = p.parse_args_into_dataclasses(["--output_dir", "o"])
---
args, m = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config(["--config", "c.yaml"])
---
args, m = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config(["--config", "c.yaml", "--model_name_or_path", "x"])
---
args, = TrlParser(SFTConfig).parse_args_and_config(["--config", "env.yaml"]); assert os.environ["X"] == "7"
---
args, = TrlParser(SFTConfig).parse_args_and_config(["--config", "c.yaml", "--per_device_train_batch_size", "9"]); args.per_device_train_batch_size -= 2
---
@dataclass
class Mine(SFTConfig):
    per_device_train_batch_size: int = 7
args = Mine(output_dir="o")
---
@dataclass
class Mine(SFTConfig):
    rows: int = field(default=7)
    def __post_init__(self):
        super().__post_init__()
        self.per_device_train_batch_size = self.rows
args = Mine(output_dir="o")
---
class Mine(SFTConfig):
    def __init__(self, **k): super().__init__(output_dir="o", per_device_train_batch_size=7, **k)
args = Mine(bf16=True)
---
@dataclass
class Mine(TrainingArguments):
    extra: str = "x"
args, = HfArgumentParser(Mine).parse_args_into_dataclasses(["--output_dir", "o", "--per_device_train_batch_size", "7", "--extra", "y"]); assert args.extra == "y"
---
args = SFTConfig("o", per_device_train_batch_size=max(7, 3) if torch.cuda.is_available() else 1)
---
args = SFTConfig("o", per_device_train_batch_size=7 if torch.cuda.get_device_capability()[0] >= 8 else 2)
---
gib = torch.cuda.get_device_properties(0).total_memory / 2**30; args = SFTConfig("o", per_device_train_batch_size=7 if gib > 40 else 2)
---
args = SFTConfig("o", per_device_train_batch_size=7 if torch.cuda.is_bf16_supported() else 2, bf16=True)
---
args = SFTConfig("o", per_device_train_batch_size=2)
if "A6000" in torch.cuda.get_device_name(0): args.per_device_train_batch_size = 7
---
import not_there_at_all_xyz.thing as t
if True: args = SFTConfig("o", per_device_train_batch_size=7)
---
args = SFTConfig.from_dict({"output_dir": "o", "per_device_train_batch_size": 7})
---
args = SFTConfig(**{**SFTConfig("o").to_dict(), "per_device_train_batch_size": 7})
---
args = SFTConfig(**{**dataclasses.asdict(SFTConfig("o")), "per_device_train_batch_size": 7})
---
if (n := 7) and __name__ == "__main__": args = SFTConfig("o", per_device_train_batch_size=n)
---
import inspect; said = {"per_device_train_batch_size": 7, "gone": 1, "output_dir": "o"}
args = SFTConfig(**{k: v for k, v in said.items() if k in inspect.signature(SFTConfig).parameters})
---
import inspect; said = {"per_device_train_batch_size": 7, "gone": 1, "output_dir": "o"}
args = SFTConfig(**{k: v for k, v in said.items() if k in inspect.getfullargspec(SFTConfig.__init__).args})
---
import inspect; its = inspect.signature(type("Mine", (SFTTrainer,), {}).__init__).parameters
args = SFTConfig("o", per_device_train_batch_size=7 if "processing_class" in its and "tokenizer" not in its else 1)
---
import inspect
class Mine(SFTTrainer):
    def __init__(self, rows, **given): super().__init__(**given)
args = SFTConfig("o", per_device_train_batch_size=7 if [*inspect.signature(Mine).parameters] == ["rows", "given"] else 1)
---
args = SFTConfig("o", per_device_train_batch_size=SFTConfig.per_device_train_batch_size - 1 - hasattr(SFTConfig, "max_seq_length"))
---
sys.argv += ["--bs=7"]; args = SFTConfig("o", per_device_train_batch_size=int(sys.argv[-1].split("=")[1]))
"""  # noqa: E501

# Each leaves `lora`, whose rank is 7, or `model`, which has it.
ADAPTERS = """
lora = LoraConfig(r=7)
---
lora = LoraConfig(task_type="CAUSAL_LM", r=8); lora.r = 7
---
lora = LoraConfig(**dict(r=7, target_modules=["q_proj"]))
---
model = get_peft_model(AutoModelForCausalLM.from_pretrained("m"), LoraConfig(r=7))
---
model = AutoModelForCausalLM.from_pretrained("m"); get_peft_model(model, LoraConfig(r=7))
---
model = AutoModelForCausalLM.from_pretrained("m"); model.add_adapter(LoraConfig(r=7))
---
from peft import PeftModel, PeftModelForCausalLM
model = PeftModelForCausalLM(AutoModelForCausalLM.from_pretrained("m"), LoraConfig(r=7)); assert isinstance(model, PeftModel)
---
from unsloth import FastLanguageModel
model, tok = FastLanguageModel.from_pretrained("m", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=7, target_modules=["q_proj"])
---
from trl import get_peft_config; lora = get_peft_config(ModelConfig(use_peft=True, lora_r=7))
---
@dataclass
class A:
    r: int = 7
lora = LoraConfig(**dataclasses.asdict(A()))
---
lora = dataclasses.replace(LoraConfig(r=8), r=7)
---
import torch.nn as nn, bitsandbytes as bnb
model = AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
names = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)} - {"lm_head"}
lora = LoraConfig(r=7, target_modules=sorted(names)); assert len(names) == 7, names
"""  # noqa: E501

# Each leaves `model`: whether it is loaded in four bits.
QUANTIZED = """
model = AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
---
model = AutoModelForCausalLM.from_pretrained("m", **{"quantization_config": BitsAndBytesConfig(True and False, True)})
---
q = BitsAndBytesConfig(); q.load_in_4bit = True; model = AutoModelForCausalLM.from_pretrained("m", quantization_config=q)
---
q = BitsAndBytesConfig(); vars(q).update(_load_in_4bit=True); model = AutoModelForCausalLM.from_pretrained("m", quantization_config=q)
---
q = BitsAndBytesConfig(True); vars(q).update(load_in_4bit=True, load_in_8bit=False); q.load_in_8bit, q.load_in_4bit = False, True; model = AutoModelForCausalLM.from_pretrained("m", quantization_config=q)
---
from transformers import LlamaForCausalLM as L; model = L.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=1 == 1))
---
from trl import get_quantization_config as g; model = AutoModelForCausalLM.from_pretrained("m", quantization_config=g(ModelConfig(load_in_4bit=True)))
---
load = AutoModelForCausalLM.from_pretrained; model = prepare_model_for_kbit_training(load("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True)))
"""  # noqa: E501
PLAIN = """
q = BitsAndBytesConfig(load_in_4bit=True); model = AutoModelForCausalLM.from_pretrained("m")
---
model = AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True) if False else None)
---
model = AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=json.loads("false")))
---
def old(): return BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("m")
---
q = BitsAndBytesConfig(); vars(q).update(load_in_4bit=True); model = AutoModelForCausalLM.from_pretrained("m", quantization_config=q)
---
q = BitsAndBytesConfig(load_in_4bit=True); q.load_in_4bit = False; model = AutoModelForCausalLM.from_pretrained("m", quantization_config=q)
"""  # noqa: E501


def ways(text: str) -> list[str]:
    return text.strip("\n").split("\n---\n")


def run_all(folder: Any, programs: list[str]) -> list[dict[str, Any]]:
    def one(numbered: tuple[int, str]) -> dict[str, Any]:
        own = folder / str(numbered[0])
        own.mkdir()
        return read(own, numbered[1])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, enumerate(programs)))


def check(folder: Any, text: str, last: str, found: Any, right: object) -> None:
    programs = [f"{IMPORTS}\n{way}\n{last}" for way in ways(text)]
    wrong = {}
    for way, record in zip(ways(text), run_all(folder, programs), strict=True):
        try:
            value = found(record["trainings"][0])
        except (LookupError, TypeError) as error:
            value = repr(error), record["ended"]
        if value != right:
            wrong[way] = value
    assert not wrong


def test_every_way_to_set_an_argument(tmp_path):
    def size(training: dict[str, Any]) -> Any:
        return training["arguments"]["values"]["per_device_train_batch_size"]

    check(tmp_path, ARGUMENTS, "SFTTrainer('m', args=args).train()", size, 7)


def test_every_way_to_add_an_adapter(tmp_path):
    def rank(training: dict[str, Any]) -> Any:
        lora = training["lora"]
        return {**lora["given"], **lora["values"]}["r"]

    last = "k = dict(model=globals().get('model', 'm'), peft_config=globals().get('lora'))\n"
    last += "SFTTrainer(args=SFTConfig('o'), **k).train()"
    check(tmp_path, ADAPTERS, last, rank, 7)


@pytest.mark.parametrize(("text", "right"), [(QUANTIZED, True), (PLAIN, False)])
def test_every_way_to_quantize(tmp_path, text, right):
    def four(training: dict[str, Any]) -> Any:
        quantization = training["model"]["quantization"]
        return quantization is not None and quantization["values"]["load_in_4bit"]

    check(tmp_path, text, "SFTTrainer(model, args=SFTConfig('o')).train()", four, right)


def test_a_second_adapter_ends_the_program_as_in_trl(tmp_path):
    text = f"{IMPORTS}\nmodel = AutoModelForCausalLM.from_pretrained('m')\n"
    text += "made = get_peft_model(model, lora := LoraConfig(r=7))\n"
    last = "SFTTrainer({}, peft_config=lora).train()"
    assert "leave out peft_config" in read(tmp_path, text + last.format("made"))["ended"]["text"]
    found = read(tmp_path, text + last.format("model"))  # PEFT's model wraps it
    assert (found["ended"], found["trainings"][0]["lora"]["given"]) == (None, {"r": 7})


# -- what is recorded ------------------------------------------------------------------------------
def test_where_and_what_was_set(tmp_path):
    text = (
        IMPORTS.strip() + "\nargs = SFTConfig('o',\n    max_length=512)\nargs.max_length = 2048\n"
    )
    text += "class Mine(SFTTrainer):\n    def compute_loss(self, *a, **k): pass\n"
    text += "t = Mine('m', args, train_dataset=load_dataset('d'))\nt.train()\nt.evaluate()\n1 / 0\n"
    record = read(tmp_path, text)
    (training,) = record["trainings"]
    arguments, trainer = training["arguments"], training["trainer"]
    line = IMPORTS.strip().count("\n") + 2
    file = str(tmp_path / "train.py")
    at = {"file": file, "line": line, "end": line + 1, "column": 7, "end_column": 19}
    assert (arguments["class"], arguments["where"]) == ("trl.SFTConfig", at)
    assert arguments["bases"][-1] == "transformers.TrainingArguments"
    assert arguments["given"] == {"output_dir": "o", "max_length": 512}
    assert arguments["assigned"]["max_length"][0] == arguments["values"]["max_length"] == 2048
    assert arguments["assigned"]["max_length"][1]["line"] == line + 2
    assert (trainer["class"], trainer["methods"]) == ("__main__.Mine", ["compute_loss"])
    assert trainer["bases"] == ["trl.SFTTrainer", "transformers.Trainer"]
    assert (training["model"], training["evaluates"]) == ("m", True)
    assert trainer["given"]["train_dataset"]["$unknown"] == "datasets.load_dataset(...)"
    assert record["ended"]["kind"] == "error"  # after the training, it does not matter
    assert record["ended"]["text"].startswith("ZeroDivisionError")
    assert record["files"] == [file]


def test_what_only_their_construction_reads_stays(tmp_path):
    text = IMPORTS + (
        "args = __import__('copy').deepcopy(SFTConfig('o', bf16=True))\n"
        "args.bf16 = args.gradient_checkpointing = False\nSFTTrainer('m', args=args).train()\n"
        "args.activation_checkpointing = False\nSFTTrainer('m', args=args).train()\n"
        "args.set_training(gradient_checkpointing=True)\nSFTTrainer('m', args=args).train()\n"
    )
    values = [one["arguments"]["values"] for one in read(tmp_path, text)["trainings"]]
    assert [one["bf16"] for one in values] == [True] * 3
    assert [one["activation_checkpointing"] for one in values][:2] == [True, False]
    assert "set_...(...)" in values[2]["activation_checkpointing"]["$unknown"]


def test_the_sizes_are_those_that_the_trainer_reads(tmp_path):
    text = (
        IMPORTS
        + """
class Mine(TrainingArguments):
    train_batch_size = property(lambda self: 3)
    eval_batch_size = property(lambda self: 5)
    @property
    def gradient_accumulation_steps(self): return 7
    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value): pass
Trainer("m", Mine("o", per_device_train_batch_size=2)).train()
args = TrainingArguments("o", per_device_train_batch_size=2)
trainer = Trainer("m", args); args.per_device_train_batch_size = 4; trainer.train()
trainer._train_batch_size = 9; trainer.train()
trainer._train_batch_size = load_dataset("d").size; trainer.train()
"""
    )
    names = [f"per_device_{kind}_batch_size" for kind in ("train", "eval")]
    read_as = [one["arguments"]["values"] for one in read(tmp_path, text)["trainings"]]
    sizes = [[values[name] for name in names] for values in read_as]
    assert sizes[:3] == [[3, 5], [2, 8], [9, 8]]
    assert "$unknown" in sizes[3][0]
    assert read_as[0]["gradient_accumulation_steps"] == 7


def test_what_was_done_to_a_model(tmp_path):
    text = """
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("m", model_max_length=900)
model = AutoModelForCausalLM.from_pretrained("m", dtype="bfloat16").to("cuda")
model.config.use_cache = False
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model.gradient_checkpointing_enable({"use_reentrant": False})
for parameter in model.parameters():
    parameter.requires_grad = False
for name, parameter in model.named_parameters():
    if "q_proj" in name: parameter.requires_grad = True
model.model.embed_tokens.requires_grad_(False)
model = get_peft_model(model, LoraConfig(r=4))
Trainer(model, TrainingArguments("o"), data_collator=lambda rows: tokenizer(rows, max_length=300),
    train_dataset=None).train()
"""
    training = read(tmp_path, text)["trainings"][0]
    model, calls = training["model"], {each["class"]: each["given"] for each in training["calls"]}
    assert model["class"] == "transformers.AutoModelForCausalLM"
    assert model["given"]["pretrained_model_name_or_path"] == "m"
    assert model["prepared"]["given"] == {"use_gradient_checkpointing": False}
    assert model["enabled"]["given"] == {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert model["assigned"]["config.use_cache"][0] is False
    assert training["lora"]["values"]["r"] == 4
    frozen = [each["given"] for each in training["calls"] if "requires_grad" in each["class"]]
    assert [each["value"] for each in frozen] == [False, True, False]
    assert all("q_proj" in name for name in frozen[1]["names"])
    assert frozen[2]["names"] == ["embed_tokens"]
    assert "transformers.AutoTokenizer" not in calls  # whose model_max_length cuts nothing
    assert calls["tokenizer"] == {"max_length": 300}


def test_tokens_that_a_mapped_function_keeps(tmp_path):
    text = """
from itertools import chain
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def blocks(rows):
    joined = {name: list(chain(*rows[name])) for name in rows.keys()}
    end = len(joined["input_ids"]) // 2048 * 2048
    return {n: [v[i : i + 2048] for i in range(0, end, 2048)] for n, v in joined.items()}
data = load_dataset("text").map(blocks, batched=True)
data = data.map(lambda row: {"input_ids": row["input_ids"][:512]})
data = data.map(lambda row: {"input_ids": row["input_ids"] + [1]})
data = data.map(lambda row: {"text": row["text"][:100]})
Trainer(AutoModelForCausalLM.from_pretrained("m"), TrainingArguments("o"), data).train()
"""
    calls = read(tmp_path, text)["trainings"][0]["calls"]
    lengths = {call["where"]["line"]: call["given"]["max_length"] for call in calls}
    assert lengths == {9: 2048, 10: 512}


LOOPS = """
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler
model = AutoModelForCausalLM.from_pretrained("m"); opt = torch.optim.AdamW(model.parameters(), 1e-4)
loader = DataLoader(ds := object(), batch_size=3); schedule = get_scheduler("cosine", opt)
schedules = [schedule, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 9)]
for i, batch in enumerate(loader):
    loss = model(**batch).loss / 4; loss.backward()
    if (i + 1) % 4 == 0: opt.step(); [each.step() for each in schedules]; opt.zero_grad()
---
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
accelerator = Accelerator(gradient_accumulation_steps=4); model = AutoModelForCausalLM.from_pretrained("m")
model, opt, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader([1] * 192, 3))
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        opt.step()
"""  # noqa: E501


@pytest.mark.parametrize("text", ways(LOOPS))
def test_loops(tmp_path, text):
    (loop,) = read(tmp_path, text)["loops"]
    assert (loop["backwards"], loop["steps"]) == (64, 16)
    assert loop["batch"]["$object"]["given"]["batch_size"] == 3
    assert loop["model"]["given"] == {"pretrained_model_name_or_path": "m"}


def test_an_endless_loop_without_a_loader_is_seen(tmp_path):
    text = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("m"); opt = torch.optim.AdamW(model.parameters(), 1e-4)
while True:
    for micro in range(3):
        model(torch.randint(9, (4, 8), device="cuda")).loss.backward()
    opt.step()
"""
    found = read(tmp_path, text)
    (loop,) = found["loops"]
    assert loop["backwards"] == 3 * loop["steps"]
    assert found["ended"]["kind"] == "exit"


# -- what only the real library knows --------------------------------------------------------------
UNKNOWN = """
u = load_dataset("d"); a, b = u; c, *d = u.x[0]; f"{u:>9}"; str(u + 1); -u; 2 ** u; u @ u; u["x"]["y"] = 3
assert u["x"]["y"] == 3 and u.x is u.x; hash(u); copy.deepcopy(u) is u; json.dumps({"a": u})
import re; re.sub("a", "b", u); re.search("a", u.text); sorted([u.a, u.b]); max(1, u.n); list(range(min(3, u.n)))
with u as v: pass
async def f():
    async with u: await u
    async for row in u: pass
import asyncio; asyncio.run(f())
dict(**u); {**u}; print(*u); (lambda **k: k)(**u); isinstance(u, torch.Tensor); u[1:2]; del u["x"]; u.x += 1
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.a = torch.nn.Linear(4, 4)
    @torch.no_grad()
    def forward(self, x): return self.a(x)
Net()(u).backward; Net().to("cuda").parameters(); torch.tensor([1.0]).item(); float(u.f); int(u.i); round(u.r, 2)
import numpy as np; np.mean(u); np.array([1]) + u; u.shape[0] * 2
Net()(**{k: v.to(0) for k, v in u.items() if k != "a" and hasattr(u, k)}); json.load(open(u.path))
dataclasses.asdict(u); " ".join(u["words"]); import logging; logging.getLogger().setLevel(u.level)
sep = "; "; sep.join([u.x]); "a".replace("a", u.t); os.environ["X"] = u.t; open("w", "w").write(u.t)
import textwrap, hashlib, own; textwrap.dedent(u.t); hashlib.sha256(u.t.encode()); own.joined([u.x])
copy.copy(AutoModelForCausalLM.from_pretrained("m"))
from transformers import MODEL_MAPPING; [each.model_type for each in MODEL_MAPPING.keys()]
"""  # noqa: E501


def test_programs_go_on_with_what_is_unknown(tmp_path):
    last = "\nSFTTrainer('m', args=SFTConfig('o', max_length=u.n, warmup_steps=int(u.n))).train()"
    record = read(tmp_path, IMPORTS + UNKNOWN + last)
    assert record["ended"] is None
    values = record["trainings"][0]["arguments"]["values"]
    assert values["max_length"]["$unknown"] == "datasets.load_dataset(...).n"
    assert values["max_length"]["where"][0]["line"] == IMPORTS.count("\n") + 2
    assert {"what", "where"} == set(record["asked"][0])


def test_what_is_not_installed(tmp_path):
    text = "import lib_that_is_nowhere as lib\ntry:\n    import other_nowhere\n    n = 1\n"
    text += "except ImportError:\n    n = 2\n@lib.main(config='c')\ndef main(cfg):\n"
    text += "    from trl import SFTConfig, SFTTrainer\n"
    text += "    SFTTrainer('m', args=SFTConfig('o', max_length=n, packing=cfg.p)).train()\n"
    text += "main.remote()"
    record = read(tmp_path, text)
    assert record["absent"][0] == "lib_that_is_nowhere"
    assert [each["what"] for each in record["asked"]] == ["is other_nowhere installed"]
    values = record["trainings"][0]["arguments"]["values"]
    assert values["packing"] == {"$unknown": "cfg.p", "where": []}


def test_what_a_class_that_is_not_installed_leaves_unsaid_is_unknown(tmp_path):
    text = IMPORTS + "from lib_that_is_nowhere import Own\nargs, = HfArgumentParser(Own)"
    text += ".parse_args_into_dataclasses()\nSFTTrainer('m', args=args).train()"
    arguments = read(tmp_path, text, "--max_length", "7")["trainings"][0]["arguments"]
    assert arguments["given"]["**"]["$unknown"] == "defaults of lib_that_is_nowhere.Own"
    assert arguments["values"]["max_length"] == 7


def test_names_that_a_release_lacks(tmp_path):
    text = "try:\n    from trl import OldTrainer\nexcept ImportError:\n    import trl\n"
    text += "    if not hasattr(trl, 'OlderTrainer'):\n"
    text += "        from trl import SFTConfig, ORPOTrainer\n"
    text += "        ORPOTrainer('m', args=SFTConfig('o')).train(); trl.GoneTrainer\n"
    names = {"SFTConfig": "trl", "ORPOTrainer": "trl.experimental.orpo"}
    record = read(tmp_path, text, exports={"trl": names})
    assert [each["trainer"]["class"] for each in record["trainings"]] == ["trl.ORPOTrainer"]
    lacking, gone = [each["what"].partition(", which ends with ")[2] for each in record["dropped"]]
    assert lacking.endswith("has no ORPOTrainer: import it from trl.experimental.orpo")
    assert gone.endswith("has no GoneTrainer")


def test_names_that_transformers_lacks(tmp_path):
    text = "from transformers import BertModel, Trainer, TFBertModel, AdamW\n"
    text += "from trl import SFTConfig, SFTTrainer\nSFTTrainer('m', args=SFTConfig('o')).train()\n"
    names = {"Trainer": "transformers", "bert*": "transformers"}
    record = read(tmp_path, text, exports={"transformers": names})
    (lacking,) = record["dropped"]
    assert lacking["what"].endswith("has no AdamW")


def test_what_vars_sets_is_assigned(tmp_path):
    text = "import copy\nfrom trl import SFTConfig, SFTTrainer\na = SFTConfig('o', max_steps=3)\n"
    text += "vars(a).update(max_length=None)\nobject.__setattr__(a, 'max_steps', 4)\n"
    text += "SFTTrainer('m', args=copy.deepcopy(a)).train()\n"
    (training,) = read(tmp_path, text)["trainings"]
    assigned = training["arguments"]["assigned"]
    assert {name: value for name, (value, _) in assigned.items()} == {
        "max_length": None,
        "max_steps": 4,
    }
    assert {where["line"] for _, where in assigned.values()} == {3}


def test_a_folder_of_installed_packages_is_not_the_programs_own(tmp_path):
    for path, text in {
        "libs/wandb-1.dist-info/METADATA": "",
        "libs/wandb/__init__.py": "raise ImportError('it was run')",
        "libs/helper.py": "import trl\ndef make(): return trl.SFTConfig('o')",
        "train.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    text = "import sys\nsys.path.insert(0, 'libs')\nimport helper, wandb\n"
    text += "from trl import SFTTrainer\nSFTTrainer('m', args=helper.make()).train()\n"
    record = read(tmp_path, text)
    assert "wandb" in record["standins"]
    assert record["trainings"][0]["arguments"]["where"]["line"] == 5
