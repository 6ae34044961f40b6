from trl import SFTConfig, SFTTrainer

training = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "max_length": 1024,
}
evaluation = {"per_device_eval_batch_size": 8, "eval_strategy": "steps"}

SFTTrainer("gpt2", args=SFTConfig("out", **training, **evaluation), train_dataset=...).train()
