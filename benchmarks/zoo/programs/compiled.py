"""torch.compile around model and optimizer: python compiled.py MODEL [LENGTH]."""

import sys

import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
step_of = torch.compile(model)
for step in range(4):
    ids = torch.randint(0, model.config.vocab_size, (2, length), device="cuda")
    loss = step_of(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
