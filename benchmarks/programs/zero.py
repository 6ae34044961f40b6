"""DeepSpeed as its documentation has it: torchrun zero.py FOLDER '{"stage": 3}'.

FOLDER has a model's configuration. The rest is the `zero_optimization` of DeepSpeed's settings.
"""

import json
import os
import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder, zero = sys.argv[1], json.loads(sys.argv[2])
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
    # PyTorch's AdamW: DeepSpeed's own is compiled when it is first used, which needs nvcc.
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed()
config = AutoConfig.from_pretrained(folder)
with deepspeed.zero.Init(enabled=zero["stage"] == 3, config_dict_or_path=settings):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
engine, *_ = deepspeed.initialize(model=model, config=settings)
for _ in range(4):
    ids = torch.randint(0, config.vocab_size, (2, 512), device="cuda")
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
