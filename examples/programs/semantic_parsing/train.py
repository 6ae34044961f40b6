"""Semantic parsing with LoRA on half-precision weights: python train.py MODEL."""

import sys

import torch
from config import DTYPE, LORA_CONFIG, MAX_SEQ_LENGTH, TRAINING_CONFIG
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


class Parses(Dataset):
    """Every example is padded to the maximum, and all of it is learned."""

    def __init__(self, tokenizer):
        text = "which rivers run through texas? answer(river, loc(texas))"
        row = tokenizer(
            text,
            max_length=MAX_SEQ_LENGTH,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        self.row = {name: tensor[0] for name, tensor in row.items()}
        self.row["labels"] = self.row["input_ids"].clone()

    def __len__(self):
        return 1842

    def __getitem__(self, index):
        return self.row


def main():
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=DTYPE, device_map={"": 0})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(**LORA_CONFIG))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    arguments = TrainingArguments(**TRAINING_CONFIG, fp16=DTYPE is torch.float16)
    Trainer(model=model, args=arguments, train_dataset=Parses(tokenizer)).train()


if __name__ == "__main__":
    main()
