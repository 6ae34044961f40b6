"""Context parallel with Trainer and accelerate's ParallelismConfig, over FSDP2.

accelerate launch --use_fsdp --fsdp_version 2 ... context_parallel.py MODEL [LENGTH] [RANKS]
"""

import sys

import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 2

arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    max_steps=4,
    logging_steps=1,
    bf16=True,
    report_to="none",
    save_strategy="no",
    parallelism_config=ParallelismConfig(cp_size=ranks),
)
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, attn_implementation="sdpa", use_cache=False
)
ids = [[(7 * i + j) % 250 for j in range(length)] for i in range(16)]
rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
Trainer(
    model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator
).train()
