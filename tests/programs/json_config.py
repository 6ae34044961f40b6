import argparse
import json
from pathlib import Path

from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path, required=True)
cfg = json.loads(parser.parse_args().config.read_text())

SFTTrainer(
    cfg["model"],
    args=SFTConfig(
        "out",
        per_device_train_batch_size=cfg["batch_size"],
        gradient_accumulation_steps=cfg["accumulate"],
        gradient_checkpointing=cfg["checkpointing"],
    ),
    train_dataset=...,
).train()
