"""Tensor parallel as transformers does it: torchrun --nproc-per-node 2 tensor_parallel.py MODEL."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 512

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(4):
    torch.manual_seed(step)  # all ranks see the same sequences
    ids = torch.randint(0, model.config.vocab_size, (2, length), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
