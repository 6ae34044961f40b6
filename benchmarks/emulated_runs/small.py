"""A small training loop in plain PyTorch, which FakeGPU, torch-preflight and tuner all take."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Embedding(32000, 512),
    *(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)),
    nn.Linear(512, 32000),
).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(0, 32000, (4, 128), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}", torch.cuda.max_memory_allocated())
