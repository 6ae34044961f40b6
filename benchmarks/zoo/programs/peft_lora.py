"""The loop of peft's causal-LM examples, with Accelerate: python peft_lora.py MODEL [LENGTH]."""

import sys

import torch
from accelerate import Accelerator
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

accelerator = Accelerator(mixed_precision="bf16")
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.eos_token


def encoded(number: int) -> dict[str, torch.Tensor]:
    """One tweet and its label: what is asked counts for nothing in the loss."""
    question = tokenizer(f"Tweet text: my order {number} is late. Label: ")["input_ids"]
    answer = [*tokenizer("complaint " * (number + 1))["input_ids"], tokenizer.eos_token_id]
    ids = (question + answer)[:length]
    labels = ([-100] * len(question) + answer)[:length]
    space = length - len(ids)
    return {
        "input_ids": torch.tensor([tokenizer.pad_token_id] * space + ids),
        "attention_mask": torch.tensor([0] * space + [1] * len(ids)),
        "labels": torch.tensor([-100] * space + labels),
    }


batches = DataLoader(
    [encoded(i) for i in range(32)], batch_size=4, shuffle=True, collate_fn=default_data_collator
)
model = AutoModelForCausalLM.from_pretrained(folder)
model = get_peft_model(
    model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1)
)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
schedule = get_linear_schedule_with_warmup(optimizer, 0, len(batches))
model, batches, optimizer, schedule = accelerator.prepare(model, batches, optimizer, schedule)
model.train()
total = 0.0
for batch in batches:
    loss = model(**batch).loss
    total += loss.detach().float()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
print(f"mean loss {total / len(batches):.3f}")
