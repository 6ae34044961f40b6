"""TRL's RewardTrainer, all weights trained: python trl_reward.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from trl import RewardConfig, RewardTrainer

model = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rows = [
    {
        "prompt": f"What comes after {i}? ",
        "chosen": f"After {i} comes {i + 1}. " * (length // 64 + i),
        "rejected": f"After {i} comes {i}. " * (length // 96 + i),
    }
    for i in range(32)
]
trainer = RewardTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=RewardConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        max_length=length,
        logging_steps=1,
        max_steps=4,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
