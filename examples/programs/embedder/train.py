"""An embedder of coded descriptions, four encoders and experts: python train.py MODEL [STAGE]."""

import math
import sys
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModel

CHANNELS = ("title", "description", "excluded", "examples")
SHORT = 24  # tokens of a title

conf = Path(__file__).parent / "conf"
config = yaml.safe_load((conf / "config.yaml").read_text())
stage = sys.argv[2] if len(sys.argv) > 2 else config["curriculum"]["first"]
curriculum = yaml.safe_load((conf / "curriculum" / f"{stage}.yaml").read_text())
negatives = curriculum["n_negatives"]


class Pairs(Dataset):
    """An anchor, a positive and the negatives: of each the tokens of all channels."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = config["model"]["max_length"]
        return {
            name: torch.randint(
                1000, (2 + negatives, SHORT if name == "title" else length), generator=generator
            )
            for name in CHANNELS
        }


class Experts(nn.Module):
    def __init__(self, width, hidden, count, best):
        super().__init__()
        self.best = best
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, width)
            )
            for _ in range(count)
        )

    def forward(self, samples):
        shares = self.gate(samples).softmax(dim=-1)
        best, chosen = shares.topk(self.best, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(samples)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                output = expert(samples[rows]) * best[rows, place].unsqueeze(-1)
                mixed.index_add_(0, rows, output.to(mixed.dtype))
        busy = nn.functional.one_hot(chosen, len(self.experts)).float().sum(dim=1).mean(dim=0)
        return mixed, len(self.experts) * (busy * shares.mean(dim=0)).sum()


class Embedder(nn.Module):
    def __init__(self, name):
        super().__init__()
        architecture = AutoConfig.from_pretrained(name)
        lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")
        self.encoders = nn.ModuleDict()
        for channel in CHANNELS:
            encoder = AutoModel.from_config(architecture)
            encoder.gradient_checkpointing_enable({"use_reentrant": False})
            encoder.enable_input_require_grads()
            self.encoders[channel] = get_peft_model(encoder, lora)
        width = architecture.hidden_size
        self.experts = Experts(4 * width, config["model"]["expert_hidden"], 4, 2)
        self.projection = nn.Linear(4 * width, width)
        self.hyperbolic = nn.Linear(width, width + 1)

    def forward(self, texts):
        pooled = []
        for channel, tokens in texts.items():
            mask = torch.ones_like(tokens)
            mask[:, -1] = 0  # the last token is padding
            hidden = self.encoders[channel](input_ids=tokens, attention_mask=mask)
            weights = mask.unsqueeze(-1).expand(hidden.last_hidden_state.shape).float()
            total = (hidden.last_hidden_state * weights).sum(dim=1)
            pooled.append(total / weights.sum(dim=1).clamp(min=1e-9))
        mixed, balance = self.experts(torch.cat(pooled, dim=-1))
        tangents = self.hyperbolic(self.projection(mixed)).float()
        norm = tangents.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        return torch.cat([norm.cosh(), norm.sinh() * tangents / norm], dim=-1), balance


def distance(left, right):
    """Of points on the hyperboloid (Nickel and Kiela 2018)."""
    product = left[..., 0] * right[..., 0] - (left[..., 1:] * right[..., 1:]).sum(dim=-1)
    return torch.acosh(product.clamp(min=1 + 1e-5))


loader = DataLoader(
    Pairs(),
    batch_size=config["data_loader"]["batch_size"],
    num_workers=config["data_loader"]["num_workers"],
    shuffle=True,
)
model = Embedder(sys.argv[1]).cuda()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
print(f"{sum(p.numel() for p in trained):,} trainable parameters")
optimizer = torch.optim.AdamW(trained, lr=float(config["training"]["learning_rate"]))
scaler = torch.amp.GradScaler("cuda")
accumulation = config["training"]["trainer"]["accumulate_grad_batches"]

for step, batch in enumerate(loader):
    groups = []
    for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        texts = {name: tokens[:, part].flatten(0, 1).cuda() for name, tokens in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            groups.append(model(texts))
    (anchors, first), (positives, second), (others, third) = groups
    others = others.view(len(anchors), negatives, -1)
    apart = torch.cat(
        [distance(anchors, positives).unsqueeze(1), distance(anchors.unsqueeze(1), others)], dim=1
    )
    labels = torch.zeros(len(apart), dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(-apart / 0.07, labels) + 0.01 * (first + second + third)
    scaler.scale(loss / accumulation).backward()
    if (step + 1) % accumulation == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            print(f"step {step}: the loss is {loss.item()}")
