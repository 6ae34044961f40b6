"""Writes what a program of the zoo would download, without its content: python prepare.py WHAT."""

import base64
import itertools
import json
import pickle
import random
import sys
from pathlib import Path


def resnet50() -> None:
    """Weights of torchvision's ResNet-50 where `TORCH_HOME=torch` has downloads."""
    import torch
    from torchvision.models import resnet50 as build

    folder = Path("torch/hub/checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(build(weights=None).state_dict(), folder / "resnet50-0676ba61.pth")


def vae() -> None:
    """Stable Diffusion's autoencoder where `HF_HUB_CACHE=hub` has downloads."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        sample_size=256,
    )
    folder, revision = Path("hub/models--stabilityai--sd-vae-ft-ema"), "0" * 40
    model.save_pretrained(folder / "snapshots" / revision)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(revision)


def pieces(count: int) -> list[bytes]:
    """All bytes, and pairs and triples of them: so many tokens."""
    found = [bytes(one) for n in (1, 2) for one in itertools.product(range(256), repeat=n)]
    triples = map(bytes, itertools.product(range(256), repeat=3))
    return [*found, *itertools.islice(triples, max(0, count - len(found)))][:count]


def llama3_tokenizer() -> None:
    """tokenizer.model with as many tokens as Llama 3's."""
    lines = (f"{base64.b64encode(one).decode()} {i}\n" for i, one in enumerate(pieces(128_000)))
    Path("tokenizer.model").write_text("".join(lines))


def alpaca_json() -> None:
    """alpaca.json, a list."""
    said = "This number is one of the many numbers. " * 20
    rows = [{"instruction": "Describe it.", "input": str(i), "output": said} for i in range(256)]
    Path("alpaca.json").write_text(json.dumps(rows))


def nanochat() -> None:
    """Tokenizer and shards of nanochat where `NANOCHAT_BASE_DIR=.` has them."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    names = "bos user_start user_end assistant_start assistant_end python_start python_end"
    special = [f"<|{one}|>" for one in [*names.split(), "output_start", "output_end"]]
    plain = 32768 - len(special)
    encoding = tiktoken.Encoding(
        "rustbpe",
        pat_str=r"\w+|\W+",
        mergeable_ranks={one: i for i, one in enumerate(pieces(plain))},
        special_tokens={one: plain + i for i, one in enumerate(special)},
    )
    Path("tokenizer").mkdir()
    Path("tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = torch.ones(32768, dtype=torch.int32)
    lengths[plain:] = 0
    torch.save(lengths, "tokenizer/token_bytes.pt")
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghij", k=letters.randint(2, 9))) for _ in range(5000)]
    Path("base_data_climbmix").mkdir()
    for shard in range(2):
        texts = [
            " ".join(letters.choices(words, k=letters.randint(200, 1500))) for _ in range(2000)
        ]
        path = f"base_data_climbmix/shard_{shard:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=500)


for what in sys.argv[1:]:
    globals()[what]()
