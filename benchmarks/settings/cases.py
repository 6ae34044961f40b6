"""Trainings as people set and start them, each as the files that its trainer is started with.

Every example is longer than the maximum length, so that each batch is full: what is compared is
what the trainer does, not how long the data happens to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

_ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One training: `words` start it in a folder that has `files`."""

    name: str
    trainer: str
    settings: str
    """What differs from the trainer's defaults, for the table."""
    model: str
    gpu: str
    words: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    """The packages that an environment needs beside PyTorch."""
    launcher: tuple[str, ...] = ()
    """What starts several ranks."""


_HEAD = """\
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

{before}
"""

_SFT = """\
trainer = SFTTrainer(
    model={model},
    train_dataset=Dataset.from_list([{{"text": "One after the other. " * 800}}] * 64),
    args=SFTConfig(output_dir="out", max_steps=4, report_to="none", {arguments}),
    {rest}
)
trainer.train()
"""

_DPO = """\
row = {{"prompt": "What comes?", "chosen": "One. " * 1600, "rejected": "Two. " * 1600}}
trainer = DPOTrainer(
    model={model},
    train_dataset=Dataset.from_list([row] * 64),
    args=DPOConfig(output_dir="out", max_steps=4, report_to="none", {arguments}),
    {rest}
)
trainer.train()
"""

_TRAINER = """\
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.pad_token = tokenizer.eos_token
tokens = tokenizer("One after the other. " * 800, truncation=True, max_length=1024)
trainer = Trainer(
    model=model,
    train_dataset=Dataset.from_list([{{"input_ids": tokens["input_ids"]}}] * 64),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    args=TrainingArguments(output_dir="out", max_steps=4, report_to="none", {arguments}),
)
trainer.train()
"""

_NF4 = (
    'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",'
    " bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)"
)
_LORA = 'LoraConfig(r={rank}, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")'


_FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
_ACCELERATE = {"distributed_type": "FSDP", "num_machines": 1, "num_processes": 2}


def _loaded(**options: str) -> str:
    given = "".join(f", {name}={value}" for name, value in options.items())
    return f'model = AutoModelForCausalLM.from_pretrained("model"{given})'


def _script(  # noqa: PLR0913 - one argument for each part of the text
    name: str,
    trainer: str,
    settings: str,
    *,
    model: str = "llama-3.2-1b",
    gpu: str = "a6000",
    loaded: str = "",
    arguments: str = "",
    rest: str = "",
    launcher: str = "",
    fsdp: Mapping[str, Any] | None = None,
) -> Case:
    body = {"TRL SFT": _SFT, "TRL DPO": _DPO, "HF Trainer": _TRAINER}[trainer]
    text = _HEAD.format(before=loaded) + body.format(
        model="model" if loaded else '"model"', arguments=arguments, rest=rest
    )
    files = {"train.py": text}
    if fsdp is not None:
        files["fsdp.yaml"] = yaml.safe_dump({**_ACCELERATE, "fsdp_config": {**_FSDP2, **fsdp}})
    started = tuple(launcher.split())
    return Case(name, trainer, settings, model, gpu, ("train.py",), files, "trl", started)


def _adapter(rank: int) -> str:
    return f"peft_config={_LORA.format(rank=rank)}"


