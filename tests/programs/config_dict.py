from transformers import Trainer, TrainingArguments

from data import build

CONFIG = {
    "model": "mistralai/Mistral-7B-v0.3",
    "batch": 8,
    "accum": 2,
    "eval": {"batch": 32, "every": 100},
    "checkpointing": True,
    "lr": 2e-5,
}

model, train, valid = build(CONFIG["model"])
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=CONFIG["batch"],
    per_device_eval_batch_size=CONFIG["eval"]["batch"],
    gradient_accumulation_steps=CONFIG["accum"],
    gradient_checkpointing=CONFIG.get("checkpointing", False),
    learning_rate=CONFIG["lr"],
)
Trainer(model=model, args=args, train_dataset=train, eval_dataset=valid).train()
