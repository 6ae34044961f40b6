import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from nets import Decoder, corpus

ACCUM = 4

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
train_loader = DataLoader(corpus("train"), batch_size=args.batch, shuffle=True, num_workers=4)
val_loader = DataLoader(corpus("val"), batch_size=64)

for epoch in range(3):
    model.train()
    for step, batch in enumerate(train_loader):
        tokens = batch.cuda(non_blocking=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / ACCUM).backward()
        if (step + 1) % ACCUM == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        print(sum(model(b.cuda()).mean().item() for b in val_loader))