_SCRIPTS = (
    _script("sft_lora", "TRL SFT", "LoRA r 16", rest=_adapter(16)),
    _script(
        "sft_lora_bf16",
        "TRL SFT",
        "bf16 model, LoRA r 32, length 2048",
        arguments='model_init_kwargs={"dtype": "bfloat16"}, max_length=2048',
        rest=_adapter(32),
    ),
    _script(
        "sft_lora_stored",
        "TRL SFT",
        "bf16 model, LoRA r 16, no checkpointing, batch 2",
        loaded=_loaded(dtype="torch.bfloat16"),
        arguments="gradient_checkpointing=False, per_device_train_batch_size=2",
        rest=_adapter(16),
    ),
    _script(
        "sft_qlora",
        "TRL SFT",
        "nf4, LoRA r 16, batch 4, accumulation 4, paged 8-bit AdamW",
        model="qwen2.5-1.5b",
        loaded=_loaded(quantization_config=_NF4, dtype="torch.bfloat16"),
        arguments="per_device_train_batch_size=4, gradient_accumulation_steps=4,"
        ' optim="paged_adamw_8bit"',
        rest=_adapter(16),
    ),
    _script("sft_full", "TRL SFT", "all weights", gpu="h100_sxm"),
    _script(
        "sft_full_bf16",
        "TRL SFT",
        "all weights in bf16, 8-bit AdamW, batch 2",
        model="qwen2.5-0.5b",
        loaded=_loaded(dtype="torch.bfloat16"),
        arguments='per_device_train_batch_size=2, optim="adamw_8bit"',
    ),
    _script(
        "dpo_lora",
        "TRL DPO",
        "LoRA r 16, batch 2",
        arguments="per_device_train_batch_size=2",
        rest=_adapter(16),
    ),
    _script(
        "dpo_lora_bf16",
        "TRL DPO",
        "bf16 model, LoRA r 32, batch 4, length 512",
        model="qwen2.5-1.5b",
        loaded=_loaded(dtype="torch.bfloat16"),
        arguments="per_device_train_batch_size=4, max_length=512",
        rest=_adapter(32),
    ),
    _script(
        "dpo_qlora",
        "TRL DPO",
        "nf4, LoRA r 16, batch 2, accumulation 2",
        loaded=_loaded(quantization_config=_NF4, dtype="torch.bfloat16"),
        arguments="per_device_train_batch_size=2, gradient_accumulation_steps=2",
        rest=_adapter(16),
    ),
    _script(
        "trainer_full",
        "HF Trainer",
        "all weights in bf16, batch 4, checkpointing",
        loaded=_loaded(dtype="torch.bfloat16"),
        arguments="per_device_train_batch_size=4, bf16=True, gradient_checkpointing=True",
    ),
    _script(
        "trainer_full_fp32",
        "HF Trainer",
        "all weights in fp32 under bf16, batch 2",
        model="qwen2.5-0.5b",
        loaded=_loaded(dtype="torch.float32"),
        arguments="per_device_train_batch_size=2, bf16=True",
    ),
    _script(
        "trainer_lora",
        "HF Trainer",
        "stored dtype, LoRA r 16 on its default modules, batch 4",
        loaded=_loaded()
        + '\nmodel = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"))',
        arguments="per_device_train_batch_size=4, bf16=True",
    ),
    _script(
        "trainer_qlora",
        "HF Trainer",
        "nf4, k-bit preparation, LoRA r 16, batch 4, accumulation 4",
        loaded=_loaded(quantization_config=_NF4)
        + "\nmodel = prepare_model_for_kbit_training(model)"
        + f"\nmodel = get_peft_model(model, {_LORA.format(rank=16)})",
        arguments="per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True",
    ),
)


def _axolotl(name: str, settings: str, model: str = "llama-3.2-1b", **keys: Any) -> Case:
    data = "\n".join(json.dumps({"text": "One after the other. " * 800}) for _ in range(_ROWS))
    values: dict[str, Any] = {
        "base_model": "model",
        "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
        "output_dir": "out",
        "sequence_len": 1024,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 2e-4,
        "optimizer": "adamw_8bit",
        "bf16": "auto",
        "attn_implementation": "sdpa",
        "special_tokens": {"pad_token": "<|reserved_special_token_0|>"},
        **keys,
    }
    if "qwen" in model:
        values["special_tokens"] = {"pad_token": "<|endoftext|>"}
    files = {"axolotl.yml": yaml.safe_dump(values, sort_keys=False), "data.jsonl": data}
    return Case(name, "Axolotl", settings, model, "a6000", ("axolotl.yml",), files, "axolotl")


_LINEAR = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
_AXOLOTL = (
    _axolotl(
        "axolotl_lora",
        "LoRA r 16, packed",
        adapter="lora",
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=_LINEAR,
        sample_packing=True,
        gradient_checkpointing=True,
    ),
    _axolotl(
        "axolotl_qlora",
        "nf4, LoRA r 32",
        adapter="qlora",
        load_in_4bit=True,
        lora_r=32,
        lora_alpha=16,
        lora_dropout=0.05,
        lora_target_linear=True,
        gradient_checkpointing=True,
    ),
    _axolotl(
        "axolotl_lora_8bit",
        "int8, LoRA r 16, batch 4",
        adapter="lora",
        load_in_8bit=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=["q_proj", "v_proj"],
        micro_batch_size=4,
        gradient_checkpointing=True,
    ),
    _axolotl("axolotl_full", "all weights", gradient_checkpointing=True),
)


