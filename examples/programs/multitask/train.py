"""Five tasks on a frozen RoBERTa, routed, in phases: python train.py MODEL."""

import sys
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModel

with open(Path(__file__).parent / "config.yaml") as file:  # noqa: PTH123 - as people write it
    config = yaml.safe_load(file)

RANKS = {"sentiment": 16, "qa": 24, "summary": 32, "code": 32, "translation": 32}
TARGETS = {"summary": 128, "code": 256, "translation": 256}


class Tokens(Dataset):
    """Every example is padded to the longest."""

    def __len__(self):
        return config["data"]["examples"]

    def __getitem__(self, index):
        length = config["data"]["max_input_length"]
        generator = torch.Generator().manual_seed(index)
        item = {"input_ids": torch.randint(4, 1000, (length,), generator=generator)}
        item["sentiment"] = torch.randint(2, (), generator=generator)
        item["qa"] = torch.randint(length, (2,), generator=generator)
        for name, positions in TARGETS.items():
            item[name] = torch.randint(4, 1000, (positions,), generator=generator)
        return item


def lora_set(width, wide, rank):
    """The adapters of one layer: query, key, value, dense and both layers of its MLP."""
    shapes = [(width, width)] * 4 + [(width, wide), (wide, width)]
    return nn.ModuleList(
        nn.Sequential(nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False))
        for before, after in shapes
    )


class Generation(nn.Module):
    """Words at each target position from the pooled vector and the position."""

    def __init__(self, width, words, positions):
        super().__init__()
        self.positions = positions
        self.first = nn.Linear(width + 1, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, words))

    def forward(self, hidden):
        pooled = hidden[:, 0].unsqueeze(1).expand(-1, self.positions, -1)
        places = torch.linspace(0, 1, self.positions, device=hidden.device)
        places = places.view(1, -1, 1).expand(len(hidden), -1, -1)
        return self.layers(self.first(torch.cat([pooled, places], dim=-1)))


class Multitask(nn.Module):
    def __init__(self, name):
        super().__init__()
        architecture = AutoConfig.from_pretrained(name)
        width, words = architecture.hidden_size, architecture.vocab_size
        self.backbone = AutoModel.from_config(architecture, add_pooling_layer=False)
        self.backbone.requires_grad_(False)
        layers, wide = architecture.num_hidden_layers, architecture.intermediate_size
        self.adapters = nn.ModuleDict(
            {
                task: nn.ModuleList(lora_set(width, wide, rank) for _ in range(layers))
                for task, rank in RANKS.items()
            }
        )
        self.heads = nn.ModuleDict(
            {
                "sentiment": nn.Sequential(nn.Linear(width, width // 2), nn.Linear(width // 2, 2)),
                "qa": nn.Linear(width, 2),
                **{name: Generation(width, words, n) for name, n in TARGETS.items()},
            }
        )
        self.router = nn.Sequential(
            nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 5)
        )

    def forward(self, input_ids):
        with torch.no_grad():
            hidden = self.backbone(input_ids=input_ids).last_hidden_state
        weights = self.router(hidden[:, 0]).softmax(dim=-1)
        outputs = {}
        for number, (task, head) in enumerate(self.heads.items()):
            output = head(hidden[:, 0] if task == "sentiment" else hidden)
            shape = (-1,) + (1,) * (output.dim() - 1)
            outputs[task] = output * weights[:, number].view(shape)
        return outputs


loader = DataLoader(
    Tokens(),
    batch_size=config["training"]["batch_size"],
    num_workers=config["data"]["num_workers"],
    shuffle=True,
    pin_memory=True,
)
torch.backends.cudnn.benchmark = True
model = Multitask(sys.argv[1]).cuda()
phase = config["training"]["phase"]
if phase == 2:  # the router learns, adapters and heads rest
    for module in (model.adapters, model.heads):
        module.requires_grad_(False)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=float(config["training"]["learning_rate"]))
scaler = torch.amp.GradScaler("cuda")
accumulation = config["training"]["gradient_accumulation_steps"]


def micro_step(batch):
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(batch["input_ids"])
        loss = nn.functional.cross_entropy(outputs["sentiment"], batch["sentiment"])
        loss = loss + nn.functional.cross_entropy(outputs["qa"], batch["qa"])
        for task in TARGETS:
            logits = outputs[task].flatten(0, 1)
            loss = loss + nn.functional.cross_entropy(logits, batch[task].flatten())
    scaler.scale(loss / accumulation).backward()


for step, batch in enumerate(loader):
    micro_step({name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()})
    if (step + 1) % accumulation == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
