"""A training loop that knows nothing of tuner."""

import argparse

import torch
from torch import nn
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=100_000)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 1))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

for _ in (bar := tqdm(range(options.steps))):
    inputs = torch.randn(options.batch, 64, device=device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    bar.set_postfix(loss=f"{loss.item():.3f}")
