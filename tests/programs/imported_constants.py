import settings.constants as C
from trl import SFTConfig, SFTTrainer
from settings.constants import *

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=C.BATCH,
    gradient_accumulation_steps=C.TRAIN["accumulation"],
    max_length=C.LENGTH,
)
SFTTrainer("gpt2", args=args).train()