def _llamafactory(name: str, settings: str, model: str = "llama-3.2-1b", **keys: Any) -> Case:
    rows = [{"instruction": "Go on.", "input": "", "output": "One. " * 1600}] * _ROWS
    values: dict[str, Any] = {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "dataset_dir": "data",
        "dataset": "rows",
        "template": "alpaca",
        "cutoff_len": 1024,
        "output_dir": "out",
        "max_steps": 4,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1.0e-4,
        "bf16": True,
        **keys,
    }
    files = {
        "llamafactory.yaml": yaml.safe_dump(values, sort_keys=False),
        "data/rows.json": json.dumps(rows),
        "data/dataset_info.json": json.dumps({"rows": {"file_name": "rows.json"}}),
    }
    words = ("llamafactory.yaml",)
    return Case(name, "LLaMA-Factory", settings, model, "a6000", words, files, "llamafactory")


_LLAMAFACTORY = (
    _llamafactory("lf_lora", "LoRA r 8", lora_rank=8, lora_target="all"),
    _llamafactory(
        "lf_qlora", "nf4, LoRA r 16", lora_rank=16, lora_target="all", quantization_bit=4
    ),
    _llamafactory(
        "lf_full",
        "all weights, accumulation 2",
        model="qwen2.5-0.5b",
        finetuning_type="full",
        gradient_accumulation_steps=2,
    ),
)

_TORCHRUN = "torchrun --standalone --nproc-per-node 2"
_BY_FILE = "accelerate launch --config_file fsdp.yaml"
_PACKED = _NF4[:-1] + ", bnb_4bit_quant_storage=torch.bfloat16)"
_BATCH = "per_device_train_batch_size=2, gradient_accumulation_steps=4, "


def _launched(name: str, settings: str, launcher: str, **more: Any) -> Case:
    more = {"loaded": _loaded(dtype="torch.bfloat16"), "gpu": "h100_sxm", **more}
    more["arguments"] = _BATCH + more.get("arguments", "")
    return _script(name, "TRL SFT", settings, launcher=launcher, **more)


_LAUNCHED = (
    _launched("launched_ddp", "2 ranks: DDP", _TORCHRUN),
    _launched("launched_fsdp2", "2 ranks: FSDP2", _BY_FILE, fsdp={}),
    _launched(
        "launched_fsdp2_unsharded", "4 ranks: FSDP2", f"{_BY_FILE} --num_processes 4", fsdp={}
    ),
    _launched(
        "launched_fsdp2_synced",
        "4 ranks: FSDP2, gradients exchanged in each micro-step",
        f"{_BY_FILE} --num_processes 4",
        fsdp={},
        arguments='accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}',
    ),
    _launched(
        "launched_fsdp2_checkpointing",
        "2 ranks: FSDP2 and its own checkpointing",
        _BY_FILE,
        fsdp={"fsdp_activation_checkpointing": True},
        arguments="gradient_checkpointing=False",
    ),
    _launched(
        "launched_fsdp2_kept",
        "2 ranks: FSDP2, gathered weights kept, head not tied",
        _TORCHRUN,
        model="tinyllama-1.1b",
        arguments='fsdp=True, fsdp_config={"reshard_after_forward": False}',
    ),
    _launched(
        "launched_fsdp2_nf4",
        "4 ranks: FSDP2, nf4, LoRA r 16",
        f"{_BY_FILE} --num_processes 4",
        fsdp={},
        loaded=_loaded(quantization_config=_PACKED, dtype="torch.bfloat16"),
        rest=_adapter(16),
    ),
    _launched(
        "launched_fsdp2_nf4_8b",
        "2 ranks: FSDP2, nf4, LoRA r 16; most while it loads",
        _BY_FILE,
        fsdp={},
        model="llama-3.1-8b",
        loaded=_loaded(quantization_config=_PACKED, dtype="torch.bfloat16"),
        rest=_adapter(16),
    ),
)

CASES = (*_SCRIPTS, *_AXOLOTL, *_LLAMAFACTORY, *_LAUNCHED)
