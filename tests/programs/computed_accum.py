import os

from transformers import Trainer, TrainingArguments

from parts import data, model

GLOBAL_BATCH = 64
MICRO_BATCH = 4
world = int(os.environ.get("WORLD_SIZE", "1"))

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=MICRO_BATCH,
    gradient_accumulation_steps=GLOBAL_BATCH // (MICRO_BATCH * world),
    gradient_checkpointing=True,
)
Trainer(model, args, train_dataset=data).train()
