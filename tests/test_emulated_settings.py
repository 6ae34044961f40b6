"""Trainers take what is predicted of their settings: each emulated once, with a tiny model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.emulating import needs_emulator
from tuner.app.program_oracle import ProgramPredictions
from tuner.emulator import Machine
from tuner.program.launch import read_launch
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config
from tuner.space.models.hollow import write_hollow

# Every example is longer than the maximum length: what is compared is not how long the data is.
HEAD = """\
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
"""
NF4 = (
    'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",'
    " bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True{})"
)
LOADED = (
    'model = AutoModelForCausalLM.from_pretrained("model", quantization_config='
    f"{NF4}, dtype=torch.bfloat16)\n"
)
ARGUMENTS = 'output_dir="out", max_steps=4, report_to="none",'
SFT = f"""\
trainer = SFTTrainer(
    model=model,
    train_dataset=Dataset.from_list([{{{{"text": "One after the other. " * 800}}}}] * 64),
    args=SFTConfig({ARGUMENTS} {{}}),
    peft_config=lora,
)
trainer.train()
"""
DPO = f"""\
row = {{"prompt": "What comes?", "chosen": "One. " * 1600, "rejected": "Two. " * 1600}}
trainer = DPOTrainer(
    model="model",
    train_dataset=Dataset.from_list([row] * 64),
    args=DPOConfig({ARGUMENTS} per_device_train_batch_size=2),
    peft_config=lora,
)
trainer.train()
"""
TRAINER = f"""\
model = AutoModelForCausalLM.from_pretrained("model", quantization_config={NF4.format("")})
model = get_peft_model(prepare_model_for_kbit_training(model), lora)
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.pad_token = tokenizer.eos_token
tokens = tokenizer("One after the other. " * 800, truncation=True, max_length=1024)
batch = {{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}}
trainer = Trainer(
    model=model,
    train_dataset=Dataset.from_list([{{"input_ids": tokens["input_ids"]}}] * 64),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    args=TrainingArguments({ARGUMENTS} bf16=True, **batch),
)
trainer.train()
"""
FSDP2 = """\
distributed_type: FSDP
num_machines: 1
num_processes: 2
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
ACCUMULATED = "per_device_train_batch_size={}, gradient_accumulation_steps=4, "
PROGRAMS = {
    "sft_qlora": LOADED.format("") + SFT.format(ACCUMULATED.format(4) + 'optim="paged_adamw_8bit"'),
    "dpo_lora": DPO,
    "trainer_qlora": TRAINER,
    "launched_fsdp2_nf4": LOADED.format(", bnb_4bit_quant_storage=torch.bfloat16")
    + SFT.format(ACCUMULATED.format(2)),
}
LAUNCHER = "accelerate launch --config_file fsdp.yaml --num_processes 4"
ARRIVING = ("micro_batch", "grad_accum", "mixed_precision", "gradient_checkpointing",
            "use_reentrant", "optimizer", "lora_rank", "precision")  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(
    "name", ["sft_qlora", *(pytest.param(n, marks=pytest.mark.proof) for n in [*PROGRAMS][1:])]
)
def test_a_trainer_takes_what_is_predicted_of_its_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In fp32, which not all trainers load as it is; in bf16 to be quantised.
    dtype = "float32" if name == "dpo_lora" else "bfloat16"
    config = resolve_config("tiny-llama-3m")
    config.dtype = dtype
    config.save_pretrained(tmp_path / "config")
    write_hollow(str(tmp_path / "config"), tmp_path / "model")
    (tmp_path / "train.py").write_text(HEAD + PROGRAMS[name])
    (tmp_path / "fsdp.yaml").write_text(FSDP2)
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([folder, os.environ["PATH"]]))
    launched = "launched" in name
    gpu = get_gpu("h100_sxm" if launched else "a6000")
    command = [*(LAUNCHER.split() if launched else [sys.executable]), "train.py"]
    ranks = read_launch(read_program(command, tmp_path)).processes or 1
    with (tmp_path / "log").open("w+") as log:
        emulated = Machine(gpu, ranks).run(
            command, steps=2, timeout_s=900, output=log, cwd=tmp_path
        )
        log.seek(0)
        assert emulated.ended == "steps", log.read()[-2000:]
    words = [*(LAUNCHER.split() if launched else []), "train.py"]
    program = read_program(words, tmp_path, is_run=False)
    found = ProgramPredictions(program, gpu).as_it_is()
    use = emulated.limiting
    assert use is not None
    allocated_bytes = found.prediction.memory.peak_allocated_bytes
    assert allocated_bytes == pytest.approx(use.peak_allocated_bytes, rel=0.03)
    assert found.prediction.trainable_params == use.trainable_params
    for knob in ARRIVING:
        if knob in emulated.settings:
            assert found.settings[knob] == emulated.settings[knob], knob
