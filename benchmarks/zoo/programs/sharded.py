"""FSDP2 as people write it, as one rank of many: python sharded.py FOLDER SETTINGS.

FOLDER has a hollow checkpoint; SETTINGS are those of a case of `benchmarks.several_gpus`, in JSON.
PyTorch's fake process group stands for the other ranks: collectives return at once, and nothing is
sent. Under torchrun the ranks are real, and exchange over NCCL. Nothing of tuner is imported.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

folder, settings = sys.argv[1], SimpleNamespace(**json.loads(sys.argv[2]))
dtype = getattr(torch, settings.dtype)

torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if "RANK" in os.environ:
    dist.init_process_group("nccl")
else:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(settings.ranks)}
    dist.init_process_group("fake", rank=0, world_size=settings.ranks, store=FakeStore())

config = AutoConfig.from_pretrained(folder)
if settings.nf4:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization, device_map={"": 0}
    )
else:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
if settings.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if settings.lora_rank:
    from peft import LoraConfig, get_peft_model

    if settings.checkpointing:
        model.enable_input_require_grads()
    adapters = LoraConfig(r=settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters, low_cpu_mem_usage=not settings.nf4)
model.train()


def by_hand(model):
    """As PyTorch's documentation: each layer, then the rest."""
    policy = MixedPrecisionPolicy()
    if settings.mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    copies = settings.ranks // settings.group
    shape = (settings.ranks,) if copies == 1 else (copies, settings.group)
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=names)
    decoder = model.get_base_model().model if settings.lora_rank else model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not settings.nf4:
        model.to_empty(device="cuda")
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def by_accelerate(model):
    """As Trainer does it: accelerate wraps, widens and reduces."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    copies = settings.ranks // settings.group
    sizes = {"dp_replicate_size": copies, "dp_shard_size": settings.group}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=settings.reshard,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if settings.mixed else "no",
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(**sizes) if copies > 1 else None,
    )
    if not settings.nf4:
        model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return accelerator.prepare(model, optimizer)


model, optimizer = (by_accelerate if settings.accelerate else by_hand)(model)
trainable = [p for p in model.parameters() if p.requires_grad]
shape = (settings.micro_batch, settings.length)
for _ in range(3):
    for micro_step in range(settings.grad_accum):
        model.set_requires_gradient_sync(micro_step == settings.grad_accum - 1)
        ids = torch.randint(0, config.vocab_size, shape, device="cuda")
        mask = torch.ones(shape, dtype=torch.long, device="cuda")
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
        if settings.accelerate:  # as in Trainer, nothing holds the other outputs
            model(**inputs, use_cache=False).loss.backward()
        else:
            outputs = model(**inputs, use_cache=False)
            outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
