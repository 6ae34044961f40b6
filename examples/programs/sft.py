"""QLoRA with TRL, as many write it: python sft.py MODEL."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

BATCH_SIZE = 16
MAX_LENGTH = 2048

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    dtype=torch.bfloat16,
    device_map={"": 0},
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
)
question = {"role": "user", "content": "What is it about? " * 20}
answer = {"role": "assistant", "content": "It is about memory. " * 400}
data = Dataset.from_list([{"prompt": [question], "completion": [answer]}] * 256)

trainer = SFTTrainer(
    model=model,
    train_dataset=data,
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        max_length=MAX_LENGTH,
        learning_rate=2e-4,
        bf16=True,
        max_steps=100,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
    ),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
