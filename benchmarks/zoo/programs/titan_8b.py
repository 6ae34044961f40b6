"""Llama 3.1 8B as torchtitan of January 2025 trains it, its `train.py` and settings unchanged.

    torchrun --nproc-per-node 8 titan_8b.py CHECKOUT RECOMPUTED [training.tensor_parallel_degree=2]

CHECKOUT is a clone of https://github.com/pytorch/torchtitan at commit 2fa6d8367. RECOMPUTED is
"none", "full", or "2" for every second layer; other settings of torchtitan's may follow. Tokenizer
and texts, which are in no repository, are made here.
"""

import base64
import json
import runpy
import sys
import tempfile
from pathlib import Path

checkout, recomputed = Path(sys.argv[1]).resolve(), sys.argv[2]
TOKENS = 128_000  # besides 256 special ones

folder = Path(tempfile.mkdtemp())
tokenizer = folder / "tokenizer.model"
codes = (bytes([i]) if i < 256 else i.to_bytes(3, "big") for i in range(TOKENS))
lines = (f"{base64.b64encode(code).decode()} {i}" for i, code in enumerate(codes))
tokenizer.write_text("\n".join(lines), encoding="ascii")
(folder / "texts").mkdir()
texts = (json.dumps({"text": f"Sample {i} of many. " * 1000}) for i in range(64))
(folder / "texts" / "texts.json").write_text("\n".join(texts), encoding="ascii")

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
    **dict(word.split("=", 1) for word in sys.argv[3:]),
}
sys.argv[1:] = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
sys.path.insert(0, str(checkout))
runpy.run_path(str(checkout / "train.py"), run_name="__main__")
