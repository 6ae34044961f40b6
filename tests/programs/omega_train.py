import sys

from omegaconf import OmegaConf
from trl import SFTConfig, SFTTrainer

cfg = OmegaConf.load(sys.argv[1])
cfg.merge_with_cli()

SFTTrainer(
    cfg.model.name,
    args=SFTConfig(
        output_dir=cfg.output,
        per_device_train_batch_size=cfg.trainer.micro_batch,
        gradient_accumulation_steps=cfg.trainer.accumulation,
        gradient_checkpointing=cfg.trainer.checkpointing,
        max_length=cfg.data.max_length,
    ),
    train_dataset=...,
).train()
