import argparse

from trl import SFTConfig, SFTTrainer

MODELS = {
    "4b": {"id": "google/gemma-3-4b-pt", "batch": 8, "accum": 2},
    "27b": {"id": "google/gemma-3-27b-pt", "batch": 1, "accum": 16},
}

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=list(MODELS), default="4b")
spec = MODELS[parser.parse_args().model]

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=spec["batch"],
    gradient_accumulation_steps=spec["accum"],
    max_length=4096,
)
SFTTrainer(spec["id"], args=args, train_dataset=...).train()
