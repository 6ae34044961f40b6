"""Training loops, run on the CPU and on an emulated GPU: the sizes and counts that they meet.

Usage: values_training.py WHAT DEVICE FILE; they print much of their own, so that a file is written.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional

from tests.values_models import PLAIN, Notes


def backward(notes: Notes) -> None:
    """Backward through operators whose sizes masks and indices decide."""
    device, draw = notes.device, notes.draw
    table = torch.randn(64, 300).to(device).requires_grad_()
    mask = (draw(64, 300, below=10) > 6).to(device)
    columns, rows = draw(20, below=300).to(device), draw(9, below=64).to(device)

    picked = torch.zeros_like(table)
    picked[mask] = table[mask] * 2
    picked[0] = 1
    scattered = torch.zeros_like(table).masked_scatter(mask, table[mask] * 3)
    added = torch.zeros_like(table).index_put(
        (rows, columns[:9]), table.flatten()[:9], accumulate=True
    )
    by_mask = torch.zeros_like(table).index_put((mask,), table[mask], accumulate=True)
    for out in (
        table[mask],
        table[mask.any(-1)][:, columns],
        picked,
        scattered,
        added,
        by_mask,
        torch.masked_select(table, mask),
        table.gather(1, draw(64, 3, below=300).to(device)),
        torch.zeros_like(table).scatter_add(1, draw(64, 8, below=300).to(device), table[:, :8]),
        table[:, ::2][rows],
    ):
        out.square().sum().backward(retain_graph=True)
        notes.note(out)

    ids, inverse, counts = torch.unique(
        draw(500, below=60).to(device), return_inverse=True, return_counts=True
    )
    embedding = torch.nn.Embedding(100, 16).to(device)
    repeated = torch.repeat_interleave(embedding(ids), counts, dim=0)
    (embedding(ids)[inverse].sum() + repeated.mean()).backward()
    notes.note(ids, repeated, counts.tolist())

    logits, labels = torch.randn(40, 50).to(device).requires_grad_(), draw(40, below=50).to(device)
    labels[3:9] = -100
    kept = labels != -100
    functional.cross_entropy(logits, labels).backward()
    functional.cross_entropy(logits[kept], labels[kept]).backward()
    notes.note(logits[kept], int(kept.sum()))


def scaled(notes: Notes) -> None:
    """fp16 with a scaler, clipping, a guard against NaN, and a metric of argmax."""
    device = notes.device
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 300)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    for _ in range(5):
        rows, labels = torch.randn(512, 256).to(device), notes.draw(512, below=300).to(device)
        with torch.autocast(device, dtype=dtype):
            logits = model(rows)
            loss = functional.cross_entropy(logits.float(), labels, ignore_index=7)
        if not torch.isfinite(loss):
            raise SystemExit("the loss is not finite")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        right = (logits.argmax(-1) == labels).float().mean().item()
        notes.note(scaler.get_scale(), int((labels != 7).sum()), 0 <= right <= 1)


def sft(notes: Notes, **options: Any) -> None:
    """TRL's SFTTrainer, with its own loss in chunks and its counts of tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(500)} | {"<pad>": 500, "<eos>": 501, "<unk>": 502}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    dice = random.Random(0)

    def text(most: int) -> str:
        return " ".join(f"w{dice.randrange(500)}" for _ in range(dice.randrange(3, most)))

    rows = [{"prompt": text(40), "completion": " " + text(60)} for _ in range(24)]
    model = LlamaForCausalLM(LlamaConfig(**PLAIN, pad_token_id=500))

    class Trainer(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            sizes = {k: list(v.shape) for k, v in inputs.items() if torch.is_tensor(v)}
            items = named.get("num_items_in_batch", rest[-1] if rest else None)
            notes.note(sizes, int((inputs["labels"] != -100).sum()), int(items))
            return super().compute_loss(model, inputs, *rest, **named)

    with TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=notes.device == "cpu",
            bf16=notes.device != "cpu",
            **options,
        )
        trainer = Trainer(
            model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
    for row in trainer.state.log_history:
        if "loss" in row:
            finite = all(abs(row[name]) < 1e6 for name in ("loss", "grad_norm", "entropy"))
            notes.note(row["num_tokens"], row["step"], finite)


LOOPS: dict[str, Callable[[Notes], None]] = {
    "backward": backward,
    "scaled": scaled,
    "sft-chunked": lambda notes: sft(notes, loss_type="chunked_nll"),
    "sft-packed": lambda notes: sft(notes, packing=True, max_length=64),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    taken = Notes(sys.argv[2])
    LOOPS[sys.argv[1]](taken)
    sys.stdout.flush()
    Path(sys.argv[3]).write_text(json.dumps(taken.met), encoding="utf-8")
