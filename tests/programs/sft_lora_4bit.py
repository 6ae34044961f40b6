import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL_ID = "google/gemma-3-27b-it"

bnb = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
model = AutoModelForCausalLM.from_pretrained(
    MODEL_ID, quantization_config=bnb, attn_implementation='eager', device_map={"": 0}
)
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
config = SFTConfig(
    output_dir="gemma-sft", per_device_train_batch_size=2, gradient_accumulation_steps=4,
    max_length=2048, packing=False, optim="paged_adamw_8bit", use_liger_kernel=False,
    num_train_epochs=1,
)
SFTTrainer(
    model=model, args=config, train_dataset=load_dataset("json", data_files="d.jsonl")["train"],
    peft_config=peft_config,
).train()
