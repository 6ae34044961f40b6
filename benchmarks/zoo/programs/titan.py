"""torchtitan's own debugging model, FSDP2: torchrun --nproc-per-node 8 titan.py MODEL [LENGTH].

The data that lies in its repository, and in no package of it, is made here; of MODEL only the
tokenizer is used.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from torchtitan.train import main

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 1024

data = Path("tests/assets/c4_test")
data.mkdir(parents=True, exist_ok=True)
made = Path(f"made-by-{os.environ['RANK']}.json")
rows = [{"text": f"Sample {i} of many. " * (length // 32 + i)} for i in range(256)]
made.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
made.replace(data / "data.json")  # whole at any time: other ranks read it

# Without the chat template: torchtitan does not read what transformers marks in one.
tokenizer = Path(f"tokenizer-of-{os.environ['RANK']}")
tokenizer.mkdir(exist_ok=True)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(Path(folder) / name, tokenizer)

sys.argv[1:] = ["--module", "llama3", "--config", "llama3_debugmodel_varlen_attn"]
sys.argv += ["--hf_assets_path", str(tokenizer), "--training.seq_len", str(length)]
# Its default backend needs a PyTorch newer than 2.13.
sys.argv += ["--parallelism.spmd_backend", "partial_dtensor"]
main()
