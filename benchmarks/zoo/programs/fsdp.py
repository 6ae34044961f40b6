"""fully_shard, layer by layer: torchrun --nproc-per-node 2 fsdp.py MODEL [LENGTH]."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.gradient_checkpointing_enable()
model.train()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    torch.manual_seed(4 * rank + step)
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step}: loss {mean.item():.3f}, norm {norm.full_tensor().item():.3f}")
dist.destroy_process_group()
