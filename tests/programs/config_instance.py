from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from model import GPT, TextData


@dataclass
class Config:
    batch_size: int = 12
    grad_accum: int = 5
    block_size: int = 1024
    lr: float = 6e-4
    grad_ckpt: bool = False
    steps: int = 1_000


cfg = Config()
model = GPT(checkpointing=cfg.grad_ckpt).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, fused=True)
train = DataLoader(TextData("train.bin", cfg.block_size), batch_size=cfg.batch_size)
for step, (x, y) in enumerate(train):
    loss = model(x.cuda(), y.cuda()) / cfg.grad_accum
    loss.backward()
    if (step + 1) % cfg.grad_accum == 0:
        opt.step()
        opt.zero_grad(set_to_none=True)
