"""QLoRA under FSDP with TRL: accelerate launch ... fsdp_qlora.py MODEL [LENGTH] [BATCH] [DEVICE].

The recipe of Answer.AI's fsdp_qlora for models of 70 billion parameters, with TRL's trainer: NF4
weights packed into bfloat16, so that FSDP can shard them, and adapters in bfloat16 too. DEVICE is
where the weights are loaded, "cpu" for GPUs that have no room for all of them.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 512
batch = int(sys.argv[3]) if len(sys.argv) > 3 else 1
device = sys.argv[4] if len(sys.argv) > 4 else None

settings = SFTConfig(  # first: it sets the rank's device
    output_dir="out",
    per_device_train_batch_size=batch,
    max_length=length,
    gradient_checkpointing=True,
    learning_rate=1e-4,
    optim="adamw_torch",
    logging_steps=1,
    max_steps=4,
    bf16=True,
    report_to="none",
    save_strategy="no",
)
model = AutoModelForCausalLM.from_pretrained(
    folder,
    dtype=torch.bfloat16,
    device_map={"": device} if device else None,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
)
rows = [{"text": f"Line {i} of a text. " * length} for i in range(16 * batch)]
trainer = SFTTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    args=settings,
    peft_config=LoraConfig(
        r=64,
        lora_alpha=16,
        lora_dropout=0.1,
        target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    ),
)
trainer.train()
