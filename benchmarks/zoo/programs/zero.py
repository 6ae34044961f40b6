"""DeepSpeed as its documentation has it: python zero.py FOLDER SETTINGS, or under torchrun.

FOLDER has a hollow checkpoint. SETTINGS are JSON: `zero` is DeepSpeed's `zero_optimization`, the
rest as in a case of `benchmarks.zero`. With `ranks` this process is the first of so many, and
PyTorch's fake process group stands for the others: collectives return at once, and nothing is sent.
Nothing of tuner is imported.
"""

import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

folder, given = sys.argv[1], json.loads(sys.argv[2])
zero, ranks = given["zero"], given.get("ranks")
rank, grad_accum = given.get("lora_rank", 0), given.get("grad_accum", 1)
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": grad_accum,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
    "zero_allow_untested_optimizer": True,
}
if "offload_optimizer" in zero:
    # PyTorch's AdamW on the host: DeepSpeed's own is compiled when it is first used.
    settings["zero_force_ds_cpu_optimizer"] = False

if ranks:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed()
config = AutoConfig.from_pretrained(folder)
if given.get("nf4"):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": 0}
    )
else:
    with deepspeed.zero.Init(enabled=zero["stage"] == 3, config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if given.get("checkpointing"):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if rank:
    from peft import LoraConfig, get_peft_model

    if given.get("checkpointing"):
        model.enable_input_require_grads()
    adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
if given.get("optimizer") == "adamw_8bit":
    from bitsandbytes.optim import AdamW8bit as AdamW
else:
    from torch.optim import AdamW
engine, *_ = deepspeed.initialize(model=model, optimizer=AdamW(trainable, lr=1e-4), config=settings)
for _ in range(3 * grad_accum):
    ids = torch.randint(0, config.vocab_size, (2, 512), device="cuda")
    mask = torch.ones_like(ids)
    engine.backward(engine(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss)
    engine.step()
