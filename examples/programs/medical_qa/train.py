"""Medical question answering with QLoRA: python train.py MODEL [DATA.jsonl]."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

CONFIG = {
    "lora_r": 128,
    "lora_alpha": 256,  # twice the rank
    "batch": 4,
    "grad_accum": 8,
    "max_length": 1024,
    "grad_ckpt": False,  # faster
    "learning_rate": 1e-4,
    "four_bit": True,
}

if len(sys.argv) > 2:
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
else:
    question = "A patient of 54 years has had a cough for three weeks. What is the next step?"
    rows = [{"question": question, "answer": "An X-ray of the chest. " * 200}] * 256
texts = [f"### Question:\n{row['question']}\n### Answer:\n{row['answer']}" for row in rows]

if CONFIG["four_bit"]:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
else:
    quantization = BitsAndBytesConfig(load_in_8bit=True)

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    quantization_config=quantization,
    dtype=torch.bfloat16,
    device_map={"": 0},
    attn_implementation="sdpa",
)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(
    model,
    LoraConfig(
        r=CONFIG["lora_r"],
        lora_alpha=CONFIG["lora_alpha"],
        lora_dropout=0.05,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        task_type="CAUSAL_LM",
    ),
)
model.print_trainable_parameters()

trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"text": text} for text in texts]),
    args=SFTConfig(
        output_dir="adapters",
        per_device_train_batch_size=CONFIG["batch"],
        gradient_accumulation_steps=CONFIG["grad_accum"],
        max_length=CONFIG["max_length"],
        gradient_checkpointing=CONFIG["grad_ckpt"],
        learning_rate=CONFIG["learning_rate"],
        optim="paged_adamw_8bit",
        bf16=True,
        max_grad_norm=0.3,
        num_train_epochs=3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
