"""Settings of the semantic parser."""

import torch

MAX_SEQ_LENGTH = 512
DTYPE = torch.float16

LORA_CONFIG = {
    "r": 128,
    "lora_alpha": 256,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
}

TRAINING_CONFIG = {
    "output_dir": "parser",
    "num_train_epochs": 15,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "gradient_checkpointing": True,
    "learning_rate": 2e-4,
    "optim": "adamw_torch",
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
}
