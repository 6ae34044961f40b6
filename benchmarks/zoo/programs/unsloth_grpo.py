"""Unsloth's GRPO recipe without vLLM: python unsloth_grpo.py MODEL [NEW_TOKENS]."""

import sys

from unsloth import FastLanguageModel  # isort: skip - it has to come before what it replaces

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

folder = sys.argv[1]
tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 64

model, tokenizer = FastLanguageModel.from_pretrained(
    folder, max_seq_length=512, load_in_4bit=False, fast_inference=False
)
model = FastLanguageModel.get_peft_model(
    model, r=32, lora_alpha=32, use_gradient_checkpointing="unsloth"
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[lambda completions, **_: [float(len(one)) for one in completions]],
    train_dataset=Dataset.from_list([{"prompt": f"What comes after {i}?"} for i in range(32)]),
    args=GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=tokens,
        logging_steps=1,
        max_steps=4,
        optim="adamw_8bit",
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
