"""Unsloth's own LoRA recipe: python unsloth_lora.py MODEL [LENGTH]."""

import sys

from unsloth import FastLanguageModel  # isort: skip - it has to come before what it replaces

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

model, tokenizer = FastLanguageModel.from_pretrained(
    folder, max_seq_length=length, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(model, r=32, use_gradient_checkpointing="unsloth")
rows = [{"text": f"Sample {i} of many. " * (length // 32 + i)} for i in range(32)]
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        max_length=length,
        dataset_text_field="text",
        logging_steps=1,
        max_steps=4,
        optim="adamw_8bit",
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
