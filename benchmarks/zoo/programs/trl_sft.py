"""TRL's SFTTrainer with LoRA, as its documentation has it: python trl_sft.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

# Conversations of different lengths: the loss is that of the answers' tokens.
rows = [
    {
        "prompt": [{"role": "user", "content": f"What comes after {i}?"}],
        "completion": [{"role": "assistant", "content": f"{i + 1}. " * (length // 8 + 3 * i)}],
    }
    for i in range(32)
]
trainer = SFTTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        max_length=length,
        learning_rate=2e-4,
        logging_steps=1,
        max_steps=4,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
    peft_config=LoraConfig(r=32, target_modules="all-linear"),
)
trainer.train()
