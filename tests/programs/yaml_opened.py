"""Opens its settings by itself."""
from pathlib import Path

import yaml
from torch.utils.data import DataLoader

from parts import optimizer, rows

HERE = Path(__file__).resolve().parent
with open(HERE / "settings" / "base.yaml") as f:
    cfg = yaml.safe_load(f)

loader = DataLoader(rows, batch_size=cfg["data"]["batch_size"], shuffle=True)
accumulation = cfg["optim"]["accumulate_grad_batches"]
for step, batch in enumerate(loader):
    (batch.loss / accumulation).backward()
    if (step + 1) % accumulation == 0:
        optimizer.step()
