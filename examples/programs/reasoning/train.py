"""Chains of thought with LoRA: python train.py --model MODEL --batch_size 4."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_seq_length", type=int, default=1536)
    parser.add_argument("--lora_rank", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-6)
    return parser.parse_args()


def main():
    args = parse()
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
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
    )
    model = get_peft_model(model, lora)

    def tokenize(row):
        return tokenizer(row["text"], truncation=True, max_length=args.max_seq_length)

    texts = ["Let us think step by step. " * 400] * 512
    data = Dataset.from_dict({"text": texts}).map(tokenize, remove_columns=["text"])
    arguments = TrainingArguments(
        output_dir="reasoning",
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        num_train_epochs=3,
        bf16=True,
        tf32=True,
        gradient_checkpointing=True,
        dataloader_pin_memory=True,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator).train()


if __name__ == "__main__":
    main()
