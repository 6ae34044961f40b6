"""Unsloth's DPO recipe, 4 bits: python unsloth_dpo.py MODEL [LENGTH]."""

import sys

from unsloth import FastLanguageModel, PatchDPOTrainer  # isort: skip - before what it replaces

PatchDPOTrainer()

from datasets import Dataset  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

model, tokenizer = FastLanguageModel.from_pretrained(
    folder, max_seq_length=length, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(
    model, r=64, lora_alpha=64, use_gradient_checkpointing="unsloth"
)
rows = [
    {
        "prompt": f"What comes after {i}? ",
        "chosen": f"{i + 1}. " * (length // 8),
        "rejected": f"{i}. " * (length // 8),
    }
    for i in range(32)
]
trainer = DPOTrainer(
    model=model,
    ref_model=None,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    args=DPOConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_length=length,
        beta=0.1,
        logging_steps=1,
        max_steps=4,
        optim="adamw_8bit",
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
