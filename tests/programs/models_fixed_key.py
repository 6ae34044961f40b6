from trl import SFTConfig, SFTTrainer

MODELS = {
    "4b": {"id": "google/gemma-3-4b-pt", "batch": 8, "accum": 2},
    "27b": {"id": "google/gemma-3-27b-pt", "batch": 1, "accum": 16},
}

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=MODELS["27b"]["batch"],
    gradient_accumulation_steps=MODELS["27b"]["accum"],
    gradient_checkpointing=True,
    max_length=4096,
)
SFTTrainer(MODELS["27b"]["id"], args=args, train_dataset=...).train()
