"""Axolotl with common LoRA settings, by its own command: python axolotl_lora.py MODEL [LENGTH]."""

import json
import os
import sys
from pathlib import Path

import yaml

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

with Path("data.jsonl").open("w", encoding="utf-8") as data:
    for i in range(64):
        row = {
            "instruction": f"Count on from {i}.",
            "input": "",
            "output": f"{i + 1}. " * (length // 8 + i),
        }
        data.write(json.dumps(row) + "\n")

settings = {
    "base_model": folder,
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "alpaca"}],
    "val_set_size": 0.0,
    "output_dir": "out",
    "adapter": "lora",
    "sequence_len": length,
    "excess_length_strategy": "truncate",
    "sample_packing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": [
        "gate_proj",
        "down_proj",
        "up_proj",
        "q_proj",
        "v_proj",
        "k_proj",
        "o_proj",
    ],
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 2,
    "max_steps": 4,
    "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "attn_implementation": "sdpa",
    "logging_steps": 1,
    "save_strategy": "no",
    "special_tokens": {"pad_token": "<|reserved_special_token_0|>"},
}
Path("lora.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
# As in an activated environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
os.execvp("axolotl", ["axolotl", "train", "lora.yml"])
