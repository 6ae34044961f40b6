import torch
from transformers import Trainer, TrainingArguments

from parts import data, model

BATCH = 4
ACCUM = 8
if torch.cuda.get_device_properties(0).total_memory > 40e9:
    BATCH = 8
    ACCUM = 4

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUM,
    gradient_checkpointing=True,
)
Trainer(model, args, train_dataset=data).train()
