"""SFTTrainer with Liger's kernels and fused loss: python liger.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

model = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rows = [{"text": f"Sample {i} of many. " * (length // 32 + i)} for i in range(32)]
trainer = SFTTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        max_length=length,
        use_liger_kernel=True,
        model_init_kwargs={"dtype": "bfloat16"},
        logging_steps=1,
        max_steps=4,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
