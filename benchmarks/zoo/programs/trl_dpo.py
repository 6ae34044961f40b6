"""TRL's DPOTrainer with LoRA: python trl_dpo.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

model = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rows = [
    {
        "prompt": f"What comes after {i}? " * 4,
        "chosen": f"After {i} comes {i + 1}. " * (length // 64 + i),
        "rejected": f"After {i} comes {i}. " * (length // 96 + i),
    }
    for i in range(32)
]
trainer = DPOTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=DPOConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        max_length=length,
        logging_steps=1,
        max_steps=4,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
