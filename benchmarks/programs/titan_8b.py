"""Llama 3.1 8B as torchtitan of January 2025 trains it: python titan_8b.py CHECKOUT RECOMPUTED.

CHECKOUT is a clone of https://github.com/pytorch/torchtitan at commit 2fa6d8367. RECOMPUTED is
"none", "full", or "2" for every second layer. torchtitan's own `train.py` and its configuration
run unchanged, as rank 0 of 8: PyTorch's fake process group stands for the other ranks. Tokenizer
and texts, which are in no repository, are made here.
"""

import base64
import functools
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

checkout, recomputed = Path(sys.argv[1]).resolve(), sys.argv[2]
RANKS, TOKENS = 8, 128_000  # besides 256 special ones

folder = Path(tempfile.mkdtemp())
tokenizer = folder / "tokenizer.model"
codes = (bytes([i]) if i < 256 else i.to_bytes(3, "big") for i in range(TOKENS))
lines = (f"{base64.b64encode(code).decode()} {i}" for i, code in enumerate(codes))
tokenizer.write_text("\n".join(lines), encoding="ascii")
(folder / "texts").mkdir()
texts = (json.dumps({"text": f"Sample {i} of many. " * 1000}) for i in range(64))
(folder / "texts" / "texts.json").write_text("\n".join(texts), encoding="ascii")

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)}
start = functools.partial(
    dist.init_process_group, "fake", rank=0, world_size=RANKS, store=FakeStore()
)
dist.init_process_group = lambda *_, **__: start()

mode = recomputed if recomputed in {"none", "full"} else "selective"
settings = {
    "job.config_file": checkout / "train_configs" / "llama3_8b.toml",
    "job.dump_folder": folder,
    "model.tokenizer_path": tokenizer,
    "training.dataset": "c4_test",
    "training.dataset_path": folder / "texts",
    "training.seq_len": 4096,
    "training.batch_size": 1,
    "activation_checkpoint.mode": mode,
    "activation_checkpoint.selective_ac_option": recomputed,
}
sys.argv[1:] = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
sys.path.insert(0, str(checkout))
runpy.run_path(str(checkout / "train.py"), run_name="__main__")
