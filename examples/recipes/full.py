"""Full fine-tuning: accelerate launch --config_file fsdp.yaml full.py MODEL."""

import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

question = {"role": "user", "content": "Tell me a story. " * 20}
answer = {"role": "assistant", "content": "Once upon a time. " * 700}

SFTTrainer(
    model=sys.argv[1],
    train_dataset=Dataset.from_list([{"messages": [question, answer]}] * 512),
    args=SFTConfig(
        output_dir="full",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_length=2048,
        bf16=True,
        save_strategy="no",
    ),
).train()
