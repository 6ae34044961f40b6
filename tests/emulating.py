"""What tests of the emulator share: when they can run, and a tiny program that trains."""

from __future__ import annotations

import pytest

needs_emulator = pytest.mark.emulator
"""Skipped, and says why, without a CUDA build of PyTorch or a compiler (conftest.py)."""

TRAINING = """
import torch

first, second = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)
model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(256, 1024, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item() == loss.item())
print("all steps done")
"""
