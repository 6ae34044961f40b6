"""Trains transformers' Mamba-130M, without the kernels' package: python mamba.py [LENGTH]."""

import sys

import torch
from transformers import MambaConfig, MambaForCausalLM

length = int(sys.argv[1]) if len(sys.argv) > 1 else 512
config = MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16)
model = MambaForCausalLM(config).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
for step in range(10):
    ids = torch.randint(0, config.vocab_size, (4, length)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
