"""SFTTrainer with packed samples, attended each by itself: python packing.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

model = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rows = [{"text": f"Sample {i} of many. " * (1 + i % 11)} for i in range(64 * max(length // 64, 8))]
trainer = SFTTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        max_length=length,
        packing=True,
        padding_free=True,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
        logging_steps=1,
        max_steps=4,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
