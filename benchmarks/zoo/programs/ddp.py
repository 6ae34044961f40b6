"""DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py MODEL [LENGTH]."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    torch.manual_seed(4 * rank + step)
    # Each rank has another number of tokens; the mean is over those of all.
    ids = torch.randint(0, model.module.config.vocab_size, (2, length - 8 * rank), device="cuda")
    count = torch.tensor(ids.numel(), device="cuda")
    dist.all_reduce(count)
    loss = model(input_ids=ids, labels=ids).loss * ids.numel() * dist.get_world_size() / count
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: {count.item()} tokens, loss {loss.item():.3f}")
dist.destroy_process_group()
