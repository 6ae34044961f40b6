import sys

import yaml
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

cfg = yaml.safe_load(open(sys.argv[1]))

lora = LoraConfig(r=cfg["lora"]["r"], lora_alpha=cfg["lora"]["alpha"])
args = SFTConfig(
    output_dir=cfg["out"],
    per_device_train_batch_size=cfg["train"]["batch_size"],
    per_device_eval_batch_size=cfg["eval"]["batch_size"],
    gradient_accumulation_steps=cfg["train"]["accum"],
    gradient_checkpointing=cfg["train"]["checkpointing"],
    max_length=cfg["train"]["seq_len"],
)
SFTTrainer(cfg["model"], args=args, train_dataset=..., peft_config=lora).train()
