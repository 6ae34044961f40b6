"""A mixture of experts, LoRA on its attention: python experts.py MODEL [LENGTH]."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, device_map={"": 0}, output_router_logits=True
)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(
    model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
most = model.config.num_experts_per_tok
for step in range(4):
    ids = torch.randint(0, model.config.vocab_size, (2, length), device="cuda")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    chosen = out.router_logits[0].topk(most, dim=-1).indices.flatten()
    load = torch.bincount(chosen, minlength=out.router_logits[0].shape[-1])
    print(
        f"step {step}: loss {out.loss.item():.3f}, tokens an expert of layer 0:"
        f" {load.min().item()} to {load.max().item()}, in all {load.sum().item()}"
    )
