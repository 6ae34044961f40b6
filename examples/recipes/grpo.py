"""GRPO with a colocated vLLM: python grpo.py MODEL."""

import sys

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **kwargs):
    return [float(len(str(one)) % 7) for one in completions]


GRPOTrainer(
    model=sys.argv[1],
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": ["What is the sum of 12 and 30? " * 8] * 512}),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    args=GRPOConfig(
        output_dir="grpo",
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=512,
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
    ),
).train()
