"""The plain training loop whose peaks were published of an RTX A6000.

loop.py MODEL BATCH LENGTH RANK pure|amp nockpt|ckpt sdpa|eager; a rank of 0 trains all parameters.
"""

import contextlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

path, batch, length, rank, precision, checkpointing, attention = sys.argv[1:]
amp = precision == "amp"
model = AutoModelForCausalLM.from_pretrained(
    path, dtype=torch.float32 if amp else torch.bfloat16, attn_implementation=attention
).cuda()
if int(rank):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = LoraConfig(r=int(rank), lora_alpha=int(rank), target_modules=targets)
    model = get_peft_model(model, adapter)
ids = torch.randint(0, 1000, (int(batch), int(length)), device="cuda")
model.train()
if checkpointing == "ckpt":
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=True)
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16) if amp else contextlib.nullcontext():
        out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    del out
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print("PEAK", torch.cuda.max_memory_allocated())
