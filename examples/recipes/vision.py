"""LoRA of a vision-language model: python vision.py."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

SFTTrainer(
    model="Qwen/Qwen3-VL-4B-Instruct",
    train_dataset=load_dataset("trl-lib/llava-instruct-mix", split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    args=SFTConfig(
        output_dir="vision",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_length=2048,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
    ),
).train()
