"""transformers' Trainer, all weights in bfloat16: python hf_trainer.py MODEL [LENGTH]."""

import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
texts = Dataset.from_dict(
    {"text": [f"Line {i} of a text. " * (i + length // 32) for i in range(64)]}
)
tokens = texts.map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=length),
    batched=True,
    remove_columns=["text"],
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=4,
        logging_steps=1,
        bf16=True,
        train_sampling_strategy="group_by_length",
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=tokens,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
