"""LoRA on random tokens, as people write it: `python train.py MODEL_FOLDER --batch-size 4`."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--max-length", type=int, default=1024)
parser.add_argument("--rank", type=int, default=32)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.bfloat16, device_map={"": "cuda"}
)
model.train()  # a loaded model does not train, and without it nothing is checkpointed
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=args.rank, target_modules="all-linear"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)

for step in range(100):
    tokens = torch.randint(0, model.config.vocab_size, (args.batch_size, args.max_length))
    tokens = tokens.to("cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
