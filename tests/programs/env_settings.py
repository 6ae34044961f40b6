import os

from transformers import Trainer, TrainingArguments

from parts import data, model

BATCH = int(os.environ.get("BATCH", "4"))
ACCUM = int(os.environ.get("ACCUM", "8"))

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUM,
)
Trainer(model, args, train_dataset=data).train()
