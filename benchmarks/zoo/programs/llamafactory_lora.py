"""LLaMA-Factory with common LoRA settings: python llamafactory_lora.py MODEL [LENGTH]."""

import json
import os
import sys
from pathlib import Path

import yaml

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

data = Path("data")
data.mkdir(exist_ok=True)
rows = [
    {
        "instruction": f"Count on from {i}.",
        "input": "",
        "output": f"{i + 1}. " * (length // 8 + i),
    }
    for i in range(64)
]
(data / "counting.json").write_text(json.dumps(rows), encoding="utf-8")
(data / "dataset_info.json").write_text(
    json.dumps({"counting": {"file_name": "counting.json"}}), encoding="utf-8"
)

settings = {
    "model_name_or_path": folder,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset_dir": "data",
    "dataset": "counting",
    "template": "alpaca",
    "cutoff_len": length,
    "preprocessing_num_workers": 1,
    "dataloader_num_workers": 0,
    "output_dir": "out",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "max_steps": 4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
}
Path("lora.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
# As in an activated environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
command = ["llamafactory-cli", "train", "lora.yaml"]
os.execvp(command[0], command)
