"""A loop without a trainer, fp32 and scaled fp16: python plain_loop.py MODEL [LENGTH]."""

import math
import sys

import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
scaler = torch.amp.GradScaler()
best = math.inf
for step in range(4):
    ids = torch.randint(0, model.config.vocab_size, (2, length)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    if not torch.isfinite(loss):
        sys.exit(f"the loss of step {step} is {loss.item()}")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    best = min(best, loss.item())
    print(f"step {step}: loss {loss.item():.3f}, norm {norm.item():.3f}, best {best:.3f}")
