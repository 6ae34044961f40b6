"""Runs exports in the tools that they are for, and compares their memory with the prediction.

    python -m benchmarks.exports [--only trl] [--model llama-3.2-1b] [--python /env/bin/python]

Each export is made as `tuner export` makes it, of one configuration; data and a few steps are
added, and the tool runs it on an emulated GPU. The prediction is of the configuration as the tool
trains it: what the export says that it leaves out is set to what the tool does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tuner.app.estimate import one_configuration
from tuner.core.records import Configuration, KnobValue
from tuner.core.units import MIB
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.predict.predict import predict, resolve_subject
from tuner.program.export import ExportInput, export
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import is_hollow, write_hollow

GPU = "a6000"
LORA: Mapping[str, KnobValue] = {
    "micro_batch": 2,
    "effective_batch": 4,
    "grad_accum": 2,
    "max_length": 512,
    "lora_rank": 16,
    "precision": "bf16",
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
    "optimizer": "adamw_torch",
}
QLORA: Mapping[str, KnobValue] = {
    **LORA,
    "precision": "nf4",
    "optimizer": "adamw_8bit",
    "max_grad_norm": 0.3,
}
TEXT = "One after the other. " * 800


@dataclass(frozen=True, slots=True)
class Case:
    """One export. `does` is what the tool does of what it cannot be told."""

    tool: str
    settings: Mapping[str, KnobValue]
    does: Mapping[str, KnobValue] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people: "trl nf4 reentrant"."""
        words = [self.tool, str(self.settings["precision"])]
        return " ".join([*words, *["reentrant"] * bool(self.settings.get("use_reentrant"))])


TRL = {"loss": "chunked", "adapter_dtype": "bf16", "kbit_preparation": "none"}
REENTRANT = {"use_reentrant": True}
CASES = (
    Case("trainer", LORA),
    Case("trainer", {**QLORA, **REENTRANT}),
    Case("trl", LORA, {"loss": "chunked"}),
    Case("trl", QLORA, TRL),
    Case("trl", {**QLORA, **REENTRANT}, TRL),
    Case("accelerate", LORA, {"max_grad_norm": 0.0}),
    Case("llamafactory", LORA),
    Case("llamafactory", QLORA, {"kbit_preparation": "none"}),
)

_TRAINER = """\
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForLanguageModeling,
    Trainer, TrainingArguments,
)
import settings as s

if hasattr(s, "QUANTIZATION"):
    s.MODEL["quantization_config"] = BitsAndBytesConfig(**s.QUANTIZATION)
model = AutoModelForCausalLM.from_pretrained(**s.MODEL, device_map={{"": 0}})
if hasattr(s, "PREPARATION"):
    model = prepare_model_for_kbit_training(model, **s.PREPARATION)
model = get_peft_model(model, LoraConfig(**s.LORA))
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
tokens = tokenizer({text!r}, **s.TOKENIZER)["input_ids"]
Trainer(
    model=model,
    train_dataset=Dataset.from_list([{{"input_ids": tokens}}] * 64),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    args=TrainingArguments("out", max_steps=4, report_to="none", **s.TRAINING),
).train()
"""
_ACCELERATE = """\
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

accelerator = Accelerator(gradient_accumulation_steps={grad_accum})
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
model.gradient_checkpointing_enable({{"use_reentrant": False}})
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r={lora_rank}, lora_alpha={lora_alpha},
    target_modules="all-linear", task_type="CAUSAL_LM"))
trained = [p for p in model.parameters() if p.requires_grad]
rows = torch.utils.data.DataLoader(
    [torch.full(({max_length},), 7) for _ in range(64)], batch_size={micro_batch}
)
model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(trained), rows)
model.train()


for tokens in rows:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def prepared(case: Case, configuration: Configuration, folder: Path) -> list[str]:
    """Write the export and what it needs into `folder`; the command that runs it."""
    subject = ExportInput(configuration, "causal_lm", "model", case.name)
    text = export(case.tool, subject).text
    if case.tool == "trainer":
        (folder / "settings.py").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(_TRAINER.format(text=TEXT), encoding="utf-8")
        return ["python", "train.py"]
    if case.tool == "accelerate":
        (folder / "accelerate.yaml").write_text(text, encoding="utf-8")
        script = _ACCELERATE.format(**configuration)
        (folder / "train.py").write_text(script, encoding="utf-8")
        return ["accelerate", "launch", "--config_file", "accelerate.yaml", "train.py"]
    more, command = _FILES[case.tool](folder)
    path = folder / "settings.yaml"
    path.write_text(text + yaml.safe_dump({"max_steps": 4, **more}), encoding="utf-8")
    return [*command, path.name]


def _trl(folder: Path) -> tuple[dict[str, Any], list[str]]:
    _rows(folder / "data" / "train.jsonl", {"text": TEXT})
    more = {"dataset_name": "data", "output_dir": "out", "report_to": "none"}
    return more, ["trl", "sft", "--config"]


def _llamafactory(folder: Path) -> tuple[dict[str, Any], list[str]]:
    (folder / "data").mkdir()
    rows = [{"instruction": "Go on.", "input": "", "output": TEXT}] * 64
    (folder / "data" / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    known = json.dumps({"rows": {"file_name": "rows.json"}})
    (folder / "data" / "dataset_info.json").write_text(known, encoding="utf-8")
    more = {
        "dataset_dir": "data",
        "dataset": "rows",
        "template": "alpaca",
        "output_dir": "out",
        "learning_rate": 1e-4,
        "report_to": "none",
    }
    return more, ["llamafactory-cli", "train"]


_FILES = {"trl": _trl, "llamafactory": _llamafactory}


def _rows(path: Path, row: Mapping[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([json.dumps(row)] * 64), encoding="utf-8")


def run(case: Case, model: Path, python: str = sys.executable) -> tuple[int, Emulation, str]:
    """Predicted peak of allocated bytes, the emulation, and the end of what was printed."""
    _, configuration = one_configuration(None, str(model), case.settings)
    _, trained = one_configuration(None, str(model), {**case.settings, **case.does})
    gpu = get_gpu(GPU)
    predicted = predict(resolve_subject("causal_lm", str(model)), trained, gpu)
    programs = Path(python).parent
    os.environ["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        folder = Path(name)
        (folder / "model").symlink_to(model)
        command = prepared(case, configuration, folder)
        command[0] = str(programs / command[0])
        found = Machine(gpu).run(command, steps=3, timeout_s=900, output=log, cwd=folder)
        log.seek(max(0, log.tell() - 2000))
        tail = log.read().decode(errors="replace")
    return predicted.memory.peak_allocated_bytes, found, tail


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="names of cases that begin so, commas between")
    parser.add_argument("--model", default="llama-3.2-1b", help="a model of the catalogue")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary, options.model)
        if not is_hollow(model):
            write_hollow(options.model, model)
        for case in CASES:
            if not case.name.startswith(tuple(options.only.split(","))):
                continue
            predicted_bytes, found, tail = run(case, model, options.python)
            use = found.limiting
            if use is None or found.steps == 0:
                print(f"| {case.name} | {found.ended} | {found.error} |\n{tail}", flush=True)
                continue
            share = predicted_bytes / use.peak_allocated_bytes - 1
            print(
                f"| {case.name} | {predicted_bytes / MIB:,.1f} | "
                f"{use.peak_allocated_bytes / MIB:,.1f} | {share:+.2%} |",
                flush=True,
            )
            print(f"  {found.inputs} {found.settings}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
